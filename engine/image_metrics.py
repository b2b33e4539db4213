"""Instruments of images: what was encoded, what was remembered."""

from __future__ import annotations

from typing import Literal

from forebay.engine.instruments import Instruments, each

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class ImageMetrics:
    """Events of the encode stage."""

    def __init__(self, make: Instruments) -> None:
        text = "Images that requests needed embedded: encoded by the vision tower, or remembered in the embedding cache."
        self._images = each(make.counter("images", text, "source"), ("encode", "cache"))
        self._patches = make.counter("image_patches", "Patches that went through the vision tower.")
        self._seconds = make.histogram("image_encode_seconds", "Seconds in which the vision tower encoded one image.", _SECONDS)
        self._bytes = make.gauge("image_cache_bytes", "Bytes of embeddings in the embedding cache.")

    def image(self, source: Literal["encode", "cache"], patches: int, seconds: float) -> None:
        """A sequence got the embeddings of an image of `patches` patches."""
        self._images[source].inc()
        if source == "encode":
            self._patches.inc(patches)
            self._seconds.observe(max(0.0, seconds))

    def cached(self, nbytes: int) -> None:
        self._bytes.set(nbytes)
