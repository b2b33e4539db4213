"""A snapshot as one binary value: windows of a sequence at a block boundary, and a header that says what they are and if they are whole.

    header (256 bytes) | encoder rows | decoder rows, if there are any

The header ends in a table of sections (kind, length), so that a later version of the same format can append rows of another kind: unknown
kinds are skipped. Everything is little-endian. CRC-32C covers the header and, separately, all bytes behind it. Nothing is unpickled:
a value is only ever compared, measured and summed before its rows are used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import google_crc32c
import numpy as np

from forebay.cache.layout import KVLayout
from forebay.cache.records import MOST_LINEAGE
from forebay.model.errors import ForebayError

MAGIC = b"FBSN"
VERSION = 1
HEADER_BYTES = 256
KEY_BYTES, IDENTITY_BYTES = 32, 16
ENCODER, DECODER = 1, 2  # kinds of sections
MAX_SECTIONS = 8
NONE = -1  # a floor that is not there

# magic, version, sections, identity, key, boundary, encoder floor, decoder floor, lineage, written at, payload bytes, payload CRC
_FIELDS = struct.Struct("<4sHH16s32sqqqIdQI")
_SECTION = struct.Struct("<IQ")
_CRC = struct.Struct("<I")
_TABLE_AT = _FIELDS.size
_CRC_AT = HEADER_BYTES - _CRC.size
assert _TABLE_AT + MAX_SECTIONS * _SECTION.size <= _CRC_AT

BadKind = Literal["header", "version", "identity", "key", "length", "checksum"]
BAD_KINDS: tuple[BadKind, ...] = ("header", "version", "identity", "key", "length", "checksum")


class BadSnapshot(ForebayError):
    """A stored value is not the snapshot it should be; `kind` says in which way."""

    def __init__(self, kind: BadKind) -> None:
        super().__init__(f"stored snapshot rejected: wrong {kind}")
        self.kind: BadKind = kind


class SnapshotShapeError(ForebayError):
    """Rows handed over for storing are not of the shape agreed on. Always a bug of the caller."""


@dataclass(frozen=True)
class SnapshotShape:
    """Rows of one snapshot: [layers, window, row_bytes] u8 for either half of the network."""

    encoder_layers: int
    decoder_layers: int
    window: int
    row_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, cut: int) -> SnapshotShape:
        """`cut`: number of encoder layers."""
        return cls(cut, layout.layers - cut, layout.window, layout.window_row_bytes)

    @property
    def encoder(self) -> tuple[int, int, int]:
        return self.encoder_layers, self.window, self.row_bytes

    @property
    def decoder(self) -> tuple[int, int, int]:
        return self.decoder_layers, self.window, self.row_bytes

    @property
    def encoder_bytes(self) -> int:
        return self.encoder_layers * self.window * self.row_bytes

    @property
    def decoder_bytes(self) -> int:
        return self.decoder_layers * self.window * self.row_bytes


@dataclass
class Snapshot:
    """Windows at a block boundary: rows of the positions [boundary - window, boundary).

    Attributes:
        boundary: position in tokens, a block boundary.
        encoder_floor: encoder rows are valid from this position.
        decoder_floor: decoder rows were computed with this floor and are valid from it; None: no decoder rows.
        lineage: replay boundaries behind the rows.
        encoder: [encoder_layers, window, row_bytes] u8.
        decoder: [decoder_layers, window, row_bytes] u8, or None.
        written_at: seconds since the epoch at which it was stored or last refreshed; set by the pool, part of the stored value.
        ready: what to call before the rows are read, while they may be on their way from a device; None: they are there.
    """

    boundary: int
    encoder_floor: int
    decoder_floor: int | None
    lineage: int
    encoder: np.ndarray
    decoder: np.ndarray | None
    written_at: float = 0.0
    ready: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def wait(self) -> None:
        """Return when the rows are there."""
        if self.ready is not None:
            self.ready()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored value."""
        return HEADER_BYTES + self.encoder.nbytes + (0 if self.decoder is None else self.decoder.nbytes)


def check_shape(snapshot: Snapshot, shape: SnapshotShape) -> None:
    """Raise SnapshotShapeError unless the rows are u8 of `shape`, both or neither of the decoder's rows and floor are there, and every
    number fits its field."""
    halves = [("encoder", snapshot.encoder, shape.encoder)]
    if snapshot.decoder is not None:
        halves.append(("decoder", snapshot.decoder, shape.decoder))
    for name, rows, wanted in halves:
        if rows.shape != wanted or rows.dtype != np.uint8:
            raise SnapshotShapeError(f"{name} rows are {rows.shape} {rows.dtype}, wanted {wanted} uint8")
    if (snapshot.decoder is None) != (snapshot.decoder_floor is None):
        raise SnapshotShapeError("decoder rows and decoder_floor come together or not at all")
    positions = snapshot.boundary, snapshot.encoder_floor, snapshot.decoder_floor or 0
    if not 0 <= snapshot.lineage < 1 << 32 or not all(0 <= position < 1 << 63 for position in positions):
        raise SnapshotShapeError(f"positions {positions} and lineage {snapshot.lineage} must not be negative or absurd")


