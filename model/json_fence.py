"""JSON answers without the Markdown fence that a model not held to a grammar likes to put around them."""

from __future__ import annotations

OPENINGS = ("```json\n", "```\n")
CLOSING = "```"
TAIL = "` \t\r\n"


class FenceRemover:
    """Passes text on without a first line of three backticks (and `json`) and the last such line; other text goes through unchanged."""

    def __init__(self) -> None:
        self._held = ""
        self._opened: bool | None = None  # None: the first line is not complete

    def feed(self, text: str) -> str:
        """Text now certain to be outside of the fence lines."""
        text = self._held + text
        self._held = ""
        if self._opened is None:
            start = text.lstrip()
            if any(opening.startswith(start) and opening != start for opening in OPENINGS):
                self._held = text
                return ""
            opening = next((opening for opening in OPENINGS if start.startswith(opening)), None)
            self._opened = opening is not None
            text = start[len(opening):] if opening else text
        if self._opened:
            end = len(text.rstrip(TAIL))
            text, self._held = text[:end], text[end:]
        return text

    def flush(self) -> str:
        """What was held back, unless it is the closing line. The text ends."""
        held, self._held = self._held, ""
        return "" if self._opened and CLOSING in held else held
