"""A rank that is killed or stopped in the middle: the others raise in time, and nothing half
done is ever taken for a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject

from dist_ckpt_strategies.errors import (
    IncompleteCheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
)
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import at_random, differences, no_data, on_grid, state_of
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 5.0
"""Longer than a busy machine keeps a rank from its turn: who is late is named as who is lost."""

PROMPT_S = 60.0
"""The timeout, the look-up of who is missing, and a slow machine; gloo would wait twice as long."""


CUTS = [on_grid("regular", (8, 8), (2, 4)), at_random("boxes", (9, 9), 6)]


def state_with(rank: int) -> dict[str, Any]:
    objects = {"object": ShardedObject(f"object.{rank}", {"fine": rank}, (1,), (0,))}
    return state_of(rank, CUTS) | objects


def signal_when_writing(number: int, *, is_here: bool) -> AbstractContextManager[None]:
    """Within the block this process gets the signal when it writes its object: amid a save."""

    def strike(_: str, path: str) -> None:
        if is_here and "/object." in path:
            os.kill(os.getpid(), number)

    return before_calls(strike, ["open"])


def survive(rank: int, culprit: int, scratch: Path, action: Callable[[], Any]) -> Any:
    """The outcome of the action; once all survivors have theirs, the culprit is killed."""
    pid = scratch / "culprit"
    if rank == culprit:
        pid.write_text(str(os.getpid()))
    dist.barrier()
    found = outcome(action)
    (scratch / f"done.{rank}").touch()
    survivors = [other for other in range(4) if other != culprit]
    if rank == survivors[0]:
        deadline = time.monotonic() + 2 * PROMPT_S
        while time.monotonic() < deadline and not all(
            (scratch / f"done.{other}").exists() for other in survivors
        ):
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    return found


def lose_rank_in_save(rank: int, entry: Entry, culprit: int, number: int, scratch: Path) -> Any:
    prepare(TIMEOUT_S)
    state = state_with(rank)
    with signal_when_writing(number, is_here=rank == culprit):
        return survive(rank, culprit, scratch, partial(save, entry, state, scratch / "c"))


def require_survivors_raised(results: list[Any], culprit: int) -> list[Failure]:
    """The culprit is dead, and every other rank named it, in time."""
    assert isinstance(results[culprit], RankDiedError), results
    survivors = [result for rank, result in enumerate(results) if rank != culprit]
    for failure in survivors:
        assert isinstance(failure, Failure), results
        assert failure.is_ours, failure
        assert failure.is_megatrons, failure
        assert PeerError.__name__ in failure.kinds, failure
        assert failure.global_rank == culprit, failure
        assert failure.text.startswith(f"rank {culprit}: "), failure
        assert f"[{culprit}]" in failure.text, failure
        assert "save to " in failure.text, failure
        assert failure.seconds < PROMPT_S, failure
    return survivors


def look(rank: int, root: Path) -> dict[str, Any]:
    """What a new job finds, and whether it can save there."""
    prepare(60)
    seen = {
        entry.value: outcome(partial(load, entry, state_of(rank, CUTS, no_data), root))
        for entry in Entry
    }
    save(Entry.OURS, state_with(rank), root)
    loaded = load(Entry.OURS, state_of(rank, CUTS, no_data), root)
    seen["again"] = differences(rank, CUTS, loaded)
    seen["remains"] = [path.name for path in root.rglob(".*") if path.name != ".zarray"]
    seen["arrays"] = sorted(path.parent.name for path in root.rglob(".zarray"))
    return seen


def require_incomplete_and_replaceable(root: Path) -> None:
    for result in run_processes(4, look, root):
        assert isinstance(result, dict), result
        ours, theirs = result["ours"], result["megatron"]
        assert IncompleteCheckpointError.__name__ in ours.kinds, ours
        assert str(root) in ours.text
        assert "metadata.json" in ours.text
        assert "a save began" in ours.text, "what is there is not said"
        assert "is not a distributed checkpoint" in theirs.text
        assert result["again"] == []
        assert result["remains"] == []
        assert result["arrays"] == ["boxes", "regular"]


@pytest.mark.parametrize(
    ("entry", "culprit", "number"),
    [
        (Entry.OURS, 0, signal.SIGKILL),
        (Entry.OURS, 3, signal.SIGSTOP),
        (Entry.MEGATRON, 3, signal.SIGKILL),
        (Entry.MEGATRON, 0, signal.SIGSTOP),
    ],
    ids=str,
)
def test_a_rank_lost_in_the_middle_of_a_save_is_named_by_the_others(
    entry: Entry, culprit: int, number: int, tmp_path: Path
) -> None:
    results = run_processes(4, lose_rank_in_save, entry, culprit, number, tmp_path)

    survivors = require_survivors_raised(results, culprit)
    late = [failure for failure in survivors if PeerTimeoutError.__name__ in failure.kinds]
    for failure in late:
        assert "did not reach this collective within 5 s" in failure.text
        assert "TimeoutError" in failure.kinds
    if number == signal.SIGSTOP:
        assert late
    else:
        assert any(PeerLostError.__name__ in failure.kinds for failure in survivors)
    require_incomplete_and_replaceable(tmp_path / "c")


def lose_rank_before(rank: int, action: str, culprit: int, number: int, scratch: Path) -> Any:
    """A rank that never calls save or load at all."""
    prepare(60)
    root = scratch / "c"
    save(Entry.OURS, state_of(rank, CUTS), root)
    prepare(TIMEOUT_S)
    calls: dict[str, Callable[[], Any]] = {
        "save": partial(save, Entry.OURS, state_of(rank, CUTS), scratch / "d"),
        "load": partial(load, Entry.OURS, state_of(rank, CUTS, no_data), root),
        "load through Megatron": partial(
            load,
            Entry.MEGATRON,
            state_of(rank, CUTS, no_data),
            root,
            validate_access_integrity=False,
        ),
    }

    def act() -> Any:
        if rank == culprit:
            os.kill(os.getpid(), number)
        return calls[action]()

    return survive(rank, culprit, scratch, act)


@pytest.mark.parametrize(
    ("action", "number"),
    [
        ("save", signal.SIGKILL),
        ("load", signal.SIGSTOP),
        ("load through Megatron", signal.SIGKILL),
    ],
    ids=str,
)
def test_a_rank_that_never_comes_is_named_by_the_others(
    action: str, number: int, tmp_path: Path
) -> None:
    results = run_processes(4, lose_rank_before, action, 1, number, tmp_path)

    for rank, failure in enumerate(results):
        if rank == 1:
            assert isinstance(failure, RankDiedError)
            continue
        assert isinstance(failure, Failure), failure
        assert failure.is_megatrons
        assert PeerError.__name__ in failure.kinds
        assert failure.global_rank == 1, failure
        assert action.partition(" ")[0] in failure.text
        assert str(tmp_path) in failure.text
        assert failure.seconds < PROMPT_S


def stop_host_of_store(rank: int, scratch: Path) -> Any:
    """As without a launcher: rank 0 hosts the key-value store, and rank 0 is what stops."""
    prepare(TIMEOUT_S)
    port = scratch / "port"
    dist.barrier()
    dist.destroy_process_group()
    limit = timedelta(seconds=100)
    store: Any
    make: Any = vars(dist)["TCPStore"]
    if rank == 0:
        store = make("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False, timeout=limit)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = make("127.0.0.1", int(port.read_text()), 4, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
    with signal_when_writing(signal.SIGSTOP, is_here=rank == 0):
        return survive(rank, 0, scratch, partial(save, Entry.OURS, state_with(rank), scratch / "c"))


def test_a_stopped_rank_that_hosts_the_key_value_store_does_not_hang_the_others(
    tmp_path: Path,
) -> None:
    stopped, *others = run_processes(4, stop_host_of_store, tmp_path)

    assert isinstance(stopped, RankDiedError)
    for failure in others:
        assert isinstance(failure, Failure), failure
        assert PeerError.__name__ in failure.kinds
        assert "perhaps rank 0" in failure.text, failure
        assert failure.seconds < PROMPT_S
    assert not (tmp_path / "c" / "metadata.json").exists()


class Slow:
    """An object that takes its time to be pickled."""

    def __reduce__(self) -> Any:
        time.sleep(2.0)
        return (OrderedDict, ())


def save_slowly(rank: int, root: Path) -> Any:
    prepare(60)
    state: dict[str, Any] = state_of(rank, CUTS)
    state["object"] = ShardedObject(f"object.{rank}", Slow() if rank == 3 else "", (1,), (0,))
    save(Entry.OURS, state, root)
    wanted = {"object": ShardedObject(f"object.{rank}", None, (1,), (0,))}
    return load(Entry.OURS, wanted, root)["object"]


def test_a_rank_that_is_merely_slow_is_waited_for(tmp_path: Path) -> None:
    assert run_processes(4, save_slowly, tmp_path / "c") == ["", "", "", {}]


def save_after_failure(rank: int, culprit: int, scratch: Path) -> Any:
    """A rank that catches the error and tries again gets another error, at once or in time."""
    prepare(TIMEOUT_S)

    def twice() -> Any:
        first = outcome(partial(save, Entry.OURS, state_with(rank), scratch / "c"))
        second = outcome(partial(save, Entry.OURS, state_of(rank, CUTS), scratch / "d"))
        return first, second

    with signal_when_writing(signal.SIGSTOP, is_here=rank == culprit):
        return survive(rank, culprit, scratch, twice)


def test_a_second_save_over_a_broken_group_raises_too(tmp_path: Path) -> None:
    results = run_processes(4, save_after_failure, 3, tmp_path)

    for failures in results[:3]:
        assert isinstance(failures, tuple), failures
        for failure in failures:
            assert isinstance(failure, Failure), failure
            assert PeerError.__name__ in failure.kinds, failure
            assert failure.seconds < PROMPT_S
    assert not (tmp_path / "d").exists()
