"""Quantised formats against the golden tables and against an exact rational reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay.model.ops import formats
from forwards import difference

Components = Callable[[str], dict[str, Tensor]]
GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


@pytest.mark.case("B017")
def test_main_kv_is_bit_exact(components: Components, golden: Path) -> None:
    g = components("quantisers")
    names = json.loads((golden / "components" / "quantisers_main_kv_case_names.json").read_text("utf-8"))
    packed, scales = formats.main_encode(g["main_kv.x"])
    wrong = ((packed != g["main_kv.packed"]).any(1) | (scales != g["main_kv.scale_e4m3"]).any(1)).nonzero().flatten().tolist()
    assert [names[i] if i < len(names) else i for i in wrong] == []
    assert torch.equal(formats.unpack_nibbles(packed), g["main_kv.code"])
    decoded = formats.main_decode(packed, scales)
    assert difference(decoded, g["main_kv.dequant_fp32"]) is None  # the sign of zero counts
    assert difference(decoded.to(torch.bfloat16), g["main_kv.dequant"]) is None


@pytest.mark.case("B017")
def test_index_keys_are_bit_exact(components: Components) -> None:
    g = components("quantisers")
    packed, scales = formats.index_encode(g["index.x"])
    assert difference(packed, g["index.packed"]) is None
    assert difference(scales, g["index.scale_e8m0"]) is None
    assert difference(formats.unpack_nibbles(packed), g["index.code"]) is None
    assert difference(formats.index_decode(packed, scales).to(torch.bfloat16), g["index.dequant"]) is None
    assert difference(formats.index_round(g["index.x"]), formats.index_decode(packed, scales)) is None


@pytest.mark.case("B017")
def test_fp8_is_bit_exact(components: Components) -> None:
    g = components("quantisers")
    codes, scales = formats.fp8_encode(g["fp8.x"])
    assert difference(codes, g["fp8.code_e4m3"]) is None
    assert difference(scales, g["fp8.scale_e8m0"]) is None
    assert difference(formats.fp8_decode(codes, scales).to(torch.bfloat16), g["fp8.dequant"]) is None


@pytest.mark.parametrize("rows", [1, 3, 84, 700])
def test_rounding_at_once_is_encode_then_decode(components: Components, rows: int) -> None:
    """Whatever path a size takes, small and large inputs round alike."""
    g = components("quantisers")
    x = g["fp8.x"].repeat(9, 1)[:rows]
    assert difference(formats.fp8_round(x), formats.fp8_decode(*formats.fp8_encode(x))) is None
    x = g["index.x"].repeat(9, 1)[:rows]
    assert difference(formats.index_round(x), formats.index_decode(*formats.index_encode(x))) is None


def test_e4m3_table(components: Components) -> None:
    g = components("weight_formats")
    wanted = g["e4m3.value_fp32"]
    found = formats.e4m3_decode(g["e4m3.byte"])
    number = ~wanted.isnan()
    assert int(number.sum()) == 254
    assert difference(found[number], wanted[number]) is None


def test_mxfp4_weights_at_every_byte_and_scale(components: Components) -> None:
    """Scale byte 0 is the subnormal 2^-127."""
    g = components("weight_formats")
    packed = g["mxfp4.weight_i8"].view(torch.uint8)
    assert difference(formats.e2m1_decode(packed), g["mxfp4.value_e2m1"]) is None
    assert difference(formats.mxfp4_decode(packed, g["mxfp4.scale_e8m0"]), g["mxfp4.dequant_fp32"]) is None
    assert difference(formats.exp2_from_byte(g["mxfp4.scale_e8m0"]), g["mxfp4.scale_fp32"]) is None
    assert int(g["mxfp4.scale_e8m0"].min()) == 0
    assert int(g["mxfp4.scale_e8m0"].max()) == 254


def test_even_channel_is_the_low_nibble() -> None:
    packed = formats.pack_nibbles(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x8F]]
    assert formats.unpack_nibbles(packed).tolist() == [[1, 2, 15, 8]]


def test_worked_group_of_the_specification() -> None:
    x = [0.30078125, -1, 0.01, 2.5, -0.75, 0.125, 3, -4.25, 0, 0.5, -0.0625, 1.75, -2, 0.2, 5, -6.5]
    packed, scales = formats.main_encode(torch.tensor([x], dtype=torch.bfloat16))
    assert formats.e4m3_decode(scales).tolist() == [[1.125]]
    wanted = [0.5, -1, 0, 2, -0.5, 0, 3, -4, 0, 0.5, -0.0, 1.5, -2, 0, 4, -6]
    assert formats.e2m1_decode(packed).tolist() == [wanted]


@pytest.mark.case("B017")
def test_main_kv_equals_exact_arithmetic() -> None:
    """Scale and every code of random groups, and of groups with zeros, denormals, outliers and the largest scale, from rationals."""
    for group in _groups():
        packed, scales = formats.main_encode(group.unsqueeze(0))
        amax = max(float(group.abs().max()), 6 * 2.0**-9)
        exact = Fraction(float(torch.tensor(amax) / 6))  # the division is one fp32 operation
        scale = min(_e4m3_nearest(exact), Fraction(448))
        assert Fraction(float(formats.e4m3_decode(scales))) == scale, group
        codes = formats.unpack_nibbles(packed)[0].tolist()
        for x, code in zip(group.float().tolist(), codes, strict=True):
            quotient = Fraction(float(torch.tensor(x) / torch.tensor(float(scale))))
            assert code & 7 == _e2m1_nearest(abs(quotient)), (x, float(scale))
            assert (code >> 3) == (math.copysign(1.0, x) < 0), x


@pytest.mark.case("B017")
def test_index_and_window_formats_equal_exact_arithmetic() -> None:
    for pair in zip(*[iter(_groups())] * 2, strict=True):
        group = torch.cat(pair)
        packed, scales = formats.index_encode(group.unsqueeze(0))
        amax = max(float(group.abs().max()), 6 * 2.0**-126)
        power = _ceil_power(Fraction(float(torch.tensor(amax) * torch.tensor(1 / 6))))
        assert Fraction(2) ** (int(scales) - 127) == power
        for x, code in zip(group.float().tolist(), formats.unpack_nibbles(packed)[0].tolist(), strict=True):
            assert code & 7 == _e2m1_nearest(abs(Fraction(x) / power))
        bytes8, scales = formats.fp8_encode(group.unsqueeze(0))
        amax = max(float(group.abs().max()), float(torch.tensor(1e-4)))
        power = _ceil_power(Fraction(float(torch.tensor(amax) * torch.tensor(1 / 448))))
        assert Fraction(2) ** (int(scales) - 127) == power
        for x, value in zip(group.float().tolist(), formats.e4m3_decode(bytes8)[0].tolist(), strict=True):
            assert abs(Fraction(value)) == min(_e4m3_nearest(abs(Fraction(x) / power)), Fraction(448))


def test_groups_do_not_touch_each_other() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    loud = x.clone()
    loud[:, 32:] *= 1000
    for encode, decode in (
        (formats.main_encode, formats.main_decode), (formats.index_encode, formats.index_decode), (formats.fp8_encode, formats.fp8_decode),
    ):  # fmt: skip
        assert torch.equal(decode(*encode(x))[:, :32], decode(*encode(loud))[:, :32])


def test_a_zero_block_decodes_to_zeros() -> None:
    """Empty list slots point at the null block."""
    zeros = torch.zeros((2, 32), dtype=torch.uint8)
    assert not formats.main_decode(zeros, zeros[:, :4]).any()
    assert not formats.index_decode(zeros, zeros[:, :2]).any()
    assert not formats.fp8_decode(zeros, zeros[:, :1]).any()


def _groups() -> list[Tensor]:
    """An even number of groups of 16 bf16 values."""
    generator = torch.Generator().manual_seed(17)
    groups = [torch.randn(16, generator=generator) * 10.0**e for e in (-6, -3, -2, -1, 0, 0, 1, 2, 3, 4)]
    for scale in (1.0, 2.0**-9, 448.0, 1.125):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) * scale
        groups.append(torch.cat((ties, -ties)))
    outlier = torch.full((16,), 0.01)
    outlier[5] = -300.0
    groups += [torch.full((16,), value) for value in (0.0, -0.0, 2.0**-130, 448.0 * 6, 1e5)]
    groups.append(outlier)
    return [g.to(torch.bfloat16) for g in groups]


def _e2m1_nearest(x: Fraction) -> int:
    """Code of the nearest grid point, ties to the even code; above 6 saturates."""
    return min(range(8), key=lambda code: (abs(GRID[code] - x), code % 2))


def _e4m3_nearest(x: Fraction) -> Fraction:
    """Nearest E4M3 number, ties to the even mantissa; without a largest one."""
    if x == 0:
        return x
    exponent = max(math.floor(math.log2(x)), -6)
    step = Fraction(2) ** (exponent - 3)
    count = x / step
    low = math.floor(count)
    if count - low > Fraction(1, 2) or (count - low == Fraction(1, 2) and low % 2):
        low += 1
    return low * step


def _ceil_power(x: Fraction) -> Fraction:
    power = Fraction(2) ** (math.floor(math.log2(x)) - 1)
    while power < x:
        power *= 2
    return power


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_any_batch(bad: float) -> None:
    """A group with such a value must reach the logits, where it is looked for, whoever shares the step."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    x[0, 3] = bad
    for rows in (x[:1], x):
        assert not formats.fp8_round(rows)[0, :32].isfinite().any()
        assert formats.fp8_round(rows)[0, 32:].isfinite().all()
        assert not formats.fp8_decode(*formats.fp8_encode(rows))[0, 3].isfinite()
        assert not formats.index_round(rows)[0, 3].isfinite()


