"""Configuration of the demo network: every mechanism of the released architecture in 7 layers, small enough for a repository.

Layer 0 sees its window only; 1 is Full at ratio 2, 2 reuses it; the decoder half begins at 3, Full at ratio 1 and the source of candidates;
4 reuses it, 5 chooses anew among the candidates, 6 reuses that.
"""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 4087,  # <｜deepseek_image｜> of the tokenizer
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
        "moe_intermediate_size": 224,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
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
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 128,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 8,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [48400, 49568],  # sums of the 12 and the next 12 primes from engram_vocab_size on
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 4000,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 3261,  # classes of the tokenizer's entries that read alike
        "num_nextn_predict_layers": 0,
    },
}
