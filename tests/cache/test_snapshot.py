"""A stored snapshot is exactly what was packed, or it is refused with the reason; nothing in it is ever executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cache import snapshot as module
from forebay.cache.layout import KVLayout
from forebay.cache.snapshot import BadSnapshot, Snapshot, SnapshotShape, SnapshotShapeError, pack, unpack
from forebay.model.config import ModelConfig

SHAPE = SnapshotShape(encoder_layers=2, decoder_layers=3, window=8, row_bytes=9)
KEY, IDENTITY = b"k" * 32, b"i" * 16


def make(seed: int = 0, decoder: bool = True) -> Snapshot:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 256, shape, dtype=np.uint8) for shape in (SHAPE.encoder, SHAPE.decoder)]
    return Snapshot(512, 384, 500 if decoder else None, 2, rows[0], rows[1] if decoder else None, written_at=1234.5)


def same(a: Snapshot, b: Snapshot) -> bool:
    fields = [(s.boundary, s.encoder_floor, s.decoder_floor, s.lineage, s.written_at, s.decoder is None) for s in (a, b)]
    rows = np.array_equal(a.encoder, b.encoder) and (a.decoder is None or np.array_equal(a.decoder, b.decoder))
    return fields[0] == fields[1] and rows


def why(value: bytes | memoryview, key: bytes = KEY, identity: bytes = IDENTITY, shape: SnapshotShape = SHAPE) -> str:
    with pytest.raises(BadSnapshot) as caught:
        unpack(value, key, identity, shape)
    return caught.value.kind


def sealed(value: bytearray, payload: bool = False) -> bytes:
    """`value` with checksums that fit: what only our own code, of another version or with other numbers, could have written."""
    if payload:
        fields = list(module._FIELDS.unpack_from(value))
        fields[-2:] = [len(value) - module.HEADER_BYTES, google_crc32c.value(bytes(value[module.HEADER_BYTES :]))]
        module._FIELDS.pack_into(value, 0, *fields)
    module._CRC.pack_into(value, module._CRC_AT, google_crc32c.value(bytes(value[: module._CRC_AT])))
    return bytes(value)


@pytest.mark.parametrize("decoder", [True, False])
def test_round_trip(decoder: bool) -> None:
    original = make(decoder=decoder)
    value = pack(original, KEY, IDENTITY, SHAPE)
    assert len(value) == original.nbytes
    back = unpack(bytes(value), KEY, IDENTITY, SHAPE)
    assert same(original, back)
    assert not back.encoder.flags.writeable


def test_rows_need_not_be_contiguous() -> None:
    original = make()
    turned = Snapshot(512, 384, None, 0, np.asfortranarray(original.encoder), None)
    assert np.array_equal(unpack(pack(turned, KEY, IDENTITY, SHAPE), KEY, IDENTITY, SHAPE).encoder, original.encoder)


def test_the_value_is_memory_of_its_own() -> None:
    original = make()
    value = pack(original, KEY, IDENTITY, SHAPE)
    original.encoder[:] = 0
    assert same(unpack(value, KEY, IDENTITY, SHAPE), make())


def test_every_flipped_bit_is_found() -> None:
    value = bytearray(pack(make(), KEY, IDENTITY, SHAPE))
    kinds = set()
    for at in range(len(value)):
        for bit in range(8):
            value[at] ^= 1 << bit
            kinds.add(why(value))
            value[at] ^= 1 << bit
    assert kinds == {"header", "version", "checksum"}
    assert same(unpack(value, KEY, IDENTITY, SHAPE), make())


def test_every_other_length_is_found() -> None:
    value = bytes(pack(make(), KEY, IDENTITY, SHAPE))
    assert {why(value[:n]) for n in range(len(value))} == {"length"}
    assert why(value + b"\0") == "length"
    assert why(value + value) == "length"


@given(st.binary(max_size=2000), st.integers(0, 300))
def test_junk_is_refused(junk: bytes, kept: int) -> None:
    start = bytes(pack(make(), KEY, IDENTITY, SHAPE))[:kept]
    assert why(start + junk) in module.BAD_KINDS


@pytest.mark.case("B035")
def test_other_key_model_or_layout_is_refused() -> None:
    value = pack(make(), KEY, IDENTITY, SHAPE)
    assert why(value, key=b"K" * 32) == "key"
    assert why(value, identity=b"I" * 16) == "identity"
    for other in (SnapshotShape(3, 2, 8, 9), SnapshotShape(2, 3, 9, 8), SnapshotShape(2, 4, 8, 9), SnapshotShape(2, 3, 8, 10)):
        if (other.encoder_bytes, other.decoder_bytes) != (SHAPE.encoder_bytes, SHAPE.decoder_bytes):  # else the identity differs
            assert why(value, shape=other) == "length"


def test_a_later_version_is_refused_whatever_its_header() -> None:
    value = bytearray(pack(make(), KEY, IDENTITY, SHAPE))
    value[4] = module.VERSION + 1
    assert why(sealed(value)) == "version"


def test_unknown_sections_are_skipped() -> None:
    """Rows of a kind added later (a drafter's) do not spoil the ones we know."""
    value = bytearray(pack(make(), KEY, IDENTITY, SHAPE)) + b"draft rows"
    fields = list(module._FIELDS.unpack_from(value))
    fields[2] = 3
    module._FIELDS.pack_into(value, 0, *fields)
    module._SECTION.pack_into(value, module._TABLE_AT + 2 * module._SECTION.size, 77, 10)
    assert same(unpack(sealed(value, payload=True), KEY, IDENTITY, SHAPE), make())


@pytest.mark.parametrize("change", ["sections", "too long", "past the end", "no encoder", "floor without rows", "rows without floor"])
def test_a_header_that_contradicts_itself_is_refused(change: str) -> None:
    value = bytearray(pack(make(decoder=change != "floor without rows"), KEY, IDENTITY, SHAPE))
    fields = list(module._FIELDS.unpack_from(value))
    table = [module._SECTION.unpack_from(value, module._TABLE_AT + n * module._SECTION.size) for n in range(2)]
    match change:
        case "sections":
            fields[2] = 1000
        case "too long":
            table[0] = (module.ENCODER, SHAPE.encoder_bytes + 1)
        case "past the end":
            table[1] = (module.DECODER, 2**63)
        case "no encoder":
            table[0] = (99, SHAPE.encoder_bytes)
        case "floor without rows":
            fields[7] = 500
        case "rows without floor":
            fields[7] = module.NONE
    module._FIELDS.pack_into(value, 0, *fields)
    for number, section in enumerate(table):
        module._SECTION.pack_into(value, module._TABLE_AT + number * module._SECTION.size, *section)
    assert why(sealed(value)) in ("length", "header")


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> object:
            return Path.touch, (tmp_path / "sprung",)

    assert why(pickle.dumps(Trap()) * 20) == "header"
    value = bytearray(pack(make(), KEY, IDENTITY, SHAPE))
    trap = pickle.dumps(Trap())
    value[module.HEADER_BYTES : module.HEADER_BYTES + len(trap)] = trap
    assert why(value) == "checksum"
    unpack(sealed(value, payload=True), KEY, IDENTITY, SHAPE)  # rows are bytes and stay bytes
    assert not (tmp_path / "sprung").exists()


def test_rows_of_a_wrong_shape_are_a_bug() -> None:
    good = make()
    for rows in (good.encoder[:1], good.encoder.astype(np.int8)):
        with pytest.raises(SnapshotShapeError):
            pack(Snapshot(512, 384, None, 0, rows, None), KEY, IDENTITY, SHAPE)
    with pytest.raises(SnapshotShapeError):
        pack(Snapshot(512, 384, 500, 0, good.encoder, None), KEY, IDENTITY, SHAPE)
    with pytest.raises(SnapshotShapeError):
        pack(Snapshot(512, 384, None, 0, good.encoder, good.decoder), KEY, IDENTITY, SHAPE)


def test_shape_of_a_layout(tiny: ModelConfig) -> None:
    layout = KVLayout.of(tiny)
    shape = SnapshotShape.of(layout, 3)
    assert (shape.encoder_layers, shape.decoder_layers, shape.window, shape.row_bytes) == (3, 1, 8, 33)
    assert shape.encoder_bytes + shape.decoder_bytes == layout.window_bytes
