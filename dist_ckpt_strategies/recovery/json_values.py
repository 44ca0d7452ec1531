"""State of optimizers, schedules, callbacks and loops as JSON types, and back; tensors as text."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError


def to_json_value(value: Any) -> Any:
    """As JSON types: numbers, text, None, lists, tuples, dicts with any of these as keys, tensors.

    Counters stay what they are; numbers of NumPy become Python's, paths those of this system.

    Raises:
        PlanError: something in it is nothing of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return value.item()
    if isinstance(value, torch.Tensor):
        return {"tensor": _of_tensor(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[to_json_value(key), to_json_value(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [to_json_value(item) for item in value]}
    raise PlanError(f"{type(value).__name__}: expected a number, text, path, list, dict or tensor")


def from_json_value(value: Any) -> Any:
    """What ``to_json_value`` was given; tensors are on the CPU.

    Raises:
        CorruptCheckpointError: it is nothing that ``to_json_value`` gives.
    """
    try:
        return _from_json_value(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CorruptCheckpointError(f"a value of {type(value).__name__}: {error}") from error


def _from_json_value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind not in _FROM:
        raise CorruptCheckpointError(f"a value of kind {kind!r}: expected one of {sorted(_FROM)}")
    return _FROM[kind](content)


def _of_tensor(tensor: torch.Tensor) -> list[Any]:
    whole = tensor.detach().cpu().contiguous()
    content = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    text = base64.b64encode(content).decode()
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), text]


def _to_tensor(content: list[Any]) -> torch.Tensor:
    name, shape, text = content
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"a tensor of dtype {name!r}: torch has none of that name")
    raw = np.frombuffer(base64.b64decode(text), np.uint8).copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)


_FROM: dict[str, Callable[[Any], Any]] = {
    "counter": lambda content: Counter(
        {_from_json_value(k): _from_json_value(n) for k, n in content}
    ),
    "dict": lambda content: {
        _from_json_value(key): _from_json_value(item) for key, item in content
    },
    "list": lambda content: [_from_json_value(item) for item in content],
    "path": Path,
    "tuple": lambda content: tuple(_from_json_value(item) for item in content),
    "tensor": _to_tensor,
}
