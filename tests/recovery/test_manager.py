"""What the manager keeps, when it lets go of it, and what it says where it cannot help."""

import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from dist_ckpt_strategies.errors import NoReplicasAvailableError, PeerLostError, RestartError
from dist_ckpt_strategies.recovery import CheckpointManager, InMemoryCheckpointManager, Phase
from tests.support.memory_provider import MemoryProvider
from tests.support.ranks import run_processes


def provider(value: float, step: int = 0) -> MemoryProvider:
    return MemoryProvider({"p": {"x": torch.full((4,), value)}}, step=step)


def value_of(found: MemoryProvider) -> float:
    (value,) = set(found.parts()["p"]["x"].tolist())
    return float(value)


def tracking(
    old: MemoryProvider, phase: Phase = Phase.RUNNING, **options: Any
) -> CheckpointManager:
    """A manager in a step of that provider."""
    manager = CheckpointManager(**options)
    manager.track(old)
    manager.begin_step()
    if phase >= Phase.COMMITTED:
        manager.vote()
    if phase is Phase.UPDATING:
        with pytest.raises(ValueError, match="broken off"), manager.updating():
            raise ValueError("broken off")
    if phase is Phase.UPDATED:
        with manager.updating():
            old.apply_update()
    return manager


def test_at_the_first_start_there_is_nothing_to_load() -> None:
    assert InMemoryCheckpointManager is CheckpointManager
    manager = InMemoryCheckpointManager()

    assert manager.try_checkpointless_load(provider(0)) is None
    assert not manager.checkpointless_recovery_feasible(provider(0))
    assert isinstance(manager.last_failure, NoReplicasAvailableError)
    assert "rank 0: has no state" in str(manager.last_failure)
    assert (manager.global_step, manager.phase, manager.rng_states) == (None, None, None)


@pytest.mark.parametrize(
    ("phase", "step", "value", "is_offloaded"),
    [
        (Phase.RUNNING, 6, 1.0, False),
        (Phase.RUNNING, 6, 1.0, True),
        (Phase.COMMITTED, 7, 2.0, True),
        (Phase.UPDATED, 7, 2.0, True),
    ],
)
@pytest.mark.slow
def test_a_new_model_takes_over_what_the_old_one_had_and_that_is_let_go_of(
    phase: Phase, step: int, value: float, is_offloaded: bool
) -> None:
    old, new = provider(1.0, step=6), provider(9.0)
    manager, seen = tracking(old, phase, enable_offload=is_offloaded), weakref.ref(old)
    del old
    manager.maybe_offload_checkpoint()
    manager.maybe_offload_checkpoint()
    assert (seen() is None) == is_offloaded

    assert manager.checkpointless_recovery_feasible(new)
    loaded = manager.try_checkpointless_load(new)
    gc.collect()

    assert seen() is None
    assert loaded is not None
    assert loaded["global_step"] == step
    assert manager.last_report is not None
    assert (value_of(new), new.step, manager.global_step) == (value, step, step)


def test_a_committed_step_is_finished_once_however_often_recovery_is_interrupted() -> None:
    class Interrupted(MemoryProvider):
        def load_objects(self, objects: Any) -> None:
            raise KeyboardInterrupt

    manager = tracking(provider(1.0, step=6), Phase.COMMITTED)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            manager.try_checkpointless_load(Interrupted({"p": {"x": torch.zeros(4)}}))
        assert manager.phase is Phase.UPDATED
    new = provider(9.0)

    assert manager.try_checkpointless_load(new) is not None
    assert value_of(new) == 2.0


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.RUNNING, {"step": 6, "position": 3, "rate": 1.0}),
        (Phase.COMMITTED, {"step": 7, "position": 4, "rate": 0.5}),
        (Phase.UPDATED, {"step": 7, "position": 4, "rate": 0.5}),
    ],
)
def test_a_step_that_is_repeated_begins_with_the_objects_of_its_beginning(
    phase: Phase, expected: dict[str, Any]
) -> None:
    class Training(MemoryProvider):
        def objects(self) -> Any:
            return dict(self._objects)

    old, new = Training({"p": {"x": torch.zeros(4)}}, step=6), provider(9.0)
    old.load_objects({"step": 6, "position": 1, "rate": 2.0})
    manager = CheckpointManager()
    manager.track(old)
    old.load_objects({"step": 6, "position": 3, "rate": 1.0})  # between two steps
    manager.begin_step()
    old.load_objects({"step": 6, "position": 4, "rate": 0.5})  # the batch is taken
    if phase >= Phase.COMMITTED:
        manager.vote()
    if phase is Phase.UPDATED:
        with manager.updating():
            old.apply_update()

    assert manager.try_checkpointless_load(new) is not None
    assert new.objects() == expected


class Memory(np.ndarray[Any, Any]):
    """Can be watched: it lives as long as any tensor looks at it."""


class FailingUpdate(MemoryProvider):
    def apply_update(self) -> None:
        raise ValueError("no gradients")


