"""Runs a function that works on tensors on a GPU, for tests that make their tensors on the host."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda")


def on_device(function: Callable[..., Any], device: torch.device = CUDA) -> Callable[..., Any]:
    """`function` with every host tensor in its arguments, however deep, on `device`.

    Tensors that share memory share it there too, strides and offsets included; whatever the function writes is on the host when it
    returns. What is on a device already stays as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = _Moved(device)
        result = function(*moved.there(args), **moved.there(kwargs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moved.back()
        return moved.here(result)

    return call


class _Moved:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # by the host's address
        self.seen: dict[int, tuple[Any, Any]] = {}

    def there(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return self.device if value.type == "cpu" else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.there, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self.there, value))
        if isinstance(value, dict):
            return {key: self.there(each) for key, each in value.items()}
        if id(value) in self.seen:
            return self.seen[id(value)][1]
        names = [f.name for f in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", {}))
        if isinstance(value, type) or (callable(value) and not names) or not type(value).__module__.startswith(("forebay", "types")):
            return value
        clone = copy.copy(value)
        self.seen[id(value)] = value, clone
        for name in names:
            object.__setattr__(clone, name, self.there(getattr(value, name)))
        return clone

    def _tensor(self, value: Tensor) -> Tensor:
        if value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.nbytes() == 0:
            return value.to(self.device)
        if storage.data_ptr() not in self.storages:
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()
            there.copy_(storage)
            self.storages[storage.data_ptr()] = storage, there
        there = self.storages[storage.data_ptr()][1]
        return torch.empty(0, dtype=value.dtype, device=self.device).set_(there, value.storage_offset(), value.shape, value.stride())

    def back(self) -> None:
        for here, there in self.storages.values():
            here.copy_(there)

    def here(self, result: Any) -> Any:
        if isinstance(result, Tensor) and result.device.type != "cpu":
            for here, there in self.storages.values():
                if there.data_ptr() == result.untyped_storage().data_ptr():
                    return torch.empty(0, dtype=result.dtype).set_(here, result.storage_offset(), result.shape, result.stride())
            return result.cpu()
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*map(self.here, result))
        if isinstance(result, tuple | list):
            return type(result)(map(self.here, result))
        return result
