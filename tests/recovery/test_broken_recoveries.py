"""A recovery that breaks off: what all ranks do then, and what they still know afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import PeerLostError, RestartError
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.memory_provider import MemoryProvider, Parts
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

SIZE, LOST, CULPRIT = 4, 1, 2
GLOO = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation"


class UnspeakableError(Exception):
    """Raises where it should say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


@dataclass(frozen=True)
class Break:
    """What goes wrong on one rank: which method of its state raises what."""

    method: str
    error: Exception


class Breaking(MemoryProvider):
    """A provider of which one method raises."""

    broken: Break | None = None

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        self._reach("load_objects")
        super().load_objects(objects)

    def gather_weights(self) -> None:
        self._reach("gather_weights")
        super().gather_weights()

    def set_step(self, step: int) -> None:
        self._reach("set_step")
        super().set_step(step)

    def parts(self) -> Parts:
        self._reach("parts")
        return super().parts()

    def _reach(self, method: str) -> None:
        if self.broken is not None and self.broken.method == method:
            raise self.broken.error


def kept(rank: int) -> tuple[CheckpointManager, Breaking]:
    """A manager whose rank has committed step 6, but for the one that is lost; and a new state."""
    manager = CheckpointManager(enable_checksum=True, timeout_s=60)
    weights = {"w": torch.full((8,), 1.0)}
    shard = {"x": torch.full((1000,), 1.0)}
    old = MemoryProvider({"model": weights, "shard": shard}, step=6, gathered=frozenset({"model"}))
    manager.track(old)
    manager.begin_step()
    manager.vote()
    if rank == LOST:
        manager = CheckpointManager(enable_checksum=True, timeout_s=60)
    return manager, new_state()


def new_state() -> Breaking:
    parts = {"model": {"w": torch.zeros(8)}, "shard": {"x": torch.zeros(1000)}}
    return Breaking(parts, gathered=frozenset({"model"}))


def broken_off(rank: int, broken: Break) -> tuple[str, str]:
    """Body of a rank: what becomes of the recovery, and of the one after it."""
    manager, new = kept(rank)
    new.broken = broken if rank == CULPRIT else None
    first = outcome(manager, new)
    return first, outcome(manager, new_state())


def outcome(manager: CheckpointManager, new: MemoryProvider) -> str:
    try:
        found = manager.try_checkpointless_load(new)
    except (RestartError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return f"None: {manager.last_failure}" if found is None else f"step {found['global_step']}"


BREAKS = {
    "objects": Break("load_objects", ValueError("on purpose")),
    "step": Break("set_step", MemoryError("on purpose")),
    "weights": Break("gather_weights", RuntimeError("on purpose")),
    "without a text": Break("load_objects", UnspeakableError()),
    "before anything was filled": Break("parts", ValueError("on purpose")),
    "ranks lose each other": Break("gather_weights", RuntimeError(GLOO)),
}


def break_off_all(rank: int) -> dict[str, tuple[str, str]]:
    """Body of a rank."""
    found = {name: broken_off(rank, broken) for name, broken in BREAKS.items()}
    manager, new = kept(rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == CULPRIT:
            patch.setattr(CheckpointManager, "load_rng_states", _refusing)
        found["generators"] = outcome(manager, new), ""
    return found


def _refusing(_manager: CheckpointManager) -> None:
    raise ValueError("no such generator")


def test_a_recovery_that_breaks_off_ends_alike_on_all_ranks_and_leaves_the_cause() -> None:
    for found in run_processes(SIZE, break_off_all):
        for name in ("objects", "step", "weights", "without a text"):  # the state is filled in part
            first, second = found[name]
            what = f"{BREAKS[name].method} raised {type(BREAKS[name].error).__name__}: "
            lead = f"RestartError: rank {CULPRIT}: a recovery from memory broke off"
            assert first.startswith(lead), first
            assert what in first
            # The cause is still told where nothing but its consequence is left to see.
            assert second.startswith("None: no rank has kept its state: ranks 0, 2, 3: has let its")
            assert what in second
            assert f"rank {LOST}: has no state" in second
        first, _ = found["before anything was filled"]
        assert first.startswith("None: ")
        assert "on purpose" in first
        first, second = found["ranks lose each other"]
        assert first.startswith(f"PeerLostError: rank {CULPRIT}: "), first
        assert "Timed out" in first
        assert second == "step 7"
        first, _ = found["generators"]
        assert first.startswith("RestartError: ")
        assert "no such generator" in first


@pytest.mark.parametrize("why", ["", "the data has no state"])
def test_what_was_deleted_or_declined_is_gone_and_the_reason_is_kept(why: str) -> None:
    manager, old = CheckpointManager(), new_state()
    seen = weakref.ref(old)
    manager.track(old)
    del old
    manager.decline(why) if why else manager.delete_checkpoint()

    assert (seen(), manager.rng_states) == (None, None)
    assert manager.try_checkpointless_load(new_state()) is None
    expected = why or "rank 0: has let its state go when delete_checkpoint was called"
    assert expected in str(manager.last_failure)
