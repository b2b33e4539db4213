"""Trainable weights for the product's network: fp32 masters behind the loader's interface, rounded to their stored format on the way in.

Every use of a weight sees the numbers that will be stored (FP8 tiles, MXFP4 groups, bf16), and the gradient passes the rounding unchanged,
as does that of the activation roundings of spec §6.5 (`TrainOps`). So what is trained is the network that is served, quantisation included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from forebay.model.checkpoint import RowReader, Weights
from forebay.model.config import QUANT_GROUP, ModelConfig
from forebay.model.demo.train import kernels
from forebay.model.experts import RoutedExperts
from forebay.model.loading import Loader
from forebay.model.names import expected_tensors
from forebay.model.ops import formats
from forebay.model.ops.backend import Ops
from forebay.model.ops.hyper_connections import Coefficients, spread_scale
from forebay.model.ops.linear import Fp8Weight, Mxfp4Weight, PlainWeight, StackedWeight, Weight
from forebay.model.ops.rope import Turn, rotate
from forebay.model.random_weights import encode_fp8, encode_mxfp4


class Masters(nn.Module):
    """All parameters of a backbone by their official names; the routed experts of a layer as two stacked tensors `…ffn.experts.{up,down}`.

    `loads` [E] int64 per layer counts the tokens each expert got since it was last emptied, for the balance of the router.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.values: dict[str, nn.Parameter] = {}
        self.loads: dict[str, Tensor] = {}
        self._forms: dict[str, Tensor] = {}
        self._kinds = _kinds(config)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in _shapes(config).items():
            self.values[name] = nn.Parameter(_initial(name, shape, config, generator).to(device))

    def form(self, name: str) -> Tensor:
        """A matrix as it will be stored: bf16 for FP8 and bf16 ones, the master itself for fp32 ones. Of this forward pass: see `renew`."""
        if not self._forms:
            names = [n for n in self.values if self._kinds[n] in ("fp8", "bf16")]
            kinds = [self._kinds[n] for n in names]
            forms = _Forms.apply(kinds, *(self.values[n] for n in names))  # type: ignore[no-untyped-call]
            self._forms = dict(zip(names, forms, strict=True))
        return self._forms[name] if name in self._forms else self.values[name]

    def renew(self) -> None:
        """Before a forward pass: forget the forms of the last one."""
        self._forms = {}

    def load(self, values: dict[str, Tensor]) -> None:
        """Take over saved values. Raises KeyError for another network's."""
        with torch.no_grad():
            for name, parameter in self.values.items():
                parameter.copy_(values[name].float())

    def take(self, checkpoint: Weights) -> None:
        """Begin with the weights of a checkpoint: the same network, but for what its rounding lost."""
        specs = expected_tensors(self.config)

        def read(name: str) -> Tensor:
            stored, dtype = checkpoint.tensor(name), specs[name].dtype
            if dtype not in ("F8_E4M3", "I8"):
                return stored.float()
            scales = checkpoint.tensor(f"{name.removesuffix('.weight')}.scale")
            if dtype == "I8":
                return formats.mxfp4_decode(stored, scales)
            rows = 1 if specs[name].part == "engram tables" else QUANT_GROUP
            spread = formats.exp2_from_byte(scales).repeat_interleave(rows, 0).repeat_interleave(QUANT_GROUP, 1)
            return formats.e4m3_decode(stored) * spread[: stored.shape[0], : stored.shape[1]]

        values = {}
        for name in self.values:
            if name in specs:
                values[name] = read(name)
                continue
            each = range(self.config.n_routed_experts)
            at, half = name.rsplit(".", 1)
            wanted = ("w1", "w3") if half == "up" else ("w2",)
            values[name] = torch.stack([torch.cat([read(f"{at}.{e}.{w}.weight") for w in wanted]) for e in each])
        self.load(values)

    def stored(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint, rounded to its stored format."""
        out: dict[str, Tensor] = {}
        experts = self.config.n_routed_experts
        flat = {name: value.detach().float().cpu() for name, value in self.values.items()}
        for name, spec in expected_tensors(self.config).items():
            if name.endswith(".scale"):
                continue
            base = name.removesuffix(".weight")
            if ".ffn.experts." in name:
                at, _, rest = name.partition(".ffn.experts.")
                number, matrix, _ = rest.split(".")
                up, down = flat[f"{at}.ffn.experts.up"], flat[f"{at}.ffn.experts.down"]
                half = up.shape[1] // 2
                e = int(number)
                assert e < experts
                value = down[e] if matrix == "w2" else up[e, :half] if matrix == "w1" else up[e, half:]
                out[name], out[f"{base}.scale"] = encode_mxfp4(value.contiguous().numpy())
            elif spec.dtype == "F8_E4M3":
                rows = 1 if spec.part == "engram tables" else QUANT_GROUP
                out[name], out[f"{base}.scale"] = encode_fp8(flat[name].numpy(), tile_rows=rows)
            else:
                out[name] = flat[name].to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
        return out


class _Forms(torch.autograd.Function):
    """All matrices as they will be stored, in one node: the FP8 ones are rounded together, tile by tile."""

    @staticmethod
    def forward(ctx: Any, kinds: Sequence[str], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [value.dtype for value in values]
        out: list[Tensor] = [v.to(torch.bfloat16) for v in values]
        chosen = [i for i, kind in enumerate(kinds) if kind == "fp8"]
        tiles = [_tiles(values[i]) for i in chosen]
        parts = _round_tiles(torch.cat(tiles)).split([len(t) for t in tiles]) if tiles else ()
        for i, part in zip(chosen, parts, strict=True):
            out[i] = _untile(part, values[i].shape)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *(None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)))


def _tiles(w: Tensor) -> Tensor:
    """[out, in] -> [tiles, 1024], padded with zeros."""
    padded = functional.pad(w, (0, -w.shape[1] % QUANT_GROUP, 0, -w.shape[0] % QUANT_GROUP))
    return padded.unflatten(1, (-1, QUANT_GROUP)).unflatten(0, (-1, QUANT_GROUP)).transpose(1, 2).reshape(-1, QUANT_GROUP**2)


def _untile(tiles: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = -(-shape[0] // QUANT_GROUP), -(-shape[1] // QUANT_GROUP)
    whole = tiles.view(rows, columns, QUANT_GROUP, QUANT_GROUP).transpose(1, 2).reshape(rows * QUANT_GROUP, columns * QUANT_GROUP)
    return whole[: shape[0], : shape[1]]


def _round_tiles(tiles: Tensor) -> Tensor:
    power = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448)))
    return ((tiles / power).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * power).to(torch.bfloat16)


def bf16_values(x: Tensor) -> Tensor:
    """bf16 numbers, in the type they came in."""
    return x.to(torch.bfloat16).to(x.dtype)


def fp8_tiles(w: Tensor) -> Tensor:
    """[out, in] as FP8 with one power-of-two scale per 32x32 tile (spec §8 storage) -> bf16, which holds the values."""
    return _untile(_round_tiles(_tiles(w)), w.shape)


class MasterWeight(Weight):
    """A parameter [out, in] in the form it will be stored in."""

    def __init__(self, masters: Masters, name: str) -> None:
        self.masters, self.name = masters, name
        self.value = masters.values[name]
        self.out_features, self.in_features = self.value.shape

    def multiply(self, x: Tensor) -> Tensor:
        """bf16 inputs are multiplied in bf16 with fp32 sums; fp32 ones as fp32 (on CUDA as TF32, exact where the factors were bf16)."""
        return x @ self.masters.form(self.name).to(x.dtype).T


class MasterStack(Weight):
    """Several masters over one input."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = list(parts)
        self.out_features, self.in_features = sum(p.out_features for p in parts), parts[0].in_features

    def multiply(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply(x) for part in self.parts], -1)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        return y.split([part.out_features for part in self.parts], -1)


