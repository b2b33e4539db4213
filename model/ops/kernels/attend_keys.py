"""Keys of `attend`, loaded as they are stored and decoded as it says: half of the channels at a time, the low ones or the high ones."""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The functions by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, near_codes, near_keys, far_codes, far_keys
    import triton
    import triton.language as tl

    @triton.jit
    def near_codes(
        ring, fresh, key, here, first, fresh_row,
        half: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, W: tl.constexpr, RB: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """Words [WP / 16, BK, 8] and scales [WP / 16, BK] of half the channels of window keys."""
        new = (key <= here) & (key >= first)
        old = (key <= here) & (key < first)
        old_row = (tl.maximum(key, 0) % W)[None, :]
        new_row = tl.where(new, fresh_row + key, 0).to(tl.int64)[None, :]
        group = half * (WP // 16) + tl.arange(0, WP // 16)
        column = (group * 8)[:, None] + tl.arange(0, 8)[None, :]
        has = (group < D // 32)[:, None]
        if RB % 4 == 0:
            words = ring.to(tl.pointer_type(tl.int32), bitcast=True) + old_row[:, :, None] * (RB // 4) + column[:, None, :]
            c = tl.load(words, mask=(old[None, :] & has)[:, :, None], other=0)
            words = fresh.to(tl.pointer_type(tl.int32), bitcast=True) + new_row[:, :, None] * (RB // 4) + column[:, None, :]
            c |= tl.load(words, mask=(new[None, :] & has)[:, :, None], other=0)
        else:
            c = tl.zeros([WP // 16, BK, 8], tl.int32)
            for j in tl.static_range(4):
                byte = old_row[:, :, None] * RB + column[:, None, :] * 4 + j
                c |= tl.load(ring + byte, mask=(old[None, :] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
                byte = new_row[:, :, None] * RB + column[:, None, :] * 4 + j
                c |= tl.load(fresh + byte, mask=(new[None, :] & has)[:, :, None], other=0).to(tl.int32) << (8 * j)
        e = tl.load(ring + old_row * RB + D + group[:, None], mask=old[None, :] & has, other=0)
        e |= tl.load(fresh + new_row * RB + D + group[:, None], mask=new[None, :] & has, other=0)
        return c, e

    @triton.jit
    def near_keys(c, e, WP: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr):
        """What `near_codes` has loaded as numbers [BK, WP * 2]."""
        # 2^72 = 2^120 of a magnitude's bits, times 2^-48.
        f = ((e.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 4.722366482869645e21)[:, :, None]
        if PACKED:
            k0, k1, k2, k3 = tl.inline_asm_elementwise(
                FP8, "=&r,=&r,=&r,=&r,r,r,r", [c, f.to(tl.bfloat16)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            k0 = (((c << 20) & 0x07F00000) | ((c << 24) & -2147483648)).to(tl.float32, bitcast=True) * f
            k1 = (((c << 12) & 0x07F00000) | ((c << 16) & -2147483648)).to(tl.float32, bitcast=True) * f
            k2 = (((c << 4) & 0x07F00000) | ((c << 8) & -2147483648)).to(tl.float32, bitcast=True) * f
            k3 = (((c >> 4) & 0x07F00000) | (c & -2147483648)).to(tl.float32, bitcast=True) * f
        k = tl.join(tl.join(k0.to(DOT), k2.to(DOT)), tl.join(k1.to(DOT), k3.to(DOT)))
        k = tl.permute(tl.reshape(k, [WP // 16, BK, 4, 2, 4]), (1, 0, 2, 4, 3))
        k = tl.reshape(k, [BK, WP * 2])
        if tl.float32 != DOT:
            k = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k], dtype=tl.bfloat16, is_pure=False, pack=2)
        return k

    @triton.jit
    def far_codes(
        pool, codes, scales, block, entry,
        half: tl.constexpr, D: tl.constexpr, WP: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    ):  # fmt: skip
        """Words [WP / 8, BK, 4] and scales [WP / 8, BK] of half the channels of entries."""
        place = tl.maximum(entry, 0) % PER_BLOCK
        code_row = block.to(tl.int64) * (BLOCK_BYTES // 2) + (codes // 2 + place * (D // 4))
        scale_row = block.to(tl.int64) * BLOCK_BYTES + (scales + place * (D // 16))
        words = pool.to(tl.pointer_type(tl.int16), bitcast=True)
        group = half * (WP // 8) + tl.arange(0, WP // 8)
        column = (group * 4)[:, None] + tl.arange(0, 4)[None, :]
        mask = (entry >= 0)[None, :] & (group < D // 16)[:, None]
        c = tl.load(words + code_row[None, :, None] + column[:, None, :], mask=mask[:, :, None], other=0)
        e = tl.load(pool + scale_row[None, :] + group[:, None], mask=mask, other=0)
        return c, e

    @triton.jit
    def far_keys(c, e, WP: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, FP4: tl.constexpr, DOT: tl.constexpr):
        """What `far_codes` has loaded as numbers [BK, WP * 2]."""
        # 2^99 * 2^99 = 2^120 of an E4M3 pattern read as fp32, times 2^126 of an E2M1 pattern, times 2^-48.
        f = ((e.to(tl.int32) & 127) << 20).to(tl.float32, bitcast=True) * 6.338253001141147e29 * 6.338253001141147e29
        f = f[:, :, None]
        if PACKED:
            k0, k1, k2, k3 = tl.inline_asm_elementwise(
                FP4, "=&r,=&r,=&r,=&r,r,r", [c, f.to(tl.bfloat16)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            c = c.to(tl.int32)
            k0 = (((c << 22) & 0x01C00000) | ((c << 28) & -2147483648)).to(tl.float32, bitcast=True) * f
            k1 = (((c << 18) & 0x01C00000) | ((c << 24) & -2147483648)).to(tl.float32, bitcast=True) * f
            k2 = (((c << 14) & 0x01C00000) | ((c << 20) & -2147483648)).to(tl.float32, bitcast=True) * f
            k3 = (((c << 10) & 0x01C00000) | ((c << 16) & -2147483648)).to(tl.float32, bitcast=True) * f
        k = tl.join(tl.join(k0.to(DOT), k2.to(DOT)), tl.join(k1.to(DOT), k3.to(DOT)))
        k = tl.permute(tl.reshape(k, [WP // 8, BK, 2, 2, 4]), (1, 0, 2, 4, 3))
        k = tl.reshape(k, [BK, WP * 2])
        if tl.float32 != DOT:
            k = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k], dtype=tl.bfloat16, is_pure=False, pack=2)
        return k

    @triton.jit
    def near_tile(
        ring, fresh, key, here, first, fresh_row, D: tl.constexpr, WP: tl.constexpr, W: tl.constexpr, RB: tl.constexpr, BK: tl.constexpr,
        PACKED: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """Window keys, low channels and high ones, and which of them a row sees."""
        c_low, e_low = near_codes(ring, fresh, key, here, first, fresh_row, 0, D, WP, W, RB, BK)
        c_high, e_high = near_codes(ring, fresh, key, here, first, fresh_row, 1, D, WP, W, RB, BK)
        return near_keys(c_low, e_low, WP, BK, PACKED, FP8, DOT), near_keys(c_high, e_high, WP, BK, PACKED, FP8, DOT), key <= here

    @triton.jit
    def far_tile(
        pool, codes, scales, block, entry, D: tl.constexpr, WP: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
        BK: tl.constexpr, PACKED: tl.constexpr, FP4: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        """The same of entries."""
        c_low, e_low = far_codes(pool, codes, scales, block, entry, 0, D, WP, PER_BLOCK, BLOCK_BYTES)
        c_high, e_high = far_codes(pool, codes, scales, block, entry, 1, D, WP, PER_BLOCK, BLOCK_BYTES)
        return far_keys(c_low, e_low, WP, BK, PACKED, FP4, DOT), far_keys(c_high, e_high, WP, BK, PACKED, FP4, DOT), entry >= 0

    names = {"near_codes": near_codes, "near_keys": near_keys, "far_codes": far_codes, "far_keys": far_keys}
    return SimpleNamespace(**names, near_tile=near_tile, far_tile=far_tile)
