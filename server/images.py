"""Images in the messages of a chat body: what a part may be, and its bytes.

`find_images` reads every image part and checks all that can be checked without a look-up: it runs for every request, so that a mistake is
told as one, also by a model that sees no images. What follows for one that does is in server/pictures.py.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from forebay.model.chat_images import DETAILS, FILE_PARTS, detail_of, file_url, image_parts, longest_side
from forebay.model.errors import ForebayError, RequestError
from forebay.server.field_errors import bad, short
from forebay.server.image_address import ImageUrl, Policy, parse_url, refused
from forebay.server.image_fetch import Budget, too_many_bytes
from forebay.server.image_header import read_header, unreadable
from forebay.server.limits import ImageOptions

MAX_ESCAPES = 1 << 20  # `%41` takes 60 times its size in memory while it is read; large images come as base64
_DATA = re.compile(r"data:([^,;]{0,256})((?:;[^,;]{0,256}){0,16}),", re.IGNORECASE)
_BASE64_SPACE = b" \t\r\n\f"


@dataclass(frozen=True)
class FoundImage:
    """An image part of a request.

    Attributes:
        part: its path, such as `messages.3.content.0`. path: of the field in it that holds the image.
        data: the file's bytes, of which `size` is the width and height that it declares. url: where they are, if they are elsewhere.
        longest: longest side in pixels that is asked for, None if it does not matter.
    """

    part: str
    path: str
    data: bytes | None = None
    size: tuple[int, int] = (0, 0)
    url: ImageUrl | None = None
    longest: int | None = None


def find_images(body: Mapping[str, Any], options: ImageOptions, policy: Policy, *, fetching: bool) -> list[FoundImage]:
    """The image parts of all messages in order, each checked. Takes time in proportion to them; nothing is looked up or decoded.

    `fetching`: URLs are going to be fetched, so one that the operator does not allow is refused here.

    Raises RequestError naming the field: invalid_image_url, image_parse_error, image_too_large, or a part of the wrong form.
    """
    parts = list(_parts(body))
    if len(parts) > options.max_images:
        text = f"Too many images: max {options.max_images} images per request, got {len(parts)}"
        raise bad("messages", text, "too_many_images")
    side = options.many_side if len(parts) >= options.many else options.max_side
    budget, pixels = Budget(options.max_request_bytes, options.max_request_bytes), 0
    found: list[FoundImage] = []
    for part, path, text, longest in parts:
        with at(path):
            if text[:5].lower() != "data:":
                url = parse_url(text)
                policy.check_form(url)
                if fetching:
                    if not options.fetch:
                        raise refused("this server does not fetch images; send a data: URL")
                    policy.check(url)
                found.append(FoundImage(part, path, url=url, longest=longest))
                continue
            data = read_data_url(text, options.max_bytes)
            budget.take(len(data))
            size = check_size(data, side)
            pixels += size[0] * size[1]
            if pixels > options.max_request_pixels:
                raise too_many_pixels(options)
            found.append(FoundImage(part, path, data, size, longest=longest))
    return found


def read_data_url(text: str, limit: int) -> bytes:
    """The bytes of a data URL, in base64 (white space and missing padding do no harm) or percent-encoded; their number is checked first.

    Raises RequestError: invalid_image_url, image_parse_error, image_too_large.
    """
    head = _DATA.match(text)
    if head is None:
        raise refused("a data URL is data:image/png;base64, and the data")
    encoded = head[2].lower().rstrip().endswith(";base64")
    escapes = text.count("%", head.end())
    room = len(text) - head.end() - 2 * escapes
    if (room * 3 // 4 - 3 if encoded else room) > limit and not (encoded and _weight(text, head.end()) * 3 // 4 <= limit):
        raise too_many_bytes(limit)
    if escapes > MAX_ESCAPES:
        raise RequestError(f"A percent-encoded image may have at most {MAX_ESCAPES} escapes; send it as base64.", code="image_too_large")
    try:
        data = text[head.end() :].encode("ascii")
        if escapes:
            data = unquote_to_bytes(data)
        if encoded:
            data = data.translate(None, _BASE64_SPACE).rstrip(b"=")
            data = binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise unreadable("its data is not valid base64" if encoded else "its data is not percent-encoded") from None
    if len(data) > limit:
        raise too_many_bytes(limit)
    return data


def _weight(text: str, start: int) -> int:
    return len(text) - start - sum(text.count(c, start) for c in " \t\r\n\f=")


def check_size(data: bytes, max_side: int) -> tuple[int, int]:
    """Width and height that a file declares. Raises RequestError: image_parse_error, or image_too_large for a side above `max_side`."""
    header = read_header(data)
    if max(header.width, header.height) > max_side:
        text = f"its size is {header.width} by {header.height} pixels, and at most {max_side} a side are allowed"
        raise RequestError(f"The image is too large: {text}.", code="image_too_large")
    return header.width, header.height


def too_many_pixels(options: ImageOptions) -> RequestError:
    text = f"The images of this request have more than {options.max_request_pixels} pixels together. Send fewer or smaller ones."
    return RequestError(text, code="image_too_large")


class at:
    """Findings inside are about the field `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ForebayError) and error.param is None:
            error.param = self._path


Found = tuple[str, str, str, int | None]  # part, path of the field, URL, longest side that is asked for


def _parts(body: Mapping[str, Any]) -> Iterator[Found]:
    """Each image part. Whatever else may be wrong with the messages is the chat encoding's to tell."""
    for where, part in image_parts(body).items():
        kind = part["type"]
        if kind in FILE_PARTS:
            yield where, f"{where}.file.file_data" if kind == "file" else f"{where}.file_data", file_url(part), None
        elif kind == "image":
            yield where, f"{where}.source", _source(part, f"{where}.source"), None
        else:
            yield _image_url(part, where)


def _image_url(part: Mapping[str, Any], where: str) -> Found:
    given, path = part.get("image_url"), f"{where}.image_url"
    if given is None and part.get("file_id") is not None:
        raise bad(f"{where}.file_id", f"Unsupported value: '{where}.file_id': this server stores no files.", "unsupported_value")
    detail, name = detail_of(part)
    if isinstance(given, Mapping):
        given = given.get("url")
    if detail is not None and detail not in DETAILS:
        place = f"{where}.{name}"
        raise bad(place, f"Invalid value for '{place}': expected {', '.join(DETAILS)}, got {short(detail)}.", "invalid_value")
    return where, path, _text(given, path), longest_side(detail)


def _source(part: Mapping[str, Any], path: str) -> str:
    """The URL of the Messages protocol's part, which clients also send in chat bodies."""
    source = part.get("source")
    if not isinstance(source, Mapping):
        raise bad(path, f"Invalid type for '{path}': expected an object.", "invalid_type")
    if source.get("type") == "base64":
        media = source.get("media_type")
        media = media if isinstance(media, str) and re.fullmatch(r"[\w.+/-]{1,128}", media) else ""
        return f"data:{media};base64,{_text(source.get('data'), path)}"
    if source.get("type") == "url":
        return _text(source.get("url"), path)
    raise bad(f"{path}.type", f"Unsupported value: '{path}.type' must be base64 or url; this server stores no files.", "unsupported_value")


def _text(value: Any, path: str) -> str:
    if value is None or value == "":
        raise bad(path, f"Missing required parameter: '{path}' has no image.", "missing_required_parameter")
    if not isinstance(value, str):
        raise bad(path, f"Invalid type for '{path}': expected a string with a URL.", "invalid_type")
    return value