def test_what_rounds_to_448_needs_no_clamp() -> None:
    """The scale is rounded, so a value may exceed 448 times it by an ulp; it is the largest there is all the same."""
    top = torch.tensor(448.0)
    above = torch.nextafter(top, torch.tensor(torch.inf))
    for power in range(-20, 100):
        for value in (top, above, -above):
            x = torch.zeros(1, 32)
            x[0, 7] = value * 2.0**power
            codes, scales = formats.fp8_encode(x)
            assert formats.fp8_round(x)[0, 7].isfinite()
            assert torch.equal(formats.fp8_decode(codes, scales), formats.fp8_round(x))
            assert float((formats.fp8_round(x)[0, 7] - x[0, 7]).abs()) <= float(x[0, 7].abs()) / 16


def test_fp8_of_no_rows_and_of_a_part_of_wider_rows() -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(8))
    assert formats.fp8_round(x[:0]).shape == (0, 96)
    assert [tuple(t.shape) for t in formats.fp8_encode(x[:0])] == [(0, 96), (0, 3)]
    part = x[:, 32:]
    assert torch.equal(formats.fp8_round(part), formats.fp8_round(x)[:, 32:])
    codes, scales = formats.fp8_encode(x)
    assert torch.equal(formats.fp8_decode(codes[:, 32:], scales[:, 1:]), formats.fp8_round(part))
