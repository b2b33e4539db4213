"""What the first bytes of an image file say: its format, by magic bytes, and the size it declares. Nothing is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.model.errors import RequestError

# The hosted API's own sentence, which clients show to their users.
UNSUPPORTED = (
    "You have uploaded an unsupported image. Please make sure your image is valid and has one of the following formats: webp, png, jpeg, "
    "and gif."
)
MAGIC = 12  # bytes that tell every format apart
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # of JPEG: SOF0 to SOF15; the three are tables
_MAX_STEPS = 10_000  # over segments and fill bytes before the frame header; files of cameras have some hundred
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # JPEG markers without a length


@dataclass(frozen=True)
class ImageHeader:
    """`kind` is png, jpeg, gif or webp; `width` and `height` are what the file declares, in pixels."""

    kind: str
    width: int
    height: int


def unreadable(reason: str = "") -> RequestError:
    return RequestError(f"{UNSUPPORTED} ({reason})" if reason else UNSUPPORTED, code="image_parse_error")


def kind_of_image(data: bytes | bytearray) -> str:
    """The format by magic bytes; `data` has at least MAGIC bytes or is a whole file. Raises RequestError image_parse_error."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise unreadable()


def read_header(data: bytes) -> ImageHeader:
    """Format and declared size. Raises RequestError image_parse_error: another format, no size, or cut off before it."""
    kind = kind_of_image(data)
    sizes = {"png": _png, "gif": _gif, "webp": _webp, "jpeg": _jpeg}
    try:
        width, height = sizes[kind](data)
    except IndexError:
        raise unreadable(f"the {kind} data ends before its size") from None
    if width < 1 or height < 1:
        raise unreadable(f"the {kind} data declares no size")
    return ImageHeader(kind, width, height)


def _number(data: bytes, start: int, stop: int, order: str) -> int:
    if stop > len(data):
        raise IndexError
    return int.from_bytes(data[start:stop], "big" if order == "big" else "little")


def _png(data: bytes) -> tuple[int, int]:
    return (_number(data, 16, 20, "big"), _number(data, 20, 24, "big")) if data[12:16] == b"IHDR" else (0, 0)


def _gif(data: bytes) -> tuple[int, int]:
    """Of the screen, or larger if the first frame reaches beyond it: so decoders have it."""
    width, height = _number(data, 6, 8, "little"), _number(data, 8, 10, "little")
    try:
        place = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)  # behind the colours
        extended = False
        for _ in range(_MAX_STEPS):
            kind = data[place]
            if extended:  # blocks of an extension, the last of which is empty
                extended, place = kind != 0, place + kind + 1
            elif kind == 0x2C:
                left, top, wide, high = (_number(data, start, start + 2, "little") for start in range(place + 1, place + 9, 2))
                return max(width, left + wide), max(height, top + high)
            elif kind == 0x3B:
                break
            else:
                extended = kind == 0x21
                place += 2 if extended else 1
    except IndexError:
        pass  # cut off, which is the decoder's to tell
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":
        return _number(data, 24, 27, "little") + 1, _number(data, 27, 30, "little") + 1
    if chunk == b"VP8L":
        bits = _number(data, 21, 25, "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return _number(data, 26, 28, "little") & 0x3FFF, _number(data, 28, 30, "little") & 0x3FFF
    return 0, 0


def _jpeg(data: bytes) -> tuple[int, int]:
    """Of the first frame header: SOFn, length, precision, height, width."""
    place = 2
    for _ in range(_MAX_STEPS):
        if data[place] != 0xFF:
            return 0, 0
        place += 1
        marker = data[place]
        if marker == 0xFF:  # the one before it was a fill byte
            continue
        place += 1
        if marker in _FRAME_HEADERS:
            return _number(data, place + 5, place + 7, "big"), _number(data, place + 3, place + 5, "big")
        if marker in (0xD9, 0xDA):  # the picture ends or begins without a frame
            return 0, 0
        if marker not in _BARE:
            place += max(_number(data, place, place + 2, "big"), 2)
    return 0, 0
