"""From the bytes of a request to a JSON object: content decoding with a size limit, depth limit, finite numbers."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import orjson
import zstandard

from forebay.model.json_limits import MAX_VALUES, STRING, too_many_values
from forebay.server.errors import HttpError

_JSON_TYPES = {
    type(None): "null", bool: "a boolean", int: "an integer", float: "a decimal", str: "a string", list: "an array", dict: "an object",
}  # fmt: skip
_PIECE = 256 * 1024
_SIP = 512
_WINDOW = 1 << 23  # bytes a zstd frame may look back: what RFC 9659 allows as a Content-Encoding
_SCAN = 1 << 20  # bytes of a broken body that are searched for why it is broken
_MEMBERS = 10_000  # of a gzip body: parallel compressors make one per 64 KiB or more
_MAX_CODINGS = 2  # of one body: a header has room for thousands, each of which costs as much as the largest body
_NESTING = re.compile(STRING + rb"|[\[{]|[\]}]", re.DOTALL)
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19  # digits from which on an integer may not fit into 64 bits
_NON_FINITE = re.compile(rb"NaN|Infinity|[eE]\+?\d{3,}")


def too_large(limit: int) -> HttpError:
    """413 naming the limit."""
    size = f"{limit / (1 << 20):g} MiB" if limit >= 1 << 20 else f"{limit} bytes"
    message = f"The request body is larger than the limit of {size}. Send fewer or smaller messages and images."
    return HttpError(413, message, code="request_too_large", headers=[(b"x-should-retry", b"false")])


def check_encoding(encoding: str) -> None:
    """Refuse (415) a Content-Encoding that `decode` does not undo, or one of more than two codings."""
    names = _encodings(encoding)
    message = ""
    if unknown := [name for name in names if name not in ("gzip", "x-gzip", "deflate", "zstd")]:
        message = f"Content-Encoding {unknown[0][:32]!r} is not supported. Use identity, gzip, deflate or zstd."
    elif len(names) > _MAX_CODINGS:
        message = f"Content-Encoding names {len(names)} codings, and a body may have {_MAX_CODINGS}. Compress it once."
    if message:
        raise HttpError(415, message, code="unsupported_media_type", headers=[(b"accept-encoding", b"gzip, deflate, zstd")])


def decode(data: bytes, encoding: str, limit: int) -> bytes:
    """Undo Content-Encoding. Stops at `limit` decoded bytes (413), so a small body cannot unfold into a huge one; damaged data is 400."""
    for name in reversed(_encodings(encoding)):
        data = _unfold(data, limit) if name == "zstd" else _inflate(data, name, limit)
    return data


def parse_object(data: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `data`. Duplicate keys: the last one wins. Integers are exact.

    Raises HttpError 400: not JSON (with the position), not an object, deeper than `max_depth`, NaN or an infinity (naming the field), or
    so many values that they would take a multiple of the body in memory.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    if too_many_values(data):
        raise HttpError(400, f"The request body holds too many values: at most {MAX_VALUES}.", code="invalid_json")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        value = _explain(data, max_depth, error)
    if _deeper(value, max_depth):
        raise _too_deep(max_depth)
    if data.translate(_DIGITS).find(_LONG) >= 0:
        value = json.loads(data)  # orjson makes decimals of integers beyond 64 bits, and refuses those of 310 digits and more
    if not isinstance(value, dict):
        raise HttpError(400, f"The request body must be a JSON object, got {json_type(value)}.", code="invalid_type")
    return value


def to_json(value: Any) -> bytes:
    """JSON of what may hold a value of a client or the model: also integers beyond 64 bits, which orjson reads but does not write."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def json_type(value: Any) -> str:
    """What JSON calls the type of a parsed value, with its article."""
    return _JSON_TYPES[type(value)]


def _encodings(header: str) -> list[str]:
    return [name for part in header.lower().split(",") if (name := part.strip()) not in ("", "identity")]


