"""What the commands show a person: sizes in words, and the progress of a long load."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_EVERY_S = 5.0  # between progress lines where there is no terminal
FIRST_LINE_S = 1.0  # a load shorter than this stays silent


def size(count: float) -> str:
    """`512 B`, `1.5 KiB`, `475.25 GiB`: at most four significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    digits = 0 if unit == "B" else 2 if abs(count) < 100 else 1
    return f"{count:,.{digits}f} {unit}"


class LoadProgress:
    """Shows a load as a bar on a terminal, and as a line every few seconds elsewhere.

    `report` may be called from any thread. `tick` must be called now and then where there is no terminal, so that a long
    silence inside one tensor still gives a line.
    """

    def __init__(self, console: Console) -> None:
        self.done, self.total, self.name = 0, 0, ""
        self._console = console
        self._last_line = time.monotonic() - LINE_EVERY_S + FIRST_LINE_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            figures = (
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.description}"),
            )
            self._bar = Progress(TextColumn("Loading"), BarColumn(bar_width=30), *figures, console=console, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> LoadProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen and give the cursor back."""
        if self._bar:
            self._bar.stop()

    def report(self, done: int, total: int, name: str) -> None:
        """`done` of `total` bytes are loaded; `name` is the tensor being read."""
        self.done, self.total, self.name = done, total, name
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, description=name[:40])

    def tick(self) -> None:
        """Print a line if none was printed for a while and there is no bar."""
        now = time.monotonic()
        if self._bar is None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._console.print(f"loading: {self}", highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        if not self.total:
            return self.name or "starting"
        return f"{self.done / self.total:.0%}, {size(self.done)} of {size(self.total)} ({self.name})"


def consoles() -> tuple[Console, Console]:
    """Consoles on standard output (results) and standard error (progress)."""
    return Console(file=sys.stdout, highlight=False), Console(file=sys.stderr, highlight=False)
