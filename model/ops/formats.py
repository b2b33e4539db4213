"""The three quantised formats of V4.1 and the FP8 activation rounding (spec/model.md §6).

* FP8: E4M3 values in groups of 32 channels, power-of-two (E8M0) scale: weights' activations and window KV (§6.3, §6.4).
* index FP4: E2M1 in groups of 32, E8M0 scale: index keys and queries (§6.2).
* main FP4: E2M1 in groups of 16, E4M3 scale: the global KV entries (§6.1).

E2M1 code: bit 3 sign, bits 0-2 index into 0 .5 1 1.5 2 3 4 6; a byte holds the even channel in its low nibble. Rounding is to nearest,
ties to the even code, and the sign of zero is kept. Everything is bit-exact against golden `components/quantisers`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

GROUP = 32
MAIN_GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# fp32 reciprocals, as the reference multiplies instead of dividing (§6.2, §6.3).
_INV_448 = torch.tensor(1.0 / 448.0, dtype=torch.float32).item()
_INV_6 = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()


def _ceil_power(amax: Tensor) -> Tensor:
    """The smallest power of two >= amax (positive fp32), from the bit pattern: any mantissa bit carries into the exponent.

    NaN stays NaN, so that a group with one becomes NaN as a whole and is noticed in the logits.
    """
    return torch.maximum((amax.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32), amax)


def _byte_of_power(power: Tensor) -> Tensor:
    """fp32 power of two -> its E8M0 byte (uint8)."""
    return (power.view(torch.int32) >> 23).to(torch.uint8)


def exp2_from_byte(byte: Tensor) -> Tensor:
    """E8M0 bytes (uint8) -> fp32 2^(byte-127); byte 0 is the subnormal 2^-127, which only weights can hold."""
    e = byte.to(torch.int32)
    return torch.where(e == 0, 0x400000, e << 23).view(torch.float32)


def _power_of_byte(byte: Tensor) -> Tensor:
    """`exp2_from_byte` for scales our own quantisers wrote, never below 2^-126; the zero bytes of unwritten memory give 0."""
    return byte.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)


def _group_amax(groups: Tensor) -> Tensor:
    """Largest magnitude along the last dimension, kept as a dimension of 1."""
    return torch.linalg.vector_norm(groups, torch.inf, -1, True)


def fp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to E4M3 in groups of 32.

    Args:
        x: [..., n] bf16 or fp32, n a multiple of 32.
    Returns:
        codes [..., n] uint8 (E4M3 bits), scales [..., n/32] uint8 (E8M0).
    """
    groups = x.float().reshape(-1, GROUP)
    scale = _ceil_power(_group_amax(groups).clamp_(min=1e-4).mul_(_INV_448))
    codes = (groups / scale).to(torch.float8_e4m3fn).view(torch.uint8)  # nothing to clamp: no quotient exceeds what rounds to 448
    return codes.view(x.shape), _byte_of_power(scale).view(*x.shape[:-1], x.shape[-1] // GROUP)


def e4m3_decode(codes: Tensor) -> Tensor:
    """E4M3 bits (uint8) -> fp32, exact; NaN patterns come out as ±480.

    Shifting the byte into an fp16 pattern and rescaling by 2^8 is several times faster than the CPU cast (the bias of fp16 is 8 larger).
    """
    return _as_half(codes).to(torch.float32).mul_(256.0)


def _as_half(codes: Tensor) -> Tensor:
    """E4M3 bits as the fp16 of the same sign, exponent and mantissa: 1/256 of the value."""
    return codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16512).view(torch.float16)


