"""A folder for a measurement, on the disk that is to be measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forebay.model.errors import ConfigError
from forebay.server.config import Config


@contextlib.contextmanager
def scratch(config: Config) -> Iterator[Path]:
    """An empty folder on the disk of `cache.dir`, or where temporary files go if that is off; removed at the end.

    It is beside the store, which takes what it does not know in its folder for litter, unless that is where another disk begins.

    Raises:
        ConfigError: it cannot be made.
    """
    parent = config.cache.dir or Path(tempfile.gettempdir())
    while not parent.exists():
        parent = parent.parent
    if parent == config.cache.dir and not os.path.ismount(parent):
        parent = parent.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".forebay-bench-", dir=parent))
    except OSError as error:
        raise ConfigError(f"bench: {parent} cannot be written ({error.strerror}); choose another --cache-dir") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
