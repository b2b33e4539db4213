"""Engram addressing: token classes, hash constants, row ids, and the rows themselves (spec/model.md §9).

Row ids depend on token ids alone. Everything here is exact integer arithmetic; a wrong class or prime does not fail, it
quietly reads other rows, so the counts that the configuration states are asserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import normalizers
from torch import Tensor

from forebay.model.config import QUANT_GROUP, ModelConfig
from forebay.model.errors import CheckpointError, RequestError

# Keyed by (layer, engram_compressed_vocab_size, orders): the released model's multipliers, frozen because numpy does not
# promise that a Generator's stream stays the same (spec §9.2).
_RELEASED_MULTIPLIERS = {
    (1, 99092, 4): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (14, 99092, 4): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
_SPACE = "\ue000"  # stands for a text that is one space while the rest is stripped


def compress_vocabulary(tokenizer: str | Path | tokenizers.Tokenizer, config: ModelConfig) -> Tensor:
    """Token id -> class of tokens that read alike, numbered by first appearance; [vocab_size] int32.

    Raises:
        CheckpointError: the tokenizer cannot be read, or gives another number of classes than
            `engram_compressed_vocab_size`: it is not the one the tables were made with.
    """
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the library raises bare Exception for missing and damaged files alike
            raise CheckpointError(f"{tokenizer} cannot be read as a tokenizer, which Engram needs: {error}") from None
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    texts = tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())], skip_special_tokens=False)
    classes: dict[str, int] = {}
    table = []
    for token, text in enumerate(texts):
        # Part of a multi-byte character: tokens that decode to the same replacement mark are not alike.
        key = (tokenizer.id_to_token(token) or text) if "\ufffd" in text else (normalizer.normalize_str(text) or text)
        table.append(classes.setdefault(key, len(classes)))
    if len(classes) != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"the tokenizer gives {len(classes)} Engram classes, the configuration says {config.engram_compressed_vocab_size} "
            "(engram_compressed_vocab_size): tokenizer and weights do not belong together"
        )
    table = table[: config.vocab_size] + [0] * (config.vocab_size - len(table))  # ids without a token never occur in a text
    return torch.tensor(table, dtype=torch.int32)


@dataclass(frozen=True)
class HashConstants:
    """What turns classes into row ids; the first dimension is the slot of the layer in `engram_layer_ids`.

    Attributes:
        multipliers: [layers, max_ngram] int64, one per look-back.
        primes: [layers, orders, heads] int64.
        offsets: [layers, orders * heads] int64, first row of each column's part of the table.
    """

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> HashConstants:
        return HashConstants(self.multipliers.to(device), self.primes.to(device), self.offsets.to(device))


def hash_constants(config: ModelConfig) -> HashConstants:
    """Derive the constants of every Engram layer.

    Raises:
        CheckpointError: the primes do not add up to `engram_num_embeddings`.
    """
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    layers = len(config.engram_layer_ids)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        if rows < config.engram_vocab_size * orders * heads:  # before a search that could take long
            raise CheckpointError(
                f"the Engram table of layer {layer} has {rows} rows in the configuration (engram_num_embeddings), "
                f"{orders * heads} columns from engram_vocab_size {config.engram_vocab_size} need more"
            )
    multipliers = torch.tensor([_multipliers(config, layer) for layer in config.engram_layer_ids], dtype=torch.int64)
    primes = torch.tensor(_primes_from(config.engram_vocab_size, layers * orders * heads), dtype=torch.int64).view(layers, orders, heads)
    columns = primes.view(layers, orders * heads)
    for slot, (layer, rows) in enumerate(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)):
        if int(columns[slot].sum()) != rows:
            raise CheckpointError(
                f"the Engram table of layer {layer} has {rows} rows in the configuration (engram_num_embeddings), "
                f"the hash primes above engram_vocab_size {config.engram_vocab_size} need {int(columns[slot].sum())}"
            )
    return HashConstants(multipliers.view(layers, config.engram_max_ngram_size), primes, columns.cumsum(1) - columns)


def _multipliers(config: ModelConfig, layer: int) -> list[int]:
    shifts = config.engram_max_ngram_size
    frozen = _RELEASED_MULTIPLIERS.get((layer, config.engram_compressed_vocab_size, shifts))
    if frozen is not None:
        return list(frozen)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    return [int(n) * 2 + 1 for n in np.random.default_rng(10007 * layer).integers(0, bound, shifts, dtype=np.int64)]


def _primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes >= start."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def class_history(
    token_ids: Tensor | Sequence[int],  # [n] tokens of one sequence
    previous: Tensor | Sequence[int],  # up to max_ngram - 1 tokens before them, oldest first
    token_map: Tensor,  # [vocab] int32
    pad_class: int,  # token_map[engram_pad_token_id]
    text_mask: Tensor | None = None,  # [n] bool, False in image spans
    *,
    max_ngram: int,
) -> Tensor:
    """Classes of each token and the ones before it: [n, max_ngram] int64, column i = token p-i.

    -1 (in `token_ids` or `previous`) and masked positions are barriers: they and everything older count as pad.

    Raises:
        RequestError: another id outside [0, vocab).
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    if text_mask is not None:
        _check_ids(ids, token_map.numel())
        ids = ids.where(text_mask, -1)
    older = torch.as_tensor(previous, dtype=torch.int64)
    depth = max_ngram - 1
    if older.numel() < depth:
        older = torch.cat([older.new_full((depth - older.numel(),), -1), older])
    line = torch.cat([older[older.numel() - depth :], ids])
    return window_classes(line.unfold(0, max_ngram, 1).flip(1), token_map, pad_class)