def fp8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `fp8_encode`: [..., n] uint8, [..., n/32] uint8 -> [..., n] fp32 (exact in bf16 too)."""
    values = _as_half(codes).to(torch.float32)
    factor = _power_of_byte(scales).mul_(256.0).view(-1, 1)
    return values.view(-1, GROUP).mul_(factor).view(codes.shape)


def fp8_round(x: Tensor) -> Tensor:
    """Quantise and dequantise at once: the input of every FP8 or FP4 linear (§6.4). [..., n] -> [..., n] fp32."""
    groups = x.float().reshape(-1, GROUP)
    scale = _ceil_power(_group_amax(groups).clamp_(min=1e-4).mul_(_INV_448))
    codes = (groups / scale).to(torch.float8_e4m3fn)
    # The direct cast back is one call but slow per element; the values are the same.
    values = codes.to(torch.float32) if codes.numel() <= 8192 else e4m3_decode(codes.view(torch.uint8))
    return values.mul_(scale).view(x.shape)


@cache
def _edges(device: torch.device) -> Tensor:
    """Where |x| moves to the next E2M1 code. At a tie the even code wins, so every other edge belongs to the code above it."""
    middle = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float32)
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    return torch.where(torch.arange(7) % 2 == 0, above, middle).to(device)


def _e2m1_encode(x: Tensor) -> Tensor:
    """fp32 in [-6, 6] -> codes uint8."""
    code = torch.bucketize(x.abs(), _edges(x.device), out_int32=True, right=True).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] uint8 codes -> [..., n/2] bytes, even channel low."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@cache
def _pair_table(device: torch.device) -> Tensor:
    """Byte -> its two E2M1 values, as one int64 holding two fp32: one lookup decodes two channels."""
    grid = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((grid[byte & 15], grid[byte >> 4]), -1).contiguous()
    return pairs.view(torch.int64).flatten().to(device)


def e2m1_decode(packed: Tensor) -> Tensor:
    """[..., n/2] packed bytes -> [..., n] fp32 grid values (unscaled)."""
    table = _pair_table(packed.device)
    values = table.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


def index_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index FP4 (§6.2): [..., n] -> packed [..., n/2] uint8, scales [..., n/32] uint8 (E8M0)."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _ceil_power(_group_amax(groups).clamp_(min=6.0 * 2.0**-126) * _INV_6)
    codes = _e2m1_encode((groups / scale).clamp_(-6.0, 6.0)).flatten(-2)
    return pack_nibbles(codes), _byte_of_power(scale).squeeze(-1)


def index_decode(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `index_encode` -> fp32, exact in bf16."""
    values = e2m1_decode(packed).unflatten(-1, (-1, GROUP))
    return (values * _power_of_byte(scales).unsqueeze(-1)).flatten(-2)


@cache
def _grid(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1, dtype=torch.float32, device=device)


def index_round(x: Tensor) -> Tensor:
    """Index FP4 and back at once, for index queries, which are not stored. [..., n] -> [..., n] fp32."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = _ceil_power(_group_amax(groups).clamp_(min=6.0 * 2.0**-126) * _INV_6)
    scaled = groups / scale
    code = torch.bucketize(scaled.abs(), _edges(x.device), out_int32=True, right=True)
    values = _grid(x.device).index_select(0, code.flatten()).view(code.shape)
    return (torch.copysign(values, scaled) * scale).flatten(-2)


def mxfp4_decode(packed: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 weights (§8 storage): [..., n/2] uint8, [..., n/32] uint8 (E8M0, any byte) -> [..., n] fp32."""
    values = e2m1_decode(packed).unflatten(-1, (-1, GROUP))
    return (values * exp2_from_byte(scales).unsqueeze(-1)).flatten(-2)


def main_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Main FP4 (§6.1): [..., n] -> packed [..., n/2] uint8, scales [..., n/16] uint8 (E4M3 bits).

    The scale may round down, so |x|/scale can exceed 6 and is clamped; the division is IEEE fp32.
    """
    groups = x.float().unflatten(-1, (-1, MAIN_GROUP))
    amax = groups.abs().amax(-1).clamp_(min=6.0 * 2.0**-9)
    scale = (amax / 6.0).clamp_(max=448.0).to(torch.float8_e4m3fn)
    scaled = groups / scale.to(torch.float32).unsqueeze(-1)
    codes = _e2m1_encode(scaled.clamp_(-6.0, 6.0)).flatten(-2)
    return pack_nibbles(codes), scale.view(torch.uint8)


def main_decode(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `main_encode` -> fp32, exact in bf16."""
    values = e2m1_decode(packed).unflatten(-1, (-1, MAIN_GROUP))
    return (values * e4m3_decode(scales).unsqueeze(-1)).flatten(-2)
