"""A row of `forebay bench kernels`, as the modules that wrap kernels list them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """What must be moved (bytes) and computed (FLOPs) at least by `run(*make_inputs(device))`."""

    name: str
    make_inputs: Callable[[torch.device], tuple[Any, ...]]
    run: Callable[..., Any]
    bytes_floor: int
    flops: int