def pack(snapshot: Snapshot, key: bytes, identity: bytes, shape: SnapshotShape, written_at: float | None = None) -> memoryview:
    """The stored value of `snapshot`, in memory of its own.

    Args:
        key: 32 bytes, the key of the last block before the boundary.
        identity: 16 bytes: which model, tokenizer and layout the rows belong to.
        written_at: seconds since the epoch, by default `snapshot.written_at`.

    Raises:
        SnapshotShapeError: the rows are not of `shape`, or the key is not a key.
    """
    check_shape(snapshot, shape)
    if len(key) != KEY_BYTES or len(identity) != IDENTITY_BYTES:
        raise SnapshotShapeError(f"a key has {KEY_BYTES} bytes and an identity {IDENTITY_BYTES}, got {len(key)} and {len(identity)}")
    halves = [(ENCODER, snapshot.encoder)]
    if snapshot.decoder is not None:
        halves.append((DECODER, snapshot.decoder))
    snapshot.wait()
    value = np.empty(snapshot.nbytes, np.uint8)
    at = HEADER_BYTES
    for _, rows in halves:
        value[at : at + rows.nbytes].reshape(rows.shape)[...] = rows
        at += rows.nbytes
    header = bytearray(HEADER_BYTES)
    _FIELDS.pack_into(
        header, 0, MAGIC, VERSION, len(halves), identity, key, snapshot.boundary, snapshot.encoder_floor,
        NONE if snapshot.decoder_floor is None else snapshot.decoder_floor, snapshot.lineage,
        snapshot.written_at if written_at is None else written_at, at - HEADER_BYTES, google_crc32c.value(value[HEADER_BYTES:]),
    )  # fmt: skip
    for number, (kind, rows) in enumerate(halves):
        _SECTION.pack_into(header, _TABLE_AT + number * _SECTION.size, kind, rows.nbytes)
    _CRC.pack_into(header, _CRC_AT, google_crc32c.value(bytes(header[:_CRC_AT])))
    value[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    return value.data


def unpack(value: bytes | bytearray | memoryview, key: bytes, identity: bytes, shape: SnapshotShape) -> Snapshot:
    """The snapshot stored in `value`, after checking every byte of it. Its rows are read-only views of `value`.

    Raises:
        BadSnapshot: `value` is damaged, cut, of another version, or belongs to another key, model or layout.
    """
    data = np.frombuffer(value, np.uint8)
    if len(data) < HEADER_BYTES:
        raise BadSnapshot("length")
    header = data[:HEADER_BYTES].tobytes()
    (
        magic, version, sections, its_identity, its_key, boundary, encoder_floor, decoder_floor, lineage, written_at, payload_bytes, crc,
    ) = _FIELDS.unpack_from(header)  # fmt: skip
    if magic != MAGIC:
        raise BadSnapshot("header")
    if version != VERSION:
        raise BadSnapshot("version")  # another version may keep its checksum elsewhere
    if google_crc32c.value(header[:_CRC_AT]) != _CRC.unpack_from(header, _CRC_AT)[0] or sections > MAX_SECTIONS:
        raise BadSnapshot("header")
    if its_identity != identity:
        raise BadSnapshot("identity")
    if its_key != key:
        raise BadSnapshot("key")
    if payload_bytes != len(data) - HEADER_BYTES:
        raise BadSnapshot("length")
    if google_crc32c.value(data[HEADER_BYTES:]) != crc:
        raise BadSnapshot("checksum")
    found: dict[int, np.ndarray] = {}
    at = HEADER_BYTES
    for number in range(sections):
        kind, length = _SECTION.unpack_from(header, _TABLE_AT + number * _SECTION.size)
        found[kind] = data[at : at + length]
        at += length
    low = max(0, boundary - shape.window)
    floors = encoder_floor <= low and (decoder_floor == NONE or decoder_floor <= boundary)
    if not floors or lineage > MOST_LINEAGE or not math.isfinite(written_at):
        raise BadSnapshot("header")  # sound bytes that we would never write
    encoder = found.get(ENCODER)
    decoder = found.get(DECODER)
    if at != len(data) or encoder is None or len(encoder) != shape.encoder_bytes:
        raise BadSnapshot("length")
    if (decoder is not None and len(decoder) != shape.decoder_bytes) or (decoder is None) != (decoder_floor == NONE):
        raise BadSnapshot("length")
    encoder = _locked(encoder.reshape(shape.encoder))
    if decoder is not None:
        decoder = _locked(decoder.reshape(shape.decoder))
    return Snapshot(boundary, encoder_floor, None if decoder is None else decoder_floor, lineage, encoder, decoder, written_at)


def _locked(rows: np.ndarray) -> np.ndarray:
    rows.flags.writeable = False
    return rows
