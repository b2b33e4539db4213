"""Triton kernels of the indexer; `index_ops` documents what they compute and wraps them.

Keys stay packed: a byte holds two channels, the even one low. With three bits of an E2M1 code at bits 4..2 of a byte and its sign at bit 7,
the byte is the E4M3 number of 2^-6 the value, the smallest code (0.5, of exponent field 0 in both formats) included; so eight codes become
eight operands of the FP8 tensor cores by six integer operations. Slots of a group of 32 channels: the 16 even ones, then the 16 odd ones.
Queries are kept as E5M2 in that order, relative to a power of two of each head.

A product is taken per group of 32 channels, and the key's scale is applied to its sum in fp32. All products of a group are multiples of
one power of two, the largest 144 of it and their sum at most 4,608 of it: 13 bits, so the accumulators of Hopper's FP8 units, which keep
about 14, lose nothing. The four scaled sums are added in fp32, as the reference adds its channels, in another order.

`FP8` off gives the same by bf16 products of scaled keys, added over all channels by the accumulators, for comparison. `ASM` off gives plain
integer operations, fp32 products and rounding by hand for Triton's interpreter, which has no inline assembly, whose bf16 product is wrong
and whose casts to bf16 cut off.
"""

# mypy: ignore-errors
# The body of a kernel is Triton's language, whose values have other types than the Python that it looks like.

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from forebay.model.ops.kernels import dependent

# Eight E2M1 codes -> the four low ones and the four high ones as E4M3, 2^-6 small: sign to bit 7, the others to bits 4 to 2.
E2M1 = """
{
.reg .b32 a, b;
and.b32 b, $2, 0x88888888;
shl.b32 a, $2, 2;
shl.b32 $0, b, 4;
lop3.b32 $0, a, 0x1c1c1c1c, $0, 0xe2;
shr.b32 a, $2, 2;
lop3.b32 $1, a, 0x1c1c1c1c, b, 0xe2;
}
"""