class MasterTable:
    """An Engram table in the form it will be stored in."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def read(self, ids: Tensor) -> Tensor:
        """[n, columns] int64 -> [n, columns * width] bf16."""
        rows = functional.embedding(ids.to(self.value.device), self.value)
        return kernels.fp8_round(rows).flatten(1)


class MasterExperts:
    """The routed experts of a layer, all in one grouped product each way (`kernels.grouped_experts`)."""

    def __init__(self, masters: Masters, at: str, limit: float) -> None:
        self.masters, self.at, self.limit = masters, at, limit

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        self._count(indices)
        # The format of index queries is that of the weights: E2M1 in groups of 32 with a power-of-two scale.
        up, down = (kernels.index_round(self.masters.values[f"{self.at}.{half}"]) for half in ("up", "down"))
        return kernels.grouped_experts(x, indices, weights, up, down, self.limit, kernels.fp8_round)

    def _count(self, indices: Tensor) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation
        flat, experts = indices.flatten(), self.masters.config.n_routed_experts
        counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        self.masters.loads[self.at] = self.masters.loads.get(self.at, 0) + counts


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Turn, inverse: bool) -> Tensor:
        ctx.turn, ctx.inverse = turn, inverse
        return rotate(x, turn, inverse=inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rotate(grads[0], ctx.turn, inverse=not ctx.inverse), None, None


class TrainOps(Ops):
    """Differentiable versions; on CUDA the fused kernels of `kernels`."""

    def fp8_round(self, x: Tensor) -> Tensor:
        """FP8 values fit bf16, so that the products that follow run in bf16."""
        return kernels.fp8_round(x)

    def index_round(self, x: Tensor) -> Tensor:
        return kernels.index_round(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ones = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
        return kernels.collapse_norm(x.unsqueeze(1), ones, self.stored(weight), eps)

    def stored(self, vector: Tensor) -> Tensor:
        return kernels.straight_through(vector, bf16_values)

    def index_input(self, latent: Tensor) -> Tensor:
        return latent.detach()  # the indexer learns from attention, and nothing else does

    def rotate(self, x: Tensor, turn: Turn, *, inverse: bool = False) -> Tensor:
        return cast(Tensor, _Rotate.apply(x, turn, inverse))  # type: ignore[no-untyped-call]

    def grouped_linear(self, out: Tensor, weights: Sequence[Weight]) -> Tensor:
        first = cast(_Group, weights[0])
        whole = first.masters.form(first.name).unflatten(0, (first.groups, -1))  # [groups, out, in]
        return torch.einsum("ngi,goi->ngo", out.unflatten(1, (first.groups, -1)).flatten(2), whole).flatten(1)

    def spread_scale(self, scale: Tensor, streams: int) -> Tensor:
        return scale  # a parameter: spread in every forward pass

    def project(self, streams: Tensor, fn: Weight, eps: float) -> Tensor:
        return kernels.mhc_project(streams, cast(MasterWeight, fn).value, eps)

    def coefficients(self, mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float) -> Coefficients:
        raw = mixes * spread_scale(scale, streams) + base
        gates = torch.sigmoid(raw[:, : 2 * streams])
        comb = kernels.sinkhorn(raw[:, 2 * streams :].unflatten(1, (streams, streams)).contiguous(), iterations, eps)
        return Coefficients(gates[:, :streams] + eps, 2 * gates[:, streams:], comb)

    def collapse_norm(self, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.collapse_norm(streams, pre, self.stored(weight), eps)

    def mix(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return kernels.mix_streams(streams, out, post, comb)


class MasterLoader(Loader):
    """Gives layers masters instead of stored weights."""

    ops = TrainOps()

    def __init__(self, masters: Masters, prefix: str = "") -> None:
        self.masters, self.prefix = masters, prefix

    def at(self, prefix: str) -> MasterLoader:
        return MasterLoader(self.masters, f"{self.prefix}{prefix}.")

    def tensor(self, name: str) -> Tensor:
        return self.masters.values[self.prefix + name]

    def fp8(self, name: str) -> Fp8Weight:
        return cast(Fp8Weight, MasterWeight(self.masters, f"{self.prefix}{name}.weight"))

    def fp8_groups(self, name: str, groups: int) -> list[Fp8Weight]:
        return [cast(Fp8Weight, _Group(self.masters, f"{self.prefix}{name}.weight", groups, g)) for g in range(groups)]

    def mxfp4(self, name: str) -> Mxfp4Weight:
        raise TypeError("routed experts are stacked")

    def plain(self, name: str) -> PlainWeight:
        return cast(PlainWeight, MasterWeight(self.masters, self.prefix + name))

    def stack(self, parts: Sequence[Weight]) -> StackedWeight:
        return cast(StackedWeight, MasterStack(parts))

    def experts(self, config: ModelConfig) -> RoutedExperts:
        return cast(RoutedExperts, MasterExperts(self.masters, f"{self.prefix}experts", config.swiglu_limit))

    def engram_table(self, layer: int) -> RowReader:
        return MasterTable(self.tensor("embed.weight"))


class _Group(MasterWeight):
    """Rows of a block-diagonal matrix."""

    def __init__(self, masters: Masters, name: str, groups: int, number: int) -> None:
        super().__init__(masters, name)
        self.groups = groups
        self.out_features //= groups
        self.rows = slice(number * self.out_features, (number + 1) * self.out_features)

    def multiply(self, x: Tensor) -> Tensor:
        return x @ self.masters.form(self.name)[self.rows].to(x.dtype).T


def _kinds(config: ModelConfig) -> dict[str, str]:
    """How each parameter is stored: fp8 (tiles), bf16 (matrices), mxfp4, or plain (vectors, fp32; Engram tables, rounded when read)."""
    specs = expected_tensors(config)
    kinds = {}
    for name, shape in _shapes(config).items():
        if name not in specs:
            kinds[name] = "mxfp4"
        elif specs[name].dtype == "F8_E4M3" and specs[name].part != "engram tables":
            kinds[name] = "fp8"
        else:
            kinds[name] = "bf16" if specs[name].dtype == "BF16" and len(shape) == 2 and name != "embed.weight" else "plain"
    return kinds


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, in the order of the names table."""
    shapes: dict[str, tuple[int, ...]] = {}
    inner, dim, experts = config.moe_intermediate_size, config.hidden_size, config.n_routed_experts
    for name, spec in expected_tensors(config).items():
        if name.endswith(".scale"):
            continue
        if ".ffn.experts." in name:
            at = name.partition(".ffn.experts.")[0]
            shapes[f"{at}.ffn.experts.up"] = (experts, 2 * inner, dim)
            shapes[f"{at}.ffn.experts.down"] = (experts, dim, inner)
        else:
            shapes[name] = spec.shape
    return shapes


def _initial(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """First values: matrices keep the size of what passes, outputs of sub-layers start small, streams start mixed hardly at all."""
    streams, layers = config.hc_mult, config.num_hidden_layers
    end = name.rpartition("hc_")[2]
    if "hc_" in name and end.endswith("_fn"):
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    if "hc_" in name and end.endswith("_scale"):
        return torch.full(shape, 0.1)
    if "hc_" in name:
        base = torch.zeros(shape)
        base[: 2 * streams] = 0.5 * torch.randn(2 * streams, generator=generator)
        base[2 * streams :] = 3.0 * torch.eye(streams).flatten()
        return base
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl")):
        return torch.zeros(shape)
    if name == "embed.weight":
        return torch.randn(shape, generator=generator)
    if name == "head.weight":
        return torch.randn(shape, generator=generator) * 0.5 / math.sqrt(shape[-1])
    if name.endswith("engram.embed.weight"):
        return torch.randn(shape, generator=generator) * 0.5
    gain = 0.5 / math.sqrt(layers) if name.endswith(("wo_b.weight", "w2.weight", "experts.down")) else 1.0
    return torch.randn(shape, generator=generator) * gain / math.sqrt(shape[-1])
