"""The record: how one block lies in a segment file.

A record is a 128-byte header and the payload, padded to whole pages of 4,096 bytes so that a dead one can be punched out of its file
exactly. Numbers are little-endian. The header has a checksum of its own, and a record counts only when header, payload checksum, key,
identity and length all agree: torn, stale and foreign bytes are never taken for a block.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

import google_crc32c
import numpy as np
from blake3 import blake3

MAGIC = b"FBKV"
RECORD_VERSION = 1
MOST_LINEAGE = 1 << 20  # counting stops here; a header that says more is not ours
HEADER_BYTES = 128
PAGE_BYTES = 4096

_FIELDS = struct.Struct("<4sHH16s16s32sIIIId")  # the fields of Header, then their CRC, then zeros up to HEADER_BYTES
_CRC = struct.Struct("<I")

Fault = Literal["checksum", "header", "length", "missing", "identity"]
FAULTS: tuple[Fault, ...] = ("checksum", "header", "length", "missing", "identity")


class Header(NamedTuple):
    """What a record says about its payload.

    Attributes:
        identity: first 16 bytes of the digest of what the bytes mean (model, tokenizer, layout).
        tenant: 16 bytes.
        key: 32-byte chained key of the block.
        depth: number of the block in its chain.
        lineage: replay boundaries behind its bytes.
        length: payload bytes.
        checksum: CRC-32C of the payload.
        written_at: seconds since the epoch.
    """

    identity: bytes
    tenant: bytes
    key: bytes
    depth: int
    lineage: int
    length: int
    checksum: int
    written_at: float


def tenant_id(salt: str) -> bytes:
    """Name of a tenant on disk, 16 bytes: tells tenants apart (for `purge`) without writing their salts down."""
    return blake3(b"forebay tenant" + salt.encode("utf-8", "surrogatepass")).digest()[:16]


def identity_digest(identity: str) -> bytes:
    """16 bytes that stand for an identity in records and snapshots."""
    return blake3(identity.encode()).digest()[:16]


def record_bytes(length: int) -> int:
    """Bytes a record with a payload of `length` bytes takes in its segment."""
    return -(-(HEADER_BYTES + length) // PAGE_BYTES) * PAGE_BYTES


def checksum(payload: np.ndarray | bytes) -> int:
    """CRC-32C of contiguous uint8 values."""
    return google_crc32c.value(payload)


def pack_header(header: Header) -> bytes:
    """The HEADER_BYTES bytes of a header."""
    fields = _FIELDS.pack(
        MAGIC, RECORD_VERSION, 0, header.identity, header.tenant, header.key, header.depth, header.lineage, header.length, header.checksum,
        header.written_at,
    )  # fmt: skip
    return (fields + _CRC.pack(checksum(fields))).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: bytes) -> Header | None:
    """The header at the start of `data`, or None if there is no sound one of this version."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    fields = bytes(data[: _FIELDS.size])
    if _CRC.unpack_from(data, _FIELDS.size)[0] != checksum(fields):
        return None
    _, version, _, *values = _FIELDS.unpack(fields)
    header = Header(*values)
    return header if version == RECORD_VERSION and header.lineage <= MOST_LINEAGE else None


def record_fault(header: Header | None, payload: np.ndarray, key: bytes, identity: bytes) -> Fault | None:
    """Why a record that was read is not block `key` of `identity` with `len(payload)` bytes; None if it is.

    Args:
        header: as unpacked from the record.
        payload: [length] uint8, as read.
    """
    if header is None or header.key != key:
        return "header"
    if header.identity != identity:
        return "identity"
    if header.length != payload.size:
        return "length"
    return None if checksum(payload) == header.checksum else "checksum"
