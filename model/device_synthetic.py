"""Random weights of the released shapes, made on the device itself: a full-depth network of real width without a checkpoint, for timing.

Nothing passes through host memory, and no two tensors share memory, so a step reads as many bytes as it would of a real checkpoint.
FP8 codes are rounded normal numbers; a byte of FP4 codes is any byte, so all sixteen codes are equally likely. Every scale of a matrix is
the same power of two, the one that keeps activations in size. An Engram table has at most `TABLE_ROWS` rows, into which the row ids of the
real one are folded: 256 MiB, several times an L2 cache, where the released tables have 98 GB each.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import tokenizers
import torch
from torch import Tensor

from forebay.model.config import QUANT_GROUP, ModelConfig
from forebay.model.demo import TOKENIZER
from forebay.model.errors import CheckpointError
from forebay.model.names import TensorSpec
from forebay.model.random_weights import deviation_and_mean, special_ids
from forebay.model.synthetic import SyntheticCheckpoint

TABLE_ROWS = 1 << 20
DRAWN_AT_ONCE = 1 << 25  # fp32 numbers in memory while FP8 codes are drawn: 128 MiB
FP8_DEVIATION = 64.0  # of the codes
FP4_DEVIATION = math.sqrt(68.5 / 8)  # of equally likely codes: the mean square of 0 .5 1 1.5 2 3 4 6
_LARGEST = 448.0  # of E4M3


class DeviceSynthetic(SyntheticCheckpoint):
    """A `SyntheticCheckpoint` whose tensors are made on `device`, each in memory of its own.

    A tensor is a function of (config, seed, name) and of the kind of device, whose generator draws it.
    """

    def __init__(self, config: ModelConfig, device: str | torch.device = "cuda", seed: int = 0) -> None:
        super().__init__(config, seed)
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device)
        self._identity = f"{config.fingerprint()} {seed}"

    def tensor(self, name: str) -> Tensor:
        """As `Checkpoint.tensor`, on the device: 8-bit formats as uint8. Asked for again, it is drawn again, with the same numbers.

        Raises:
            CheckpointError: no such tensor, or an Engram table: use `engram_table`.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointError(f"the synthetic checkpoint holds no tensor {name!r}")
        if spec.part == "engram tables":
            raise CheckpointError(f"{name} of a synthetic checkpoint is only there in part: use engram_table()")
        if spec.dtype in ("BF16", "F32"):
            return self._plain(name, spec)
        if name.endswith(".scale"):
            return torch.full(spec.shape, self._scale(name.removesuffix(".scale")), dtype=torch.uint8, device=self.device)
        codes = torch.empty(spec.shape, dtype=torch.uint8, device=self.device)
        if spec.dtype == "I8":
            self._draw_fp4(codes, name)
        else:
            self._draw_fp8(codes, name)
        return codes

    def stacked_experts(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The routed experts of a layer as the kernels read them, each drawn straight into its place; no other memory is used.

        Returns:
            up codes [E, 2I, D/2] (w1 above w3), up scales [E, 2I, D/32], down codes [E, D, I/2], down scales [E, D, I/32], all uint8; the
            same bytes as `tensor` gives for the experts one by one.
        """
        c, at = self.config, f"layers.{layer}.ffn.experts."
        count, width, dim = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        up = torch.empty((count, 2 * width, dim // 2), dtype=torch.uint8, device=self.device)
        down = torch.empty((count, dim, width // 2), dtype=torch.uint8, device=self.device)
        for expert in range(count):
            self._draw_fp4(up[expert, :width], f"{at}{expert}.w1.weight")
            self._draw_fp4(up[expert, width:], f"{at}{expert}.w3.weight")
            self._draw_fp4(down[expert], f"{at}{expert}.w2.weight")
        up_scale, down_scale = self._scale(f"{at}0.w1"), self._scale(f"{at}0.w2")
        return (
            up,
            torch.full((count, 2 * width, dim // QUANT_GROUP), up_scale, dtype=torch.uint8, device=self.device),
            down,
            torch.full((count, dim, width // QUANT_GROUP), down_scale, dtype=torch.uint8, device=self.device),
        )

    def engram_table(self, layer: int) -> DeviceTable:  # type: ignore[override]  # reads as the other one does, and is a table besides
        name = f"layers.{layer}.engram.embed"
        rows, width = self.specs[f"{name}.weight"].shape
        codes = torch.empty((min(rows, TABLE_ROWS), width), dtype=torch.uint8, device=self.device)
        self._draw_fp8(codes, f"{name}.weight")
        scale = 127 - round(math.log2(FP8_DEVIATION))  # rows of deviation 1
        scales = torch.full((codes.shape[0], width // QUANT_GROUP), scale, dtype=torch.uint8, device=self.device)
        return DeviceTable(codes, scales, rows)

    @cached_property
    def fingerprint(self) -> str:
        text = f"synthetic on {self.device.type} 1 {self._identity}"
        return hashlib.sha256(text.encode() + TOKENIZER.read_bytes()).hexdigest()

    def _seeded(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._identity} {name}".encode()).digest()
        return self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def _scale(self, matrix: str) -> int:
        """The E8M0 byte of all scales of a matrix."""
        weight = self.specs[f"{matrix}.weight"]
        packed = weight.dtype == "I8"
        deviation, _ = deviation_and_mean(f"{matrix}.weight", weight.shape[1] * (2 if packed else 1))
        return 127 + round(math.log2(deviation / (FP4_DEVIATION if packed else FP8_DEVIATION)))

    def _draw_fp4(self, codes: Tensor, name: str) -> None:
        """Fill with random bytes, eight at a time. codes: contiguous; rows of a multiple of 16 bytes, as sizes are multiples of 32."""
        codes.view(-1).view(torch.int64).random_(-(1 << 63), None, generator=self._seeded(name))

    def _draw_fp8(self, codes: Tensor, name: str) -> None:
        """Fill with E4M3 codes of normal numbers, none of them a NaN."""
        generator, flat = self._seeded(name), codes.view(-1)
        drawn = torch.empty(min(flat.numel(), DRAWN_AT_ONCE), dtype=torch.float32, device=self.device)
        for start in range(0, flat.numel(), DRAWN_AT_ONCE):
            part = drawn[: flat.numel() - start]
            part.normal_(0.0, FP8_DEVIATION, generator=generator).clamp_(-_LARGEST, _LARGEST)
            flat[start : start + part.numel()].view(torch.float8_e4m3fn).copy_(part)

    def _plain(self, name: str, spec: TensorSpec) -> Tensor:
        deviation, mean = deviation_and_mean(name, spec.shape[-1])
        dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        values = torch.empty(spec.shape, dtype=dtype, device=self.device).normal_(mean, deviation, generator=self._seeded(name))
        if name == "head.weight":
            values[tokenizers.Tokenizer.from_file(str(TOKENIZER)).get_vocab_size() :] = 0
            values[torch.tensor(special_ids(TOKENIZER, self.config), device=self.device)] = 0
        return values


class DeviceTable:
    """An Engram table on a device; row `id` is row `id % modulo` of what is there.

    Attributes:
        codes: [modulo, width] uint8, E4M3. scales: [modulo, width / 32] uint8, E8M0, all alike.
        rows: of the table it stands for: ids lie in [0, rows).
    """

    def __init__(self, codes: Tensor, scales: Tensor, rows: int) -> None:
        self.codes, self.scales, self.rows = codes, scales, rows

    @property
    def modulo(self) -> int:
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    def read(self, ids: Tensor) -> Tensor:
        """[n, columns] int64 -> [n, columns * width] bf16 on the device, deviation 1.

        Raises:
            IndexError: an id outside the table.
        """
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.rows):
            raise IndexError(f"row ids must lie in [0, {self.rows})")
        places = ids.reshape(-1).to(self.codes.device) % self.modulo
        values = self.codes.index_select(0, places).view(torch.float8_e4m3fn).to(torch.float32)
        powers = torch.exp2(self.scales.index_select(0, places).to(torch.float32) - 127)
        return (values.unflatten(1, (-1, QUANT_GROUP)) * powers[:, :, None]).to(torch.bfloat16).view(*ids.shape[:-1], -1)
