"""The differences between two unpickled values."""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_MAX_TEXT = 120


def differing_places(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Each place at which two values are not the same, and what is there in short."""
    mine = _held(a) if type(a) is type(b) else None
    if mine is None:
        if type(a) is not type(b) or not _is_same(a, b):
            yield where, _short(a), _short(b)
    elif isinstance(a, (list, tuple)) and len(a) != len(b):
        yield where, f"{len(a)} elements", f"{len(b)} elements"
    else:
        theirs = _held(b) or {}
        for place in {**mine, **theirs}:
            if place in mine and place in theirs:
                yield from differing_places(mine[place], theirs[place], where + place)
            else:
                one = _short(mine[place]) if place in mine else "nothing"
                other = _short(theirs[place]) if place in theirs else "nothing"
                yield where + place, one, other


def _held(value: Any) -> dict[str, Any] | None:
    """The values in a value, by the text of their place; None if it holds no others."""
    if isinstance(value, dict):
        return {f"[{key!r}]": held for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{number}]": held for number, held in enumerate(value)}
    if isinstance(value, (type, torch.Tensor)) or not getattr(value, "__dict__", None):
        return None
    return {f".{name}": held for name, held in vars(value).items()}


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, that hold no others, are equal to the bit."""
    if isinstance(a, (torch.Tensor, np.ndarray)) and (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout is not b.layout:
            return False
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        a, b = (t.detach().resolve_conj().resolve_neg() for t in (a, b))
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue())
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 4]} ..."
