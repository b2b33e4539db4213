"""From the images of a request to what the model sees of them: fetched, planned by their size alone, then decoded, and remembered.

Two steps, so that a prompt which is too long is refused before anything is decoded, and one that is only counted never is.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from forebay.engine.types import PromptImage
from forebay.model.chat import ChatVision, PlacedImage
from forebay.model.errors import RequestError
from forebay.model.image_plan import ImageError, ImagePlan, plan
from forebay.server.image_address import ImageUrl, Policy
from forebay.server.image_fetch import Budget, ImageFetcher
from forebay.server.image_pool import DecodePool
from forebay.server.images import FoundImage, at, check_size, find_images, too_many_pixels
from forebay.server.limits import Bodies, ImageOptions

Key = tuple[str, bytes, ImagePlan]  # of a picture: tenant, digest of the file, what becomes of it


@dataclass(frozen=True)
class PlannedImage:
    """An image whose file is here: its bytes, the width and height in pixels that it declares, and what becomes of it.

    `path` is the field of the request that holds it.
    """

    path: str
    data: bytes
    size: tuple[int, int]
    plan: ImagePlan


@dataclass(frozen=True)
class Picture:
    """What the model sees of an image: `canvas` [H, W, 3] uint8 RGB, read-only; `digest` names its span (`image_digest`)."""

    canvas: NDArray[np.uint8]
    digest: bytes


class ImageDesk:
    """Gets images of requests ready for a model that sees them.

    Attributes:
        canvases: bytes of those that requests hold until they have ended.
    """

    def __init__(self, options: ImageOptions, vision: ChatVision | None) -> None:
        """Without `vision`, nothing but `find` may be called."""
        self.options, self.vision = options, vision
        self.policy = Policy(options.hosts, allow_private=options.allow_private)
        self.pool = DecodePool(options)
        self.canvases = Bodies(options.max_canvases)
        self.cache = PictureCache(options.cache_bytes)
        self._fetcher = ImageFetcher(options, self.policy)

    def find(self, body: Mapping[str, Any]) -> list[FoundImage]:
        """See `find_images`."""
        return find_images(body, self.options, self.policy, fetching=self.vision is not None)

    async def plan(self, found: Sequence[FoundImage], claim: Callable[[int], None]) -> dict[str, PlannedImage]:
        """The images of a request by their parts, planned; equal URLs are fetched once. Of a file no more than its header is read.

        `claim` is told of bytes as they come, and raises if there is no room for them.

        Raises RequestError naming the field, or HttpError 503 for a host that may answer later. The first finding ends the others' work.
        """
        options = self.options
        side = options.many_side if len(found) >= options.many else options.max_side
        budget = Budget(options.max_request_bytes, options.max_request_bytes, claim)
        for image in found:
            budget.take(len(image.data or b""))
        pixels, counted = 0, set[int]()

        def planned(image: FoundImage, data: bytes, size: tuple[int, int]) -> PlannedImage:
            nonlocal pixels
            if id(data) not in counted:
                counted.add(id(data))
                pixels += size[0] * size[1]
            if pixels > options.max_request_pixels:
                raise too_many_pixels(options)
            return PlannedImage(image.path, data, size, self._plan(image, size))

        slots = asyncio.Semaphore(options.parallel)
        fetches: dict[ImageUrl, asyncio.Task[tuple[bytes, tuple[int, int]]]] = {}

        async def fetched(url: ImageUrl) -> tuple[bytes, tuple[int, int]]:
            async with slots:
                data = await self._fetcher.fetch(url, budget)
            return data, check_size(data, side)

        async def one(image: FoundImage) -> PlannedImage:
            with at(image.path):
                if image.url is None:
                    return planned(image, image.data or b"", image.size)
                if image.url not in fetches:
                    fetches[image.url] = asyncio.create_task(fetched(image.url))
                return planned(image, *await asyncio.shield(fetches[image.url]))

        tasks = [asyncio.create_task(one(image)) for image in found]
        await _all(tasks, fetches)
        return {image.part: task.result() for image, task in zip(found, tasks, strict=True)}

    def _plan(self, image: FoundImage, size: tuple[int, int]) -> ImagePlan:
        assert self.vision is not None
        try:
            return plan(*size, self.vision.config, longest=image.longest)
        except ImageError as error:
            raise RequestError(f"The image cannot be shown to the model: {error.message}.", code="image_parse_error") from None

    async def show(
        self, places: Sequence[PlacedImage], planned: Mapping[str, PlannedImage], claim: Callable[[int], None], salt: str = ""
    ) -> tuple[PromptImage, ...]:
        """What the engine gets of the images of a prompt. `salt` separates tenants in the cache.

        `claim` is told before anything is decoded how many bytes of canvases there will be.

        Raises RequestError naming the field, also for more than `canvases` may have in all.
        """
        images = [planned[place.part] for place in places]
        keys = await self._keys(images, salt)
        size = sum(3 * cut.canvas[0] * cut.canvas[1] for _, _, cut in set(keys))
        if size > self.canvases.limit:
            text = f"What the model would see of the images of this request takes {size} bytes, and the limit is {self.canvases.limit}."
            raise RequestError(f"{text} Send fewer.", param="messages", code="image_too_large")
        claim(size)
        pictures = await self._render(images, keys)
        return tuple(
            PromptImage(place.start, place.stop, image.plan, picture.canvas, picture.digest)
            for place, image, picture in zip(places, images, pictures, strict=True)
        )

    async def render(self, images: Sequence[PlannedImage], salt: str = "") -> list[Picture]:
        """What the model sees of each image, equal ones once. Raises RequestError naming the field."""
        return await self._render(images, await self._keys(images, salt))

    async def _keys(self, images: Sequence[PlannedImage], salt: str) -> list[Key]:
        digests = await asyncio.to_thread(lambda: [blake3(image.data).digest() for image in images])
        return [(salt, digest, image.plan) for image, digest in zip(images, digests, strict=True)]

    async def _render(self, images: Sequence[PlannedImage], keys: Sequence[Key]) -> list[Picture]:
        """The first finding ends the others' work."""
        decoding = asyncio.Semaphore(self.options.workers)  # so that the first image of another request need not wait for all of these
        renders: dict[Key, asyncio.Task[Picture]] = {}

        async def rendered(image: PlannedImage, key: Key) -> Picture:
            async with decoding:
                made = await self.pool.render(image.data, image.size, image.plan)
            assert self.vision is not None
            width, height = image.plan.canvas
            canvas = np.frombuffer(made.rgb, np.uint8).reshape(height, width, 3)
            picture = Picture(canvas, self.vision.digest(made.digest, image.plan))
            self.cache.put(key, picture)
            return picture

        async def one(image: PlannedImage, key: Key) -> Picture:
            with at(image.path):
                picture = self.cache.get(key)
                if picture is not None:
                    return picture
                if key not in renders:
                    renders[key] = asyncio.create_task(rendered(image, key))
                return await asyncio.shield(renders[key])

        tasks = [asyncio.create_task(one(image, key)) for image, key in zip(images, keys, strict=True)]
        await _all(tasks, renders)
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the decoding programs."""
        self.pool.close()


async def _all(tasks: Sequence[asyncio.Task[Any]], shared: Mapping[Any, asyncio.Task[Any]]) -> None:
    """Wait for all tasks, or until one fails, which is raised; none of them, nor of those they share, is left running."""
    try:
        await asyncio.gather(*tasks)
    finally:
        ends = [*tasks, *shared.values()]
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


class PictureCache:
    """The pictures used last, at most `limit` bytes of pixels. A larger one is not kept.

    Attributes:
        hits, misses: of `get`. size: bytes held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, Picture] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = self.size = 0

    def get(self, key: Key) -> Picture | None:
        with self._lock:
            picture = self._entries.get(key)
            if picture is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(key)
            return picture

    def put(self, key: Key, picture: Picture) -> None:
        with self._lock:
            if picture.canvas.nbytes > self._limit or key in self._entries:
                return
            self._entries[key] = picture
            self.size += picture.canvas.nbytes
            while self.size > self._limit:
                self.size -= self._entries.popitem(last=False)[1].canvas.nbytes
