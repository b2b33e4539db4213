"""The few PTX instructions of our kernels' inline assembly, run on many numbers at once, for tests without a GPU."""

from __future__ import annotations

import re

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All registers at the end. text: a block of instructions; inputs: int64 tensors of 32-bit patterns by name, such as "$1"."""
    names = dict(inputs)
    for line in text.strip().strip("{}").split(";"):
        words = line.split(None, 1)
        if not words or words[0].startswith("."):
            continue
        operation, rest = words
        places = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if operation == "mov.b32" and places[0].startswith("{"):  # a word to two halves
            word = _value(places[1], names)
            for shift, name in zip((0, 16), _split(places[0]), strict=True):
                names[name] = (word >> shift) & 0xFFFF
            continue
        if operation == "mov.b32" and places[1].startswith("{"):
            low, high = (names[name] for name in _split(places[1]))
            names[places[0]] = low | (high << 16)
            continue
        names[places[0]] = _one(operation, [_value(place, names) for place in places[1:]])
    return names


def floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def patterns(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32).long() & LOW


def _split(place: str) -> list[str]:
    return [name.strip() for name in place.strip("{}").split(",")]


def _value(place: str, names: dict[str, Tensor]) -> Tensor:
    return names[place] if place in names else torch.tensor(int(place, 0))


def _halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 numbers."""
    return floats((word & 0xFFFF) << 16), floats(word & 0xFFFF0000)


def _bf16(low: Tensor, high: Tensor) -> Tensor:
    low, high = torch.broadcast_tensors(low, high)
    return (patterns(low.bfloat16()) >> 16) | (patterns(high.bfloat16()) & 0xFFFF0000)


def _one(operation: str, x: list[Tensor]) -> Tensor:
    if operation in ("mov.b32", "mov.f32"):
        return x[0]
    if operation == "and.b32":
        return x[0] & x[1]
    if operation == "shl.b32":
        return (x[0] << x[1]) & LOW
    if operation == "shr.b32":
        return x[0] >> x[1]
    if operation == "lop3.b32":
        a, b, c = x[:3]
        found = torch.zeros_like(a | b | c)
        for i in range(8):
            if int(x[3]) >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found & LOW
    if operation == "prmt.b32":
        whole = x[0] | (x[1] << 32)
        return sum((((whole >> (8 * (int(x[2]) >> (4 * i) & 7))) & 0xFF) << (8 * i) for i in range(4)), torch.tensor(0))
    if operation == "min.u16x2":
        return torch.minimum(x[0] & 0xFFFF, x[1] & 0xFFFF) | torch.minimum(x[0] & 0xFFFF0000, x[1] & 0xFFFF0000)
    if operation == "mul.rn.f32":
        return patterns(floats(x[0]) * floats(x[1]))
    if operation.endswith(".rn.bf16x2"):
        (a, b), (c, d) = _halves(x[0]), _halves(x[1])
        if operation.startswith("mul"):
            return _bf16(a * c, b * d)
        if operation.startswith("add"):
            return _bf16(a + c, b + d)
        e, f = _halves(x[2])
        return _bf16((a.double() * c + e).float(), (b.double() * d + f).float())
    if operation == "cvt.rn.bf16x2.f32":  # the first one goes to the upper half
        return _bf16(floats(x[1]), floats(x[0]))
    if operation == "cvt.rn.satfinite.e4m3x2.f32":
        high, low = ((floats(y).clamp(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).long() for y in x)
        return torch.where(floats(x[1]).isnan(), 0x7F, low) | (torch.where(floats(x[0]).isnan(), 0x7F, high) << 8)
    if operation == "cvt.rn.f16x2.e4m3x2":
        low, high = ((x[0] >> s & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).long() & 0xFFFF for s in (0, 8))
        return low | (high << 16)
    if operation == "cvt.f32.f16":
        return patterns(x[0].to(torch.int16).view(torch.float16).float())
    raise NotImplementedError(operation)