class OnlyTrainer(MemoryProvider):
    def apply_update(self) -> None:
        raise RestartError("only its trainer can end the step")


INTERRUPTED = "rank 0: was interrupted in its update of step 0: its st"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "phase", "is_offloaded", "why"),
    [
        (MemoryProvider, Phase.UPDATING, False, INTERRUPTED),
        (FailingUpdate, Phase.COMMITTED, False, "apply_update raised ValueError: no gradients"),
        (OnlyTrainer, Phase.COMMITTED, False, "only its trainer can"),
        (OnlyTrainer, Phase.COMMITTED, True, INTERRUPTED),
    ],
)
def test_without_a_state_that_can_be_used_there_is_a_reason_and_no_tensor_in_memory(
    kind: type[MemoryProvider],
    phase: Phase,
    is_offloaded: bool,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest would keep the errors that are logged
    memory = np.ones(4, np.float32).view(Memory)
    seen = weakref.ref(memory)
    old = kind({"p": {"x": torch.from_numpy(memory)}})
    manager = tracking(old, phase, enable_offload=is_offloaded)
    manager.maybe_offload_checkpoint()
    del old, memory

    try:
        int("something of the user's own")
    except ValueError as error:  # it is tried where something else has gone wrong
        loaded = manager.try_checkpointless_load(provider(9.0))
        is_untouched = error.__traceback__ is not None
    gc.collect()

    assert loaded is None
    assert is_untouched
    assert seen() is None
    assert why in str(manager.last_failure)
    assert manager.global_step is None
    assert not manager.parameter_update_lock.locked()


def numbers() -> list[Any]:
    """Some of everything; a normal number of Python and NumPy keeps another one for later."""
    return [
        random.random(),
        random.gauss(),
        np.random.rand(),  # noqa: NPY002 - it is the global generator that counts
        np.random.randn(),  # noqa: NPY002
        torch.rand(()).item(),
        torch.randn(3).tolist(),
    ]


def test_a_step_is_run_again_from_the_random_states_of_its_beginning() -> None:
    manager = tracking(provider(1.0, step=6))
    first = numbers()
    manager.vote()
    with manager.updating():
        pass
    manager.end_step()
    second = numbers()

    new = provider(9.0)
    assert manager.try_checkpointless_load(new) is not None
    numbers()
    manager.track(new)
    manager.begin_step()
    assert numbers() == second
    assert first != second

    manager.load_rng_states()
    assert numbers() == second


def test_random_states_stored_by_hand_are_loaded_again_with_those_that_megatron_tracks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = torch.Generator().manual_seed(3)
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.set_states({"model": torch.arange(16, dtype=torch.uint8), "graph": graph})
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", tracker)
    manager = CheckpointManager()
    with pytest.raises(RestartError, match="no random states are known"):
        manager.load_rng_states()
    manager.store_rng_states()
    drawn = numbers(), torch.rand(2, generator=graph).tolist()
    numbers()
    tracker.states_["model"] = torch.zeros(16, dtype=torch.uint8)
    manager.load_rng_states()

    assert drawn == (numbers(), torch.rand(2, generator=graph).tolist())
    assert tracker.states_["model"].tolist() == list(range(16))
    assert manager.rng_states is not None
    assert [name for name, _ in manager.rng_states][:3] == ["python", "numpy", "torch"]


def test_saving_what_is_tracked_does_not_change_how_far_it_is() -> None:
    old = provider(1.0, step=6)
    manager = tracking(old, Phase.COMMITTED)
    manager.save_checkpoint(old)
    assert manager.phase is Phase.COMMITTED

    other = provider(2.0, step=8)
    manager.save_checkpoint(other)
    assert (manager.phase, manager.global_step) == (Phase.RUNNING, 8)
    new = provider(9.0)
    assert manager.try_checkpointless_load(new) is not None
    assert value_of(new) == 2.0


@pytest.mark.parametrize("why", ["", "the data has no state"])
def test_a_deleted_or_declined_checkpoint_is_gone_and_the_reason_is_kept(why: str) -> None:
    old = provider(1.0)
    manager, seen = tracking(old), weakref.ref(old)
    del old
    manager.decline(why) if why else manager.delete_checkpoint()

    assert (seen(), manager.rng_states) == (None, None)
    assert manager.try_checkpointless_load(provider(9.0)) is None
    expected = why or "rank 0: has let its state go when delete_checkpoint was called"
    assert expected in str(manager.last_failure)


@pytest.mark.parametrize("enable_offload", [False, True])
def test_a_byte_that_flips_in_memory_is_found_and_the_tensor_named(enable_offload: bool) -> None:
    old = provider(1.0)
    manager = tracking(old, enable_checksum=True, enable_offload=enable_offload)
    assert not manager.checksum_manager.differences(old.parts())
    old.parts()["p"]["x"].view(torch.uint8)[5] ^= 1
    manager.maybe_offload_checkpoint()  # a copy would pass for whole

    assert not manager.checkpointless_recovery_feasible(provider(9.0))
    assert manager.try_checkpointless_load(provider(9.0)) is None
    assert "p: no rank holds it" in str(manager.last_failure)
    assert "p: x: has digest" in str(manager.last_failure)


@pytest.mark.parametrize(
    ("call", "expected"),
    [("vote", "RUNNING"), ("end_step", "UPDATED")],
)
def test_a_step_goes_through_its_phases_in_order(call: str, expected: str) -> None:
    manager = CheckpointManager()
    with pytest.raises(RestartError, match="no state is tracked"):
        manager.vote()
    manager = tracking(provider(1.0), Phase.COMMITTED)
    with pytest.raises(RestartError, match=f"step 0: it is COMMITTED, expected {expected}"):
        getattr(manager, call)()


def test_a_step_does_not_begin_before_the_last_one_has_ended() -> None:
    old = provider(1.0)
    manager = tracking(old)
    old.set_step(1)  # trained without the manager

    with pytest.raises(RestartError, match="step 1 begins, expected 0"):
        manager.begin_step()


class Failing(MemoryProvider):
    def apply_update(self) -> None:
        super().apply_update()
        raise MemoryError("in the middle of it")


def loaded_of_two_shards(
    rank: int,
    *,
    is_committed: bool,
    lost: tuple[int, ...] = (),
    flipped: tuple[int, ...] = (),
    failing: tuple[int, ...] = (),
) -> Any:
    """Ranks 0 and 2 hold one part, 1 and 3 another, in step 6."""
    part = f"shard/{rank % 2}"
    kind = Failing if rank in failing else MemoryProvider
    old = kind({part: {"x": torch.full((1000,), 1.0 + rank % 2)}}, step=6)
    phase = Phase.COMMITTED if is_committed else Phase.RUNNING
    manager = tracking(old, phase, enable_checksum=not is_committed, timeout_s=60)
    expected = torch.rand(2)
    if rank in flipped:
        old.parts()[part]["x"].view(torch.uint8)[-1] ^= 1
    if rank in lost:
        manager = CheckpointManager(enable_checksum=True, timeout_s=60)
    new = MemoryProvider({part: {"x": torch.zeros(1000)}})
    is_feasible = manager.checkpointless_recovery_feasible(new)
    if manager.try_checkpointless_load(new) is None:
        assert not is_feasible or failing
        return str(manager.last_failure)
    is_right = bool((new.parts()[part]["x"] == 1.0 + rank % 2 + is_committed).all())
    assert is_committed or torch.equal(torch.rand(2), expected)
    assert manager.last_report is not None
    return is_right, new.step, manager.last_report.sources


def vote_on_different_steps(rank: int) -> None:
    """The middle ones are what they are on average; no state is offloaded."""
    step = 2 * rank + 4
    old = provider(1.0, step=step)
    manager, seen = tracking(old, timeout_s=60, enable_offload=True), weakref.ref(old)
    del old
    with pytest.raises(RestartError, match=f"step {step}: some rank commits another one"):
        manager.vote()
    assert manager.phase is Phase.GRADS_FINAL
    manager.maybe_offload_checkpoint()
    assert seen() is not None


def lose_in_turn(rank: int) -> list[Any]:
    vote_on_different_steps(rank)
    return [
        loaded_of_two_shards(rank, is_committed=False, lost=(0,), flipped=(1,)),
        loaded_of_two_shards(rank, is_committed=False, lost=(1, 3)),
        loaded_of_two_shards(rank, is_committed=True, failing=(0, 3)),
        loaded_of_two_shards(rank, is_committed=True, failing=(1, 3)),
    ]


@pytest.mark.multiprocess
def test_ranks_are_served_by_others_or_none_loads_and_all_know_why() -> None:
    found = run_processes(4, lose_in_turn)

    damaged, lost, unfinished, without = zip(*found, strict=True)
    assert damaged == ((True, 6, (2,)), (True, 6, (3,)), (True, 6, ()), (True, 6, ()))
    assert len(set(lost)) == len(set(without)) == 1
    assert "shard/1: no rank holds it at step 6" in lost[0]
    assert "ranks 1, 3: has no state" in lost[0]
    assert unfinished == ((True, 7, (2,)), (True, 7, ()), (True, 7, ()), (True, 7, (1,)))
    assert "rank 1: the state provider's apply_update raised MemoryError: in the mi" in without[0]
    assert "shard/1: no rank holds it at step 7" in without[0]


# A recovery that breaks off: what all ranks do then, and what they still know afterwards

SIZE, LOST, CULPRIT = 4, 1, 2
GLOO = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation"


class UnspeakableError(Exception):
    """Raises where it should say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


def committed(rank: int) -> CheckpointManager:
    """A manager whose rank has committed step 6, but for the one that is lost."""
    manager = tracking(state(1.0, step=6), Phase.COMMITTED, enable_checksum=True, timeout_s=60)
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


@pytest.mark.multiprocess
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
