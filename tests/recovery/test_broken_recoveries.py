"""A recovery that breaks off: what all ranks do then, and what they still know afterwards."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import PeerLostError, RestartError
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.memory_provider import MemoryProvider
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

SIZE, LOST, CULPRIT = 4, 1, 2
GLOO = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation"


class UnspeakableError(Exception):
    """Raises where it should say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


def committed(rank: int) -> CheckpointManager:
    """A manager whose rank has committed step 6, but for the one that is lost."""
    manager = CheckpointManager(enable_checksum=True, timeout_s=60)
    manager.track(state(1.0, step=6))
    manager.begin_step()
    manager.vote()
    return CheckpointManager(enable_checksum=True, timeout_s=60) if rank == LOST else manager


def state(value: float = 0.0, step: int = 0) -> MemoryProvider:
    parts = {"model": {"w": torch.full((8,), value)}, "shard": {"x": torch.full((1000,), value)}}
    return MemoryProvider(parts, step=step, gathered=frozenset({"model"}))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def outcome(manager: CheckpointManager, new: MemoryProvider) -> str:
    try:
        found = manager.try_checkpointless_load(new)
    except (RestartError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return f"None: {manager.last_failure}" if found is None else f"step {found['global_step']}"


BREAKS: list[tuple[str, Exception]] = [
    ("load_objects", ValueError("on purpose")),
    ("set_step", MemoryError("on purpose")),
    ("gather_weights", RuntimeError("on purpose")),
    ("load_objects", UnspeakableError()),
    ("parts", ValueError("on purpose")),  # before anything was filled
    ("gather_weights", RuntimeError(GLOO)),
    ("load_rng_states", ValueError("no such generator")),
]
"""Which method raises what: of the culprit's state, or the last of its manager."""


def break_off_all(rank: int) -> list[tuple[str, str]]:
    """Body of a rank: what becomes of each recovery, and of the one after it."""
    found = []
    for method, error in BREAKS:
        manager, new = committed(rank), state()
        if rank == CULPRIT:
            vars(new if hasattr(new, method) else manager)[method] = raising(error)
        found.append((outcome(manager, new), outcome(manager, state())))
    return found


def test_a_recovery_that_breaks_off_ends_alike_on_all_ranks_and_leaves_the_cause() -> None:
    for found in run_processes(SIZE, break_off_all):
        *partial, unfilled, lost, generators = found
        for (method, error), (first, second) in zip(BREAKS, partial, strict=False):
            what = f"{method} raised {type(error).__name__}: "
            lead = f"RestartError: rank {CULPRIT}: a recovery from memory broke off"
            assert first.startswith(lead), first
            assert what in first
            # The cause is still reported where only its consequence is left.
            assert second.startswith("None: no rank has kept its state: ranks 0, 2, 3: has let its")
            assert what in second
            assert f"rank {LOST}: has no state" in second
        assert unfilled[0].startswith("None: ")
        assert "on purpose" in unfilled[0]
        assert lost[0].startswith(f"PeerLostError: rank {CULPRIT}: ")
        assert "Timed out" in lost[0]
        assert lost[1] == "step 7"
        assert generators[0].startswith("RestartError: ")
        assert "no such generator" in generators[0]


@pytest.mark.parametrize("why", ["", "the data has no state"])
def test_what_was_deleted_or_declined_is_gone_and_the_reason_is_kept(why: str) -> None:
    manager, old = CheckpointManager(), state()
    seen = weakref.ref(old)
    manager.track(old)
    del old
    manager.decline(why) if why else manager.delete_checkpoint()

    assert (seen(), manager.rng_states) == (None, None)
    assert manager.try_checkpointless_load(state()) is None
    expected = why or "rank 0: has let its state go when delete_checkpoint was called"
    assert expected in str(manager.last_failure)