def window_classes(windows: Tensor, token_map: Tensor, pad_class: int) -> Tensor:
    """Classes of ready-made windows [n, max_ngram] int64 (column i = token p-i, -1 = barrier), one per row of a batch.

    Raises:
        RequestError: an id that is neither -1 nor inside [0, vocab).
    """
    _check_ids(windows, token_map.numel())
    alive = (windows >= 0).to(torch.uint8).cumprod(1).bool()
    return token_map[windows.clamp_min(0)].to(torch.int64).where(alive, pad_class)


def _check_ids(ids: Tensor, vocab: int) -> None:
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= vocab):
        bad = int(ids[(ids < -1) | (ids >= vocab)][0])
        raise RequestError(f"token id {bad} is outside the vocabulary of {vocab}", param="prompt")


def engram_rows(history: Tensor, constants: HashConstants, slot: int) -> Tensor:
    """Row ids of one Engram layer: `history` [n, max_ngram] int64 classes -> [n, orders * heads] int64.

    Column (order - 2) * heads + head; `slot` is the layer's place in `engram_layer_ids`.
    """
    products = history * constants.multipliers[slot]
    mixed, columns = products[:, 0], []
    for order, primes in enumerate(constants.primes[slot], 1):
        mixed = mixed ^ products[:, order]
        columns.append(mixed[:, None] % primes)
    return torch.cat(columns, 1) + constants.offsets[slot]


class EngramTable:
    """A table of FP8 rows with one E8M0 scale per 32 columns, left where it is stored.

    Args:
        codes: [rows, width] uint8, E4M3 bytes, usually mapped from the checkpoint.
        scales: [rows, width / 32] uint8, E8M0 bytes.
        name: of the tensor, for errors.
    """

    def __init__(self, codes: Tensor, scales: Tensor, *, name: str = "engram.embed.weight") -> None:
        self.codes = codes
        self.scales = scales
        self.name = name
        self._powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    def read(self, ids: Tensor) -> Tensor:
        """Dequantise the rows `ids` [n, columns] int64 -> [n, columns * width] bf16; no other row is touched.

        Raises:
            CheckpointError: a row holds a value that is not a number.
            IndexError: an id outside the table.
        """
        flat = ids.reshape(-1)
        codes = self.codes.index_select(0, flat)
        powers = self._powers[self.scales.index_select(0, flat).int()]
        values = codes.view(torch.float8_e4m3fn).to(torch.float32).view(flat.numel(), -1, QUANT_GROUP) * powers[:, :, None]
        if not bool(torch.isfinite(values).all()):
            row = int(flat[int((~torch.isfinite(values)).flatten(1).any(1).to(torch.uint8).argmax())])
            raise CheckpointError(f"{self.name}: row {row} holds a value that is not a finite number")
        return values.to(torch.bfloat16).view(*ids.shape[:-1], -1)
