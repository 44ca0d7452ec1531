"""Random states of a process as bytes, and back; nothing is unpickled."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.device import uses_cuda
from dist_ckpt_strategies.errors import CorruptCheckpointError, StrategyError
from dist_ckpt_strategies.megatron.random_states import set_tracked_states, tracked_states

RandomState = tuple[str, bytes]
"""Of one generator: its name, and what it needs to go on from there."""

_PYTHON = struct.Struct("<i625I?d")
_NUMPY = struct.Struct("<624Iii d")
_ENTRY = struct.Struct("<HI")
_CUDA = "cuda"
_TRACKED = "megatron/"
_NUMPY_KIND = "MT19937"


def capture_random_states() -> tuple[RandomState, ...]:
    """Where the generators of this process are: Python, NumPy, torch, CUDA, Megatron's tracker.

    CUDA's only where this process uses CUDA, of its current device; Megatron's only where it has
    been set up.

    Raises:
        StrategyError: NumPy's global generator is of another kind than its own.
    """
    return tuple(_captured())


def restore_random_states(states: Sequence[RandomState]) -> None:
    """Put the generators of this process where ``capture_random_states`` found them.

    Raises:
        CorruptCheckpointError: a state makes no sense; those before it have been restored.
    """
    tracked: dict[str, torch.Tensor] = {}
    for name, content in states:
        if name.startswith(_TRACKED):
            tracked[name.removeprefix(_TRACKED)] = _as_tensor(content)
            continue
        if name not in _RESTORE:
            raise CorruptCheckpointError(f"random states: no generator is called {name!r}")
        try:
            _RESTORE[name](content)
        except (struct.error, ValueError, TypeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"random states: {name}: {error}") from error
    set_tracked_states(tracked)


def encode_random_states(states: Sequence[RandomState]) -> bytes:
    """The states, one behind the other."""
    content = bytearray()
    for name, state in states:
        text = name.encode()
        content += _ENTRY.pack(len(text), len(state)) + text + state
    return bytes(content)


def decode_random_states(content: bytes) -> tuple[RandomState, ...]:
    """What was encoded.

    Raises:
        CorruptCheckpointError: the bytes are of something else.
    """
    found: list[RandomState] = []
    at = 0
    while at < len(content):
        if at + _ENTRY.size > len(content):
            raise CorruptCheckpointError(f"random states: {len(content) - at} bytes too many")
        name_nbytes, state_nbytes = _ENTRY.unpack_from(content, at)
        start = at + _ENTRY.size + name_nbytes
        at = start + state_nbytes
        if at > len(content):
            raise CorruptCheckpointError(f"random states: {at - len(content)} bytes are missing")
        try:
            name = content[start - name_nbytes : start].decode()
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(f"random states: a name is none: {error}") from error
        found.append((name, content[start:at]))
    return tuple(found)


def _captured() -> Iterator[RandomState]:
    yield "python", _python_bytes()
    yield "numpy", _numpy_bytes()
    yield "torch", torch.get_rng_state().numpy().tobytes()
    if uses_cuda():
        yield _CUDA, torch.cuda.get_rng_state().numpy().tobytes()
    for name, state in tracked_states().items():
        yield _TRACKED + name, state.cpu().numpy().tobytes()


def _python_bytes() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)


def _set_python(content: bytes) -> None:
    version, *words, has_gauss, gauss = _PYTHON.unpack(content)
    random.setstate((version, tuple(words), gauss if has_gauss else None))


def _numpy_bytes() -> bytes:
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002 - it is the global one we want
    if state[0] != _NUMPY_KIND:
        raise StrategyError(
            f"NumPy's global generator: expected {_NUMPY_KIND}, found {state[0]}; leave it as it is"
        )
    _, words, position, has_gauss, gauss = state
    return _NUMPY.pack(*words.tolist(), position, has_gauss, gauss)


def _set_numpy(content: bytes) -> None:
    *words, position, has_gauss, gauss = _NUMPY.unpack(content)
    state = (_NUMPY_KIND, np.array(words, dtype=np.uint32), position, has_gauss, gauss)
    np.random.set_state(state)  # noqa: NPY002 - it is the global one we want


def _set_torch(content: bytes) -> None:
    torch.set_rng_state(_as_tensor(content))


def _set_cuda(content: bytes) -> None:
    torch.cuda.set_rng_state(_as_tensor(content))


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()


_RESTORE: dict[str, Callable[[bytes], None]] = {
    "python": _set_python,
    "numpy": _set_numpy,
    "torch": _set_torch,
    _CUDA: _set_cuda,
}


class RandomLog:
    """Random states of this rank and its replicas, at the beginning of the last few steps.

    Encoded; by global rank and step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bytes] = {}

    def note(self, global_rank: int, step: int, content: bytes) -> None:
        """Keep the states of a rank, in the place of earlier ones of that step."""
        self._known[global_rank, step] = content

    def get(self, global_rank: int, step: int) -> bytes | None:
        """The states of a rank at the beginning of a step; None if they are not known."""
        return self._known.get((global_rank, step))

    def all(self) -> dict[tuple[int, int], bytes]:
        """All that is known."""
        return dict(self._known)

    def forget_before(self, step: int) -> None:
        """Drop what is older than the beginning of ``step``."""
        self._known = {key: found for key, found in self._known.items() if key[1] >= step}

    def clear(self) -> None:
        """Drop everything."""
        self._known = {}
