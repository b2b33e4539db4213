"""The numbers of structured output: what grammars cost to build, to keep and to follow."""

from __future__ import annotations

from typing import Literal

from forebay.engine.instruments import Instruments, each

Result = Literal["built", "refused", "too_slow", "failed"]
RESULTS = ("built", "refused", "too_slow", "failed")

_COMPILE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8)
_MASK = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class GrammarMetrics:
    """Instruments of grammars. Methods are events and may be called from any thread."""

    def __init__(self, make: Instruments) -> None:
        text = "Seconds from the start of building one grammar that was not kept to its outcome, the trial in its own process included."
        self._compile = make.histogram("grammar_compile_seconds", text, _COMPILE)
        text = (
            "Grammars that were not kept, by what became of them: built, refused (wrong, contradictory, too large or not supported), "
            "too_slow (took more time or memory than one may), failed (could not be tried)."
        )
        self._compiles = each(make.counter("grammar_compiles", text, "result"), RESULTS)
        self._kept = make.gauge("grammar_kept_bytes", "Bytes that the kept grammars and refusals are reckoned at.")
        text = "Seconds to compute one mask, the ids that the grammar of one choice allows next; it runs beside the steps."
        self._mask = make.histogram("grammar_mask_seconds", text, _MASK)
        text = "Seconds that steps stood still until the masks of their rows were ready; what was computed beside a step is not in it."
        self._waited = make.counter("grammar_mask_wait_seconds", text)
        self._late = make.counter("grammar_masks_late", "Times that a choice got no token in a step because its mask was not ready.")

    def compiled(self, seconds: float, result: Result) -> None:
        """A grammar was to be built."""
        self._compile.observe(max(0.0, seconds))
        self._compiles[result].inc()

    def kept(self, weight: int) -> None:
        self._kept.set(weight)

    def mask(self, seconds: float) -> None:
        """A mask was computed, or failed to be."""
        self._mask.observe(max(0.0, seconds))

    def waited(self, seconds: float, late: int) -> None:
        """A step waited for its masks; `late` of its choices go without a token."""
        self._waited.inc(max(0.0, seconds))
        self._late.inc(max(0, late))
