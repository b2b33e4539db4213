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


def _ceil_exponent(amax: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two >= amax (positive fp32), from the bit pattern; int32."""
    bits = amax.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0)


def exp2_from_byte(byte: Tensor) -> Tensor:
    """E8M0 bytes (uint8 or int32) -> fp32 2^(byte-127); byte 0 is the subnormal 2^-127."""
    e = byte.to(torch.int32)
    return torch.where(e == 0, 0x400000, e << 23).view(torch.float32)


def fp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to E4M3 in groups of 32.

    Args:
        x: [..., n] bf16 or fp32, n a multiple of 32.
    Returns:
        codes [..., n] uint8 (E4M3 bits), scales [..., n/32] uint8 (E8M0).
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1).clamp_(min=1e-4)
    exponent = _ceil_exponent(amax * _INV_448)
    scaled = groups / (exponent << 23).view(torch.float32).unsqueeze(-1)
    codes = scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), exponent.to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """E4M3 bits (uint8) -> fp32, exact; NaN patterns come out as ±480.

    Shifting the byte into an fp16 pattern and rescaling by 2^8 is several times faster than the CPU cast (the bias of fp16 is 8 larger).
    """
    half = ((codes.view(torch.int8).to(torch.int16) << 7) & -16512).view(torch.float16)
    return half.to(torch.float32) * 256.0


def fp8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `fp8_encode`: [..., n] uint8, [..., n/32] uint8 -> [..., n] fp32 (exact in bf16 too)."""
    half = ((codes.view(torch.int8).to(torch.int16) << 7) & -16512).view(torch.float16).to(torch.float32)
    factor = exp2_from_byte(scales) * 256.0
    return (half.unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2)


def fp8_round(x: Tensor) -> Tensor:
    """Quantise and dequantise at once: the input of every FP8 or FP4 linear (§6.4). [..., n] -> [..., n] fp32."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    exponent = _ceil_exponent(groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4) * _INV_448)
    scale = (exponent << 23).view(torch.float32)
    codes = (groups / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return (e4m3_decode(codes) * scale).flatten(-2)


def _e2m1_encode(x: Tensor) -> Tensor:
    """fp32 in [-6, 6] -> codes uint8. Boundaries lie between grid points; at a tie the even code wins."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for edge, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= edge) if inclusive else (a > edge)
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
    amax = groups.abs().amax(-1).clamp_(min=6.0 * 2.0**-126)
    exponent = _ceil_exponent(amax * _INV_6)
    scaled = groups / exp2_from_byte(exponent).unsqueeze(-1)
    codes = _e2m1_encode(scaled.clamp_(-6.0, 6.0)).flatten(-2)
    return pack_nibbles(codes), exponent.to(torch.uint8)


def index_decode(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `index_encode` -> fp32, exact in bf16."""
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
