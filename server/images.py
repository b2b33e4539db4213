"""Images in the messages of a chat body: what a part may be, its bytes, and its pixels.

Two steps. `find_images` reads every image part and checks all that can be checked without a look-up: it runs for every request, so that a
mistake is told as one. `ImageDesk.resolve` fetches and decodes: it runs only for models that see images.
"""

from __future__ import annotations

import asyncio
import binascii
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from forebay.model.errors import ForebayError, RequestError
from forebay.server.field_errors import bad, short
from forebay.server.image_address import ImageUrl, Policy, parse_url, refused
from forebay.server.image_fetch import Budget, ImageFetcher, too_many_bytes
from forebay.server.image_header import read_header, unreadable
from forebay.server.image_pool import DecodePool
from forebay.server.limits import ImageOptions

DETAILS = ("auto", "low", "high", "original")
MAX_ESCAPES = 1 << 20  # `%41` takes 60 times its size in memory while it is read; large images come as base64
_DATA = re.compile(r"data:([^,;]{0,256})((?:;[^,;]{0,256}){0,16}),", re.IGNORECASE)
_BASE64_SPACE = b" \t\r\n\f"


@dataclass(frozen=True)
class FoundImage:
    """An image part of a request. `path` is the field that holds it; it has either `data`, the file's bytes, or a `url`."""

    path: str
    data: bytes | None = None
    url: ImageUrl | None = None


@dataclass(frozen=True)
class Picture:
    """A decoded image: `pixels` [height, width, 3] uint8 RGB, read-only; `digest` is blake3 of the file it was decoded from."""

    pixels: NDArray[np.uint8]
    digest: bytes


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
    for path, text in parts:
        with _at(path):
            if text[:5].lower() != "data:":
                url = parse_url(text)
                policy.check_form(url)
                if fetching:
                    if not options.fetch:
                        raise refused("this server does not fetch images; send a data: URL")
                    policy.check(url)
                found.append(FoundImage(path, url=url))
                continue
            data = read_data_url(text, options.max_bytes)
            budget.take(len(data))
            pixels += check_size(data, side)
            if pixels > options.max_request_pixels:
                raise too_many_pixels(options)
            found.append(FoundImage(path, data))
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
        data = text[head.end():].encode("ascii")
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


def check_size(data: bytes, max_side: int) -> int:
    """The pixels that a file declares. Raises RequestError: image_parse_error, or image_too_large for a side above `max_side`."""
    header = read_header(data)
    if max(header.width, header.height) > max_side:
        text = f"its size is {header.width} by {header.height} pixels, and at most {max_side} a side are allowed"
        raise RequestError(f"The image is too large: {text}.", code="image_too_large")
    return header.width * header.height


def too_many_pixels(options: ImageOptions) -> RequestError:
    text = f"The images of this request have more than {options.max_request_pixels} pixels together. Send fewer or smaller ones."
    return RequestError(text, code="image_too_large")


class _at:
    """Findings inside are about the field `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ForebayError) and error.param is None:
            error.param = self._path


def _parts(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, URL) of each image part. Whatever else may be wrong with the messages is the chat encoding's to tell."""
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for k, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping):
                kind, where = part.get("type"), f"messages.{i}.content.{k}"
                if kind in ("image_url", "input_image"):
                    yield _image_url(part, where)
                elif kind == "image":
                    yield _source(part, f"{where}.source")
                elif kind in ("file", "input_file"):
                    yield from _file(part, where)


def _image_url(part: Mapping[str, Any], where: str) -> tuple[str, str]:
    given, path, detail, place = part.get("image_url"), f"{where}.image_url", part.get("detail"), f"{where}.detail"
    if given is None and part.get("file_id") is not None:
        raise bad(f"{where}.file_id", f"Unsupported value: '{where}.file_id': this server stores no files.", "unsupported_value")
    if isinstance(given, Mapping):
        if "detail" in given:
            detail, place = given["detail"], f"{path}.detail"
        given = given.get("url")
    if detail is not None and detail not in DETAILS:
        raise bad(place, f"Invalid value for '{place}': expected {', '.join(DETAILS)}, got {short(detail)}.", "invalid_value")
    return path, _text(given, path)