def _inflate(data: bytes, name: str, limit: int) -> bytes:
    window = 31 if name.endswith("gzip") else 15
    if window == 15 and (len(data) < 2 or data[0] & 0x0F != 8 or (data[0] << 8 | data[1]) % 31):
        window = -15  # "deflate" without the zlib header, as some clients send it
    pieces: list[bytes] = []
    size, place, members, rest = 0, 0, 0, b""
    try:
        while place < len(data) or rest:
            members += 1
            if members > _MEMBERS:
                raise HttpError(400, f"The request body has more than {_MEMBERS} {name} members.", code="invalid_body")
            stream = zlib.decompressobj(window)
            while not stream.eof and (place < len(data) or rest):
                if not rest:  # in pieces, since what a call leaves over is copied
                    rest, place = data[place : place + _PIECE], place + _PIECE
                piece = stream.decompress(rest, _PIECE)
                rest = stream.unconsumed_tail
                size += len(piece)
                if size > limit:
                    raise too_large(limit)
                pieces.append(piece)
            while not stream.eof and (piece := stream.decompress(b"", _PIECE)):  # what it still holds
                size += len(piece)
                if size > limit:
                    raise too_large(limit)
                pieces.append(piece)
            if not stream.eof:
                raise HttpError(400, f"The request body ends in the middle of its {name} stream.", code="invalid_body")
            rest = stream.unused_data  # gzip allows several members in a row
    except zlib.error as error:
        raise HttpError(400, f"The request body is not valid {name}: {error}.", code="invalid_body") from None
    return b"".join(pieces)


def _unfold(data: bytes, limit: int) -> bytes:
    """Undo zstd. Fed in such small pieces since the decoder gives out all that a piece holds, which is up to 128 KiB for 4 bytes."""
    pieces: list[bytes] = []
    size, place, frames = 0, 0, 0
    try:
        while place < len(data):
            frames += 1
            if frames > _MEMBERS:
                raise HttpError(400, f"The request body has more than {_MEMBERS} zstd frames.", code="invalid_body")
            frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            while not frame.eof and place < len(data):
                piece = frame.decompress(data[place : place + _SIP])
                place += _SIP
                size += len(piece)
                if size > limit:
                    raise too_large(limit)
                pieces.append(piece)
            if not frame.eof:
                raise HttpError(400, "The request body ends in the middle of its zstd frame.", code="invalid_body")
            place = min(place, len(data)) - len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise HttpError(400, f"The request body is not valid zstd: {error}.", code="invalid_body") from None
    return b"".join(pieces)


def _explain(data: bytes, max_depth: int, error: orjson.JSONDecodeError) -> Any:
    """Find out why strict parsing failed; returns the value only if nothing was wrong with it in the end."""
    depth = 0
    for match in _NESTING.finditer(data[:_SCAN]):
        token = match.group()[:1]
        depth += (token in (b"[", b"{")) - (token in (b"]", b"}"))
        if depth > max_depth:
            raise _too_deep(max_depth) from None
    if _NON_FINITE.search(data):
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if (path := _non_finite(value)) is not None:
            text = f"Invalid '{path}': NaN and infinite numbers are not JSON; send a finite number."
            raise HttpError(400, text, code="invalid_json", param=path or None)
    text = f"Could not parse the request body as JSON: {error.msg} (line {error.lineno}, column {error.colno})."
    raise HttpError(400, text, code="invalid_json")


def _too_deep(max_depth: int) -> HttpError:
    return HttpError(400, f"The request body is nested too deep: at most {max_depth} levels of arrays and objects.", code="invalid_json")


def _deeper(value: Any, max_depth: int) -> bool:
    """Whether containers nest deeper than `max_depth`; level by level, so no recursion."""
    level = [value]
    for _ in range(max_depth):
        level = [child for node in level for child in _children(node) if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _children(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _non_finite(value: Any) -> str | None:
    """Path of the first number that is not finite, or None."""
    path: list[Any] = []
    stack: list[Iterator[tuple[Any, Any]]] = [iter([("", value)])]
    while stack:
        for key, node in stack[-1]:
            if isinstance(node, float) and not math.isfinite(node):
                return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*path[1:], key]).removeprefix(".")
            if isinstance(node, (dict, list)):
                path.append(key)
                stack.append(iter(node.items() if isinstance(node, dict) else enumerate(node)))
                break
        else:
            stack.pop()
            del path[-1:]
    return None
