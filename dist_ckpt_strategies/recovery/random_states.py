"""The random states of a process, and back. Importing this does not import Megatron-Core."""

import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.process_group import global_rank
from dist_ckpt_strategies.device import gpu_random_state, set_gpu_random_state
from dist_ckpt_strategies.errors import CorruptCheckpointError, RestartError

RandomState = tuple[str, Any]
"""Of one generator: its name, and what it needs to go on from there."""

_TRACKED = "megatron/"


def capture_random_states() -> tuple[RandomState, ...]:
    """States of this process's generators: Python, NumPy, torch, CUDA, Megatron's tracker.

    CUDA's only where this process uses CUDA, of its current device; Megatron's only where it has
    been set up. They can be pickled, and need no torch to be read.
    """
    found: list[RandomState] = [
        ("python", random.getstate()),
        ("numpy", np.random.get_state()),  # noqa: NPY002 - the global one
        ("torch", torch.get_rng_state().numpy()),
    ]
    on_gpu = gpu_random_state()
    if on_gpu is not None:
        found.append(("cuda", on_gpu))
    tracker = _tracker()
    for name, state in sorted(tracker.get_states().items()) if tracker else ():
        tensor = state.get_state() if isinstance(state, torch.Generator) else state
        found.append((_TRACKED + name, tensor.cpu().numpy().copy()))
    return tuple(found)


def restore_random_states(states: Sequence[RandomState]) -> None:
    """Put the generators of this process where ``capture_random_states`` found them.

    One that makes no sense is a CorruptCheckpointError; those before it have been restored.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": lambda state: torch.set_rng_state(torch.from_numpy(state)),
        "cuda": set_gpu_random_state,
    }
    tracker = _tracker()
    tracked = dict(tracker.get_states()) if tracker else {}
    for name, state in states:
        try:
            if not name.startswith(_TRACKED):
                setters[name](state)
                continue
            key, tensor = name.removeprefix(_TRACKED), torch.from_numpy(state)
            if isinstance(tracked.get(key), torch.Generator):
                tracked[key].set_state(tensor)
            else:
                tracked[key] = tensor.clone()
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"random states: {name}: {error}") from error
    if tracker:
        tracker.set_states(tracked)


class KnownRandomStates(dict[tuple[int, int], bytes]):
    """Encoded random states at the beginning of the last steps, by global rank and step."""

    def take(self, step: int) -> bytes:
        """Keep the current ones of this process as those of a step, and return them."""
        content = self[global_rank(), step] = pickle.dumps(capture_random_states())
        return content

    def own(self, step: int) -> list[RandomState] | None:
        """The states of this process; None if they are not known."""
        content = self.get((global_rank(), step))
        return None if content is None else list(pickle.loads(content))  # noqa: S301 - of this job

    def restore(self, step: int) -> None:
        """Go back to those of this process; a RestartError if they are not known."""
        states = self.own(step)
        if states is None:
            raise RestartError(f"no random states are known for step {step}")
        restore_random_states(states)

    def add(self, step: int, by_rank: Mapping[int, bytes]) -> None:
        """Keep those of other ranks."""
        self.update({(rank, step): content for rank, content in by_rank.items()})

    def forget_before(self, step: int) -> None:
        """Forget those of earlier steps."""
        for key in [key for key in self if key[1] < step]:
            del self[key]


def _tracker() -> Any:
    """Megatron-Core's tracker; None where it has not been set up in this process."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
    return tracker if tracker is not None and tracker.is_initialized() else None