@cache
def load(interpreted: bool) -> SimpleNamespace:
    """The kernels by name; `interpreted` is whether TRITON_INTERPRET is set, which triton looks at while they are defined."""
    global tl, triton, near, group_codes, group_dot, first_of, head_sum, row_scores, halves, key_codes, key_scales
    global quarters, paged, fetch, query_groups, head_weights, put, _await, FOURS
    import triton
    import triton.language as tl

    _await = dependent.load(interpreted)._await
    FOURS = tl.constexpr(E2M1)

    @triton.jit
    def near(x):
        """fp32 rounded to bf16, to nearest even, by integer arithmetic; a NaN stays one (a GPU's own, 0x7FFFFFFF, would overflow to -0)."""
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True), float("nan"))

    @triton.jit
    def queries(q, turn, out, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
        """HP heads of one row: rotation of the last W channels, FP4 in groups of 32, as E5M2 codes and a power of two per head."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HP + tl.arange(0, HP)[:, None, None]
        group = tl.arange(0, D // 32)[None, :, None]
        inside = tl.arange(0, 32)[None, None, :]
        channel = group * 32 + inside
        at = row * H * D + head * D + channel
        live = head < H
        turned = channel >= D - W
        place = row * W + (channel - (D - W)) // 2
        c = tl.load(turn + place, mask=turned, other=1.0)
        s = tl.load(turn + place + W // 2, mask=turned, other=0.0)
        _await()
        x = tl.load(q + at, mask=live, other=0.0).to(tl.float32)
        other = tl.load(q + row * H * D + head * D + (channel ^ 1), mask=live, other=0.0).to(tl.float32)
        s = tl.where(channel % 2 == 0, -s, s)
        x = tl.where(turned, near(x * c + other * s), x)
        top = tl.maximum(tl.max(tl.abs(x), 2, keep_dims=True), 7.052966104933725e-38) * 0.16666667163372040  # 6 * 2^-126 at least
        exponent = ((top.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 255
        a = tl.abs(x * ((254 - exponent) << 23).to(tl.float32, bitcast=True))
        value = tl.where(a > 0.25, 0.5, 0.0) + tl.where(a >= 0.75, 0.5, 0.0) + tl.where(a > 1.25, 0.5, 0.0)
        value += tl.where(a >= 1.75, 0.5, 0.0) + tl.where(a > 2.5, 1.0, 0.0) + tl.where(a >= 3.5, 1.0, 0.0) + tl.where(a > 5.0, 2.0, 0.0)
        # The head's power puts its largest scale at 2^13, where 6 is 1.5 * 2^15; a group's own scale is then 2^(13 - step).
        highest = tl.maximum(tl.max(exponent, 1, keep_dims=True), 14)
        step = tl.minimum(highest - exponent, 60)
        value *= ((140 - step) << 23).to(tl.float32, bitcast=True)
        # To E5M2, whose normal numbers begin at 2^-14: the value's two leading bits are exact, and so is a multiple of 2^-16.
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits >> 21) - (112 << 2)) & 0x7F
        code = tl.where(value >= 6.103515625e-05, normal, (value * 65536.0).to(tl.int32))
        code = tl.where(x < 0.0, code | 0x80, code)
        bad = tl.max(tl.where((x != x) | (tl.abs(x) == float("inf")), 1, 0), 2, keep_dims=True)
        code = tl.where(bad > 0, 0x7F, code)  # a NaN spoils its group, to be noticed in the logits
        slot = group * 32 + (inside % 2) * 16 + inside // 2
        line = (row * H + head) * (D + 16)
        tl.store(out + line + slot, code.to(tl.uint8), mask=live)
        # 2^6 for the keys' codes and 2^-13 for these: a head's weight times this power is all that a sum needs.
        power = (tl.maximum(highest - 7, 1) << 23).to(tl.float32, bitcast=True)
        tl.store((out + line + D).to(tl.pointer_type(tl.float32)), power, mask=live)

    @triton.jit
    def group_codes(
        q, row, last,
        g: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    ):  # fmt: skip
        """Group g of the queries of ROWS rows, those before `last`, [32, ROWS * HP]: E5M2, or their values as bf16 or fp32."""
        column = tl.arange(0, ROWS * HP)
        each, head = row + column // HP, column % HP
        at = (each * H + head)[:, None] * (D + 16) + g * 32 + tl.arange(0, 32)[None, :]
        code = tl.load(q + at, mask=((head < H) & (each < last))[:, None], other=0)
        if FP8 and ASM:
            return tl.trans(code.to(tl.float8e5, bitcast=True))
        elif ASM:
            return tl.trans(code.to(tl.float8e5, bitcast=True).to(tl.bfloat16))
        else:
            wide = code.to(tl.int32)
            value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 21)).to(tl.float32, bitcast=True) * 5.192296858534828e33
            return tl.trans(tl.where((wide & 0x7F) > 0x7C, float("nan"), value))

    @triton.jit
    def group_dot(packed, power, q, total, BK: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
        """total [BK, N] fp32 and products of a group of 32 channels times the keys' scales: packed [BK, 16], power [BK], q [32, N]."""
        if FP8 and ASM:
            low, high = tl.inline_asm_elementwise(
                FOURS,
                "=&r,=r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
            )  # fmt: skip
            keys = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BK, 32]).to(tl.float8e4nv, bitcast=True)
            return total + tl.dot(keys, q) * power[:, None]
        elif ASM:
            # A code's bits are put where they make the bf16 number of 2^-126 its value; the power of two leaves 2^-14 of it.
            factor = tl.broadcast_to((power * 5.192296858534828e33).to(tl.bfloat16)[:, None], packed.shape)
            low, high = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 y, a, b;
                prmt.b32 y, $4, 0, 0x4140;
                shl.b32 a, y, 12;
                shl.b32 b, y, 6;
                and.b32 b, b, 0x01c001c0;
                lop3.b32 a, a, 0x80008000, b, 0xea;
                mul.rn.bf16x2 $0, a, $5;
                shl.b32 a, y, 8;
                shl.b32 b, y, 2;
                and.b32 b, b, 0x01c001c0;
                lop3.b32 a, a, 0x80008000, b, 0xea;
                mul.rn.bf16x2 $2, a, $5;
                prmt.b32 y, $4, 0, 0x4342;
                shl.b32 a, y, 12;
                shl.b32 b, y, 6;
                and.b32 b, b, 0x01c001c0;
                lop3.b32 a, a, 0x80008000, b, 0xea;
                mul.rn.bf16x2 $1, a, $6;
                shl.b32 a, y, 8;
                shl.b32 b, y, 2;
                and.b32 b, b, 0x01c001c0;
                lop3.b32 a, a, 0x80008000, b, 0xea;
                mul.rn.bf16x2 $3, a, $6;
                }
                """,
                "=&r,=&r,=&r,=&r,r,r,r", [packed, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
            return tl.dot(tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BK, 32]), q, total)
        else:
            wide = packed.to(tl.int32)
            low = (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True)
            high = (((wide & 0x70) << 18) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
            keys = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BK, 32]) * 1.329227995784916e36  # 2^120: 2^-6 of the value
            return total + tl.dot(keys, q) * power[:, None]

    @triton.jit
    def first_of(a, b):
        return a

    @triton.jit
    def head_sum(total, weight, BK: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
        """Dots [BK, ROWS * HP] fp32 and weights [ROWS * HP] fp32 of bf16 values -> scores [BK, ROWS] fp32 of bf16 values; a NaN stays one.

        A tensor product with zeros and ones adds the rounded products, which spares their way back to fp32.
        """
        if ASM:
            w = tl.broadcast_to(weight.to(tl.bfloat16)[None, :], total.shape)
            part = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 a, z;
                mov.b32 z, 0x80008000;
                cvt.rn.relu.bf16x2.f32 a, $2, $1;
                fma.rn.bf16x2 $0, a, $3, z;
                }
                """,
                "=r,r,r,r", [total, w], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
            mine = tl.arange(0, ROWS * HP)[:, None] // HP == tl.arange(0, 8)[None, :] % ROWS
            sums = tl.dot(part, tl.where(mine, 1.0, 0.0).to(tl.bfloat16))
            if ROWS < 8:  # the columns repeat
                sums = tl.reduce(tl.reshape(sums, [BK, 8 // ROWS, ROWS]), 1, first_of)
            return sums.to(tl.bfloat16).to(tl.float32)
        else:
            part = near(total)
            part = near(tl.where(part < 0.0, 0.0, part) * weight[None, :])
            return near(tl.sum(tl.reshape(part, [BK, ROWS, HP]), 2))

    @triton.jit
    def row_scores(
        p0, p1, p2, p3, s0, s1, s2, s3, q0, q1, q2, q3, weight,
        D: tl.constexpr, BK: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    ):  # fmt: skip
        """Scores [BK, ROWS]: packed codes, scales and queries of up to four groups (of fewer, the rest are not looked at)."""
        total = tl.zeros([BK, ROWS * HP], tl.float32)
        total = group_dot(p0, s0, q0, total, BK, FP8, ASM)
        if D > 32:
            total = group_dot(p1, s1, q1, total, BK, FP8, ASM)
        if D > 64:
            total = group_dot(p2, s2, q2, total, BK, FP8, ASM)
            total = group_dot(p3, s3, q3, total, BK, FP8, ASM)
        return head_sum(total, weight, BK, HP, ROWS, ASM)

    @triton.jit
    def halves(packed, BK: tl.constexpr, W: tl.constexpr):
        return tl.split(tl.permute(tl.reshape(packed, [BK, 2, W]), (0, 2, 1)))

    @triton.jit
    def quarters(packed, BK: tl.constexpr):
        front, back = halves(packed, BK, 32)
        p0, p1 = halves(front, BK, 16)
        p2, p3 = halves(back, BK, 16)
        return p0, p1, p2, p3

    @triton.jit
    def paged(codes, pages, begin, top, BK: tl.constexpr, ENTRIES: tl.constexpr):
        """Packed codes [BK, 64] of the keys from `begin` on, copied by the tensor memory accelerator, and their pages.

        BK divides ENTRIES, or is twice as many; the pages are one, or [BK].
        """
        page = tl.load(pages + begin // ENTRIES)
        if BK <= ENTRIES:
            return tl.reshape(codes.load([page, begin % ENTRIES, 0]), [BK, 64]), page.to(tl.int64)
        else:
            after = begin // ENTRIES + 1
            other = tl.load(pages + after, mask=after * ENTRIES < top, other=0)
            packed = tl.join(tl.reshape(codes.load([page, 0, 0]), [ENTRIES, 64]), tl.reshape(codes.load([other, 0, 0]), [ENTRIES, 64]))
            return tl.reshape(tl.permute(packed, (2, 0, 1)), [BK, 64]), tl.where(tl.arange(0, BK) < ENTRIES, page, other).to(tl.int64)

    @triton.jit
    def key_codes(codes, at, D: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
        """Packed codes [BK, 16] of up to four groups of the keys at offsets `at` [BK], SPLIT bytes of a key loaded at a time."""
        if SPLIT == 64 and D == 128:
            p0, p1, p2, p3 = quarters(tl.load(codes + at[:, None] + tl.arange(0, 64)[None, :]), BK)
        elif SPLIT >= 32 and D >= 64:
            place = at[:, None] + tl.arange(0, 32)[None, :]
            p0, p1 = halves(tl.load(codes + place), BK, 16)
            p2 = p0
            p3 = p1
            if D > 64:
                p2, p3 = halves(tl.load(codes + place + 32), BK, 16)
        else:
            place = at[:, None] + tl.arange(0, 16)[None, :]
            p0 = tl.load(codes + place)
            p1 = p0
            p2 = p0
            p3 = p0
            if D > 32:
                p1 = tl.load(codes + place + 16)
            if D > 64:
                p2 = tl.load(codes + place + 32)
                p3 = tl.load(codes + place + 48)
        return p0, p1, p2, p3

    @triton.jit
    def key_scales(scales, at, D: tl.constexpr, WORD: tl.constexpr):
        """Scales [BK] fp32 of up to four groups; a byte of 0, which only a null block has, gives 0."""
        if WORD and D == 128:
            word = tl.load((scales + at).to(tl.pointer_type(tl.int32)))
            s0 = ((word & 255) << 23).to(tl.float32, bitcast=True)
            s1 = (((word >> 8) & 255) << 23).to(tl.float32, bitcast=True)
            s2 = (((word >> 16) & 255) << 23).to(tl.float32, bitcast=True)
            s3 = (((word >> 24) & 255) << 23).to(tl.float32, bitcast=True)
            return s0, s1, s2, s3
        else:
            s0 = (tl.load(scales + at).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            s1 = s0
            s2 = s0
            s3 = s0
            if D > 32:
                s1 = (tl.load(scales + at + 1).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            if D > 64:
                s2 = (tl.load(scales + at + 2).to(tl.int32) << 23).to(tl.float32, bitcast=True)
                s3 = (tl.load(scales + at + 3).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            return s0, s1, s2, s3

    @triton.jit
    def fetch(
        codes, scales, pages, begin, top, code_block, scale_block,
        D: tl.constexpr, CODE_ROW: tl.constexpr, SCALE_ROW: tl.constexpr, ENTRIES: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
        WORD: tl.constexpr, COPY: tl.constexpr,
    ):  # fmt: skip
        """Codes and scales, by groups, of the BK keys from `begin` on; behind `top`, any keys'."""
        entry = begin + tl.arange(0, BK)
        if COPY:
            packed, page = paged(codes, pages, begin, top, BK, ENTRIES)
            p0, p1, p2, p3 = quarters(packed, BK)
        elif ENTRIES % BK == 0:
            page = tl.load(pages + begin // ENTRIES).to(tl.int64)
            p0, p1, p2, p3 = key_codes(codes + page * code_block, entry % ENTRIES * CODE_ROW, D, BK, SPLIT)
        else:
            page = tl.load(pages + entry // ENTRIES, mask=entry < top, other=0).to(tl.int64)
            p0, p1, p2, p3 = key_codes(codes, page * code_block + entry % ENTRIES * CODE_ROW, D, BK, SPLIT)
        s0, s1, s2, s3 = key_scales(scales, page * scale_block + entry % ENTRIES * SCALE_ROW, D, WORD)
        return p0, p1, p2, p3, s0, s1, s2, s3

    @triton.jit
    def query_groups(
        q, row, last, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr
    ):  # fmt: skip
        q0 = group_codes(q, row, last, 0, H, HP, D, ROWS, FP8, ASM)
        q1 = q0
        q2 = q0
        q3 = q0
        if D > 32:
            q1 = group_codes(q, row, last, 1, H, HP, D, ROWS, FP8, ASM)
        if D > 64:
            q2 = group_codes(q, row, last, 2, H, HP, D, ROWS, FP8, ASM)
            q3 = group_codes(q, row, last, 3, H, HP, D, ROWS, FP8, ASM)
        return q0, q1, q2, q3

    @triton.jit
    def head_weights(
        q, weights, row, last, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr
    ):  # fmt: skip
        """Weights of the rows' heads, [ROWS * HP] fp32, times the powers of their queries: still bf16 values."""
        column = tl.arange(0, ROWS * HP)
        each, head = row + column // HP, column % HP
        live = (head < H) & (each < last)
        weight = tl.load(weights + each * H + head, mask=live, other=0.0).to(tl.float32)
        weight *= tl.load((q + (each * H + head) * (D + 16) + D).to(tl.pointer_type(tl.float32)), mask=live, other=0.0)
        if ASM and not FP8:
            weight *= 256.0  # keys are 2^-14 of their values then, not 2^-6
        return weight

    @triton.jit
    def put(
        total, begin, each, mine, some, out, maxima, out_stride, maxima_stride, columns,
        BK: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, MAXIMA: tl.constexpr,
    ):  # fmt: skip
        """Scores [BK, ROWS] of the entries from `begin` on and the maxima of their blocks, for rows `each` that see `mine`."""
        entry = (begin + tl.arange(0, BK))[:, None]
        total = tl.where(entry < mine, total, float("-inf"))
        tl.store(out + each * out_stride + entry, total.to(tl.bfloat16), mask=(entry < columns) & some)
        if MAXIMA:
            best = tl.where(total == total, total, float("inf"))
            best = tl.max(tl.reshape(best, [BK // SIZE, SIZE, ROWS]), 1)
            run = (begin // SIZE + tl.arange(0, BK // SIZE))[:, None]
            best = tl.where((run == (mine - 1) // SIZE) & (run * SIZE < mine), float("inf"), best)
            tl.store(maxima + each * maxima_stride + run, best.to(tl.bfloat16), mask=(run * SIZE < columns) & some)

    @triton.jit(do_not_specialize=["count"])
    def scan(
        q, weights, codes, scales, table, tile_first, tile_rows, span, visible, out, maxima,
        code_block, scale_block, table_stride, out_stride, maxima_stride, columns, count,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, CODE_ROW: tl.constexpr, SCALE_ROW: tl.constexpr, ENTRIES: tl.constexpr,
        SIZE: tl.constexpr, MAXIMA: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
        SPLIT: tl.constexpr, WORD: tl.constexpr, COPY: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    ):  # fmt: skip
        """Every program takes an equal run of all pieces, whatever the tiles' lengths: BK keys for ROWS rows of a tile, key by key.

        So the queries of ROWS rows stay put while the keys pass. COPY: `codes` is a tensor descriptor.
        """
        tiles = tl.arange(0, TILES)
        firsts = tl.load(tile_first + tiles, mask=tiles < count, other=0)
        many = tl.load(tile_rows + tiles, mask=tiles < count, other=0)
        tops = tl.load(visible + firsts + tl.maximum(many - 1, 0), mask=many > 0, other=0)  # rows ascend: the last sees most
        spans = tl.load(span + firsts, mask=many > 0, other=0)
        tops = tl.minimum(tops, columns)
        pieces = (tops + BK - 1) // BK
        parts = pieces * ((many + ROWS - 1) // ROWS)
        ends = tl.cumsum(parts, 0)
        total_pieces = tl.sum(parts, 0).to(tl.int64)
        piece = (total_pieces * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
        stop = (total_pieces * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
        _await()
        while piece < stop:
            tile = tl.sum(tl.where(ends <= piece, 1, 0), 0)
            here = tiles == tile
            top = tl.sum(tl.where(here, tops, 0), 0)
            each = tl.sum(tl.where(here, pieces, 0), 0)
            first = tl.sum(tl.where(here, firsts, 0), 0)
            last = (first + tl.sum(tl.where(here, many, 0), 0)).to(tl.int64)
            base = tl.sum(tl.where(here, ends - parts, 0), 0)
            chunk = (piece - base) // each
            base += chunk * each
            row = (first + chunk * ROWS).to(tl.int64)
            upto = tl.minimum(stop, base + each)
            pages = table + tl.sum(tl.where(here, spans, 0), 0).to(tl.int64) * table_stride
            q0, q1, q2, q3 = query_groups(q, row, last, H, HP, D, ROWS, FP8, ASM)
            weight = head_weights(q, weights, row, last, H, HP, D, ROWS, FP8, ASM)
            rows = (row + tl.arange(0, ROWS))[None, :]
            some = rows < last
            mine = tl.load(visible + rows, mask=some, other=0)
            for number in tl.range(piece - base, upto - base, num_stages=STAGES):
                begin = number * BK
                p0, p1, p2, p3, s0, s1, s2, s3 = fetch(
                    codes, scales, pages, begin, top, code_block, scale_block,
                    D, CODE_ROW, SCALE_ROW, ENTRIES, BK, SPLIT, WORD, COPY,
                )  # fmt: skip
                total = row_scores(p0, p1, p2, p3, s0, s1, s2, s3, q0, q1, q2, q3, weight, D, BK, HP, ROWS, FP8, ASM)
                put(total, begin, rows, mine, some, out, maxima, out_stride, maxima_stride, columns, BK, ROWS, SIZE, MAXIMA)
            piece = upto

    @triton.jit
    def candidates(
        q, weights, codes, scales, table, blocks, tile_first, tile_rows, span, visible, out,
        code_block, scale_block, table_stride, block_stride, out_stride, columns,
        H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, CODE_ROW: tl.constexpr, SCALE_ROW: tl.constexpr, ENTRIES: tl.constexpr,
        SIZE: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WORD: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    ):  # fmt: skip
        """BK columns of the one row of a tile: column c is entry blocks[row, c // SIZE] * SIZE + c % SIZE; grid (columns / BK, tiles)."""
        tile = tl.program_id(1)
        row = tl.load(tile_first + tile).to(tl.int64)
        many = tl.load(tile_rows + tile)
        mine = tl.load(visible + row, mask=many > 0, other=0)
        line = tl.load(span + row, mask=many > 0, other=0).to(tl.int64)
        column = tl.program_id(0) * BK + tl.arange(0, BK)
        block = tl.load(blocks + row * block_stride + column // SIZE, mask=column < tl.where(many > 0, columns, 0), other=-1)
        entry = block * SIZE + column % SIZE
        there = (block >= 0) & (entry < mine)
        page = tl.load(table + line * table_stride + entry // ENTRIES, mask=there, other=0).to(tl.int64)
        inside = tl.where(there, entry % ENTRIES, 0)  # of block 0 where there is none
        p0, p1, p2, p3 = key_codes(codes, page * code_block + inside * CODE_ROW, D, BK, SPLIT)
        s0, s1, s2, s3 = key_scales(scales, page * scale_block + inside * SCALE_ROW, D, WORD)
        _await()
        if many > 0:
            total = tl.zeros([BK], tl.float32)
            if tl.max(there.to(tl.int32), 0) > 0:
                q0, q1, q2, q3 = query_groups(q, row, row + 1, H, HP, D, 1, FP8, ASM)
                weight = head_weights(q, weights, row, row + 1, H, HP, D, 1, FP8, ASM)
                scores = row_scores(p0, p1, p2, p3, s0, s1, s2, s3, q0, q1, q2, q3, weight, D, BK, HP, 1, FP8, ASM)
                total = tl.reshape(scores, [BK])
            total = tl.where(there, total, float("-inf"))
            tl.store(out + row * out_stride + column, total.to(tl.bfloat16), mask=column < columns)

    return SimpleNamespace(queries=queries, scan=scan, candidates=candidates)