def _source(part: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Of the Messages protocol's part, which clients also send in chat bodies."""
    source = part.get("source")
    if not isinstance(source, Mapping):
        raise bad(path, f"Invalid type for '{path}': expected an object.", "invalid_type")
    if source.get("type") == "base64":
        media = source.get("media_type")
        media = media if isinstance(media, str) and re.fullmatch(r"[\w.+/-]{1,128}", media) else ""
        return path, f"data:{media};base64,{_text(source.get('data'), path)}"
    if source.get("type") == "url":
        return path, _text(source.get("url"), path)
    raise bad(f"{path}.type", f"Unsupported value: '{path}.type' must be base64 or url; this server stores no files.", "unsupported_value")


def _file(part: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """A file that is an image, as a data URL."""
    if part.get("type") == "file":
        inner = part.get("file")
        where, part = f"{where}.file", inner if isinstance(inner, Mapping) else {}
    data = part.get("file_data")
    if isinstance(data, str) and data[:11].lower() == "data:image/":
        yield f"{where}.file_data", data


def _text(value: Any, path: str) -> str:
    if value is None or value == "":
        raise bad(path, f"Missing required parameter: '{path}' has no image.", "missing_required_parameter")
    if not isinstance(value, str):
        raise bad(path, f"Invalid type for '{path}': expected a string with a URL.", "invalid_type")
    return value


class ImageDesk:
    """Gets images of requests ready for a model that sees them: fetched, decoded, and remembered by their content."""

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        self.policy = Policy(options.hosts, allow_private=options.allow_private)
        self.pool = DecodePool(options)
        self.cache = PictureCache(options.cache_bytes)
        self._fetcher = ImageFetcher(options, self.policy)

    def find(self, body: Mapping[str, Any], *, fetching: bool) -> list[FoundImage]:
        """See `find_images`."""
        return find_images(body, self.options, self.policy, fetching=fetching)

    async def resolve(self, found: Sequence[FoundImage], salt: str = "") -> list[Picture]:
        """The pictures of a request in its order; equal URLs are fetched once. `salt` separates tenants in the cache.

        Raises RequestError naming the field, or HttpError 503 for a host that may answer later. The first finding ends the others' work.
        """
        options = self.options
        side = options.many_side if len(found) >= options.many else options.max_side
        budget = Budget(options.max_request_bytes, options.max_request_bytes)
        for image in found:
            budget.take(len(image.data or b""))
        slots, pixels, counted = asyncio.Semaphore(options.parallel), 0, set[int]()
        decoding = asyncio.Semaphore(options.workers)  # so that the first image of another request need not wait for all of these
        fetches: dict[ImageUrl, asyncio.Task[bytes]] = {}

        async def fetched(url: ImageUrl) -> bytes:
            async with slots:
                return await self._fetcher.fetch(url, budget)

        async def one(image: FoundImage) -> Picture:
            nonlocal pixels
            with _at(image.path):
                data = image.data
                if data is None:
                    assert image.url is not None
                    if image.url not in fetches:
                        fetches[image.url] = asyncio.create_task(fetched(image.url))
                    data = await asyncio.shield(fetches[image.url])
                if id(data) not in counted:
                    counted.add(id(data))
                    pixels += check_size(data, side)
                if pixels > options.max_request_pixels:
                    raise too_many_pixels(options)
                async with decoding:
                    return await self._decoded(data, side, salt)

        tasks = [asyncio.create_task(one(image)) for image in found]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            ends = [*tasks, *fetches.values()]
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _decoded(self, data: bytes, side: int, salt: str) -> Picture:
        digest = blake3(data).digest()
        key = (salt, digest)
        picture = self.cache.get(key)
        if picture is None:
            decoded = await self.pool.decode(data, side)
            pixels = np.frombuffer(decoded.rgb, np.uint8).reshape(decoded.height, decoded.width, 3)
            picture = Picture(pixels, digest)
            self.cache.put(key, picture)
        return picture

    def close(self) -> None:
        """End the decoding programs."""
        self.pool.close()


class PictureCache:
    """The pictures used last, at most `limit` bytes of pixels. A larger one is not kept.

    Attributes:
        hits, misses: of `get`. size: bytes held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[str, bytes], Picture] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = self.size = 0

    def get(self, key: tuple[str, bytes]) -> Picture | None:
        with self._lock:
            picture = self._entries.get(key)
            if picture is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(key)
            return picture

    def put(self, key: tuple[str, bytes], picture: Picture) -> None:
        with self._lock:
            if picture.pixels.nbytes > self._limit or key in self._entries:
                return
            self._entries[key] = picture
            self.size += picture.pixels.nbytes
            while self.size > self._limit:
                self.size -= self._entries.popitem(last=False)[1].pixels.nbytes
