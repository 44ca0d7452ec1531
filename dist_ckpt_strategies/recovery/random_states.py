"""Random states of a process as bytes, and back. Importing this does not import Megatron-Core."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.device import uses_cuda
from dist_ckpt_strategies.errors import CorruptCheckpointError

RandomState = tuple[str, Any]
"""Of one generator: its name, and what it needs to go on from there."""

_TRACKED = "megatron/"
_MODULE = "megatron.core.tensor_parallel.random"


def capture_random_states() -> tuple[RandomState, ...]:
    """Where the generators of this process are: Python, NumPy, torch, CUDA, Megatron's tracker.

    CUDA's only where this process uses CUDA, of its current device; Megatron's only where it has
    been set up.
    """
    found: list[RandomState] = [
        ("python", random.getstate()),
        ("numpy", np.random.get_state()),  # noqa: NPY002 - the global one
        ("torch", torch.get_rng_state().numpy()),
    ]
    if uses_cuda():
        found.append(("cuda", torch.cuda.get_rng_state().numpy()))
    tracker = _tracker()
    for name, state in sorted(tracker.get_states().items()) if tracker else ():
        tensor = state.get_state() if isinstance(state, torch.Generator) else state
        found.append((_TRACKED + name, tensor.cpu().numpy().copy()))
    return tuple(found)


def restore_random_states(states: Sequence[RandomState]) -> None:
    """Put the generators of this process where ``capture_random_states`` found them.

    Raises:
        CorruptCheckpointError: a state makes no sense; those before it have been restored.
    """
    tracked: dict[str, torch.Tensor] = {}
    for name, state in states:
        try:
            if name.startswith(_TRACKED):
                tracked[name.removeprefix(_TRACKED)] = torch.from_numpy(state)
            else:
                _restore(name, state)
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"random states: {name}: {error}") from error
    tracker = _tracker()
    if tracker and tracked:
        current = dict(tracker.get_states())
        for name, tensor in tracked.items():
            if isinstance(current.get(name), torch.Generator):
                current[name].set_state(tensor)
            else:
                current[name] = tensor.clone()
        tracker.set_states(current)


def encode_random_states(states: Sequence[RandomState]) -> bytes:
    """The states for another rank of this job, or for later."""
    return pickle.dumps(tuple(states))


def decode_random_states(content: bytes) -> tuple[RandomState, ...]:
    """What a rank of this job encoded."""
    found: tuple[RandomState, ...] = pickle.loads(content)  # noqa: S301 - of a rank of this job
    return found


def _restore(name: str, state: Any) -> None:
    if name == "python":
        random.setstate(state)
    elif name == "numpy":
        np.random.set_state(state)  # noqa: NPY002 - the global one
    elif name == "torch":
        torch.set_rng_state(torch.from_numpy(state))
    elif name == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(state))
    else:
        raise ValueError("no generator has this name")


def _tracker() -> Any:
    """Megatron-Core's tracker; None where it has not been set up in this process."""
    tracker = getattr(sys.modules.get(_MODULE), "_CUDA_RNG_STATE_TRACKER", None)
    return tracker if tracker is not None and tracker.is_initialized() else None
