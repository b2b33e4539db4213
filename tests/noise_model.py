"""NOISE: a random network of the released architecture, 12 layers wide enough to be exercised; its text is noise.

For tests that want real shapes, formats and tokens but nothing that was learned. Greedy decoding never picks one of its special tokens,
so no text ends before its limit. Window and blocks are 32 tokens, the context is 32,768.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from forebay.model import random_weights
from forebay.model.checkpoint import Checkpoint, write_checkpoint
from forebay.model.config import ModelConfig
from forebay.model.errors import CheckpointError, ConfigError

# A byte-level BPE of 4,096 entries, trained on the Python 3.11 language reference and docstrings (Copyright Python Software Foundation,
# PSF License Version 2), with the pre-tokeniser of the released model and the special tokens of its encoding added.
TOKENIZER = Path(__file__).parent / "data" / "noise-tokenizer.json"
SEED = 41

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 4087,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 4096,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [24562, 25586],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 2000,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 3017,
        "num_nextn_predict_layers": 0,
    },
}


@functools.cache
def noise_checkpoint() -> Path:
    """Folder `noise` of NOISE, kept in the machine's temporary folder; built in a few seconds if it is not there or not whole.

    Several processes may ask at once.
    """
    parent = Path(tempfile.gettempdir()) / f"forebay-noise-{os.getuid()}-{_version()}"
    folder = parent / "noise"
    if _whole(folder):
        return folder
    parent.mkdir(mode=0o700, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=parent))
    try:
        write_noise(work)
        if folder.exists() and not _whole(folder):
            shutil.rmtree(folder)
        try:
            work.rename(folder)
        except OSError:
            if not _whole(folder):  # otherwise another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def write_noise(folder: Path) -> None:
    """Write NOISE into an existing folder."""
    write_random(folder, CONFIG, SEED)


def write_random(folder: Path, raw: dict[str, Any], seed: int) -> None:
    """Write a checkpoint of random tensors, with the tokenizer of NOISE, into an existing folder."""
    config = ModelConfig.from_dict(raw)
    silent = random_weights.special_ids(TOKENIZER, config)
    write_checkpoint(folder, raw, random_weights.random_tensors(config, seed, silent_ids=silent))
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")


def _version() -> str:
    """Changes with the recipe, so that no kept folder is ever out of date."""
    files = (Path(__file__), Path(random_weights.__file__), TOKENIZER)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _whole(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        Checkpoint.open(folder, scan=False)
        return (folder / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    except (CheckpointError, ConfigError, OSError):
        return False
