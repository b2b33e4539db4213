"""The encode stage: images of running sequences become embeddings, each picture once while it is remembered."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.engine.image_metrics import ImageMetrics
from forebay.engine.sequence import Sequence
from forebay.engine.types import EngineError, PromptImage
from forebay.model.errors import ForebayError
from forebay.model.image_pixels import patchify
from forebay.model.vision import VisionTower

log = logging.getLogger("forebay.engine")


@dataclass
class _Kept:
    embeddings: Tensor
    used: float


Key = tuple[str, bytes]  # the tenant's salt, so that nobody's answer comes sooner for what others have shown; and the picture's digest


class EmbeddingCache:
    """Embeddings of pictures, least recently used first, within a budget of bytes and an age since the last use."""

    def __init__(self, budget: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.ttl_s, self._clock = budget, ttl_s, clock
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Tensor | None:
        """[positions, D] bf16 of a picture that is remembered; it counts as used."""
        found = self._kept.get(key)
        if found is None:
            return None
        found.used = self._clock()
        self._kept.move_to_end(key)
        return found.embeddings

    def put(self, key: Key, embeddings: Tensor) -> None:
        """Remember a picture; what is larger than the whole budget is not."""
        self._drop(key)
        if embeddings.nbytes > self.budget:
            return
        self._kept[key] = _Kept(embeddings, self._clock())
        self.nbytes += embeddings.nbytes
        while self.nbytes > self.budget:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget every picture."""
        self._kept.clear()
        self.nbytes = 0

    def expire(self) -> None:
        """Forget what nobody has used for `ttl_s`."""
        now = self._clock()
        while self._kept and now - next(iter(self._kept.values())).used > self.ttl_s:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> None:
        if (gone := self._kept.pop(key, None)) is not None:
            self.nbytes -= gone.embeddings.nbytes


class Encoder:
    """Gives running sequences what their images are embedded as."""

    def __init__(self, tower: VisionTower, cache: EmbeddingCache, metrics: ImageMetrics) -> None:
        self.tower, self.cache, self.metrics = tower, cache, metrics
        self._turns = 1

    def serve(self, sequences: Iterable[Sequence], reach: int) -> list[tuple[Sequence, ForebayError]]:
        """Before a step: embed images among the next `reach` positions of the sequences, and let go of those that are computed.

        At most one picture is encoded, however many are remembered, so that generated tokens do not wait for a long prompt's pictures. The
        sequences that lack one take turns, so that one picture does not wait for another prompt's hundreds.
        Returns sequences whose picture could not be encoded, and why; the others go on.
        """
        self.cache.expire()
        self.metrics.cached(self.cache.nbytes)
        lacking: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            for number, image in enumerate(sequence.request.images):
                if image.stop <= sequence.computed:
                    sequence.embeddings[number] = None
                elif image.start >= sequence.computed + reach:
                    break
                elif sequence.embeddings[number] is None:
                    found = self.cache.get((sequence.request.salt, image.digest))
                    if found is None:
                        sequence.encoded = sequence.encoded or self._turns  # who is new comes after those that wait
                        lacking.append((sequence, number))
                        break
                    self.metrics.image("cache", image.plan.patch_count, 0.0)
                    sequence.embeddings[number] = found
        if not lacking:
            return []
        self._turns += 1
        sequence, number = min(lacking, key=lambda each: each[0].encoded)  # the first in order of those served longest ago
        sequence.encoded = self._turns
        try:
            sequence.embeddings[number] = self._encode(sequence.request.images[number], sequence.request.salt)
        except Exception as error:
            log.exception("an image of request %s could not be encoded", sequence.id)
            reason = EngineError("the engine failed while it encoded an image of this request", code="encode_failed")
            return [(sequence, error if isinstance(error, ForebayError) else reason)]
        return []

    def _encode(self, image: PromptImage, salt: str) -> Tensor:
        began = time.perf_counter()
        found = self.tower.encode(patchify(image.canvas, self.tower.config), image.plan)
        if found.is_cuda:
            torch.cuda.current_stream(found.device).synchronize()  # the seconds are those of the device
        if found.shape[0] != image.plan.tokens:
            raise EngineError(f"an image has {image.plan.tokens} positions, and {found.shape[0]} rows came of it", code="encode_failed")
        self.cache.put((salt, image.digest), found)
        self.metrics.image("encode", image.plan.patch_count, time.perf_counter() - began)
        self.metrics.cached(self.cache.nbytes)
        return found
