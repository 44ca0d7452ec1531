"""A rank that is killed or stopped in the middle: the others raise in time, and nothing half
done is ever taken for a checkpoint."""

import gc
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    IncompleteCheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
)
from dist_ckpt_strategies.megatron.types import StrategyAction
from dist_ckpt_strategies.strategies.registry import resolve
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.entries import (
    PACKS,
    ZARR,
    Entry,
    load,
    logged,
    outcome,
    prepare,
    require_failure,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ports import free_port
from tests.support.processes import until
from tests.support.ranks import RankDiedError, allow_torch_dist, run_processes
from tests.support.sharding import differences, no_data, on_grid, state_of
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 5.0
"""Longer than a busy machine keeps a rank from its turn: who is late is named as who is lost."""

PROMPT_S = 60.0
"""The timeout, the look-up of who is missing, and a slow machine; gloo would wait twice as long."""


CUTS = [on_grid("regular", (8, 8), (2, 4)), on_grid("regions", (9, 9), (3, 3))]


def state_with(rank: int) -> dict[str, Any]:
    objects = {"object": ShardedObject(f"object.{rank}", {"fine": rank}, (1,), (0,))}
    return state_of(rank, CUTS) | objects


def signal_when_writing(number: int, *, is_here: bool) -> AbstractContextManager[None]:
    """Within the block this process gets the signal when it writes its object: amid a save."""

    def strike(_: str, path: str) -> None:
        if is_here and ("/object." in path or "/packs/" in path):
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
    if rank == min({0, 1, 2, 3} - {culprit}):
        until(lambda: len(list(scratch.glob("done.*"))) >= 3, 2 * PROMPT_S)
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    return found


def lose_rank_in_save(
    rank: int, entry: Entry, backend: Any, culprit: int, number: int, scratch: Path
) -> Any:
    """The save fails on the others, and so do a save and a load after it."""
    state = state_of(rank, CUTS)
    two_stage = TwoStageDataParallelLoadShardedStrategy(None, timeout_s=TIMEOUT_S)
    prepare(60, default=backend)
    save(Entry.OURS, state, scratch / "good")
    two_stage.maybe_init_gloo_group()
    prepare(TIMEOUT_S)
    calls = (
        partial(save, entry, state_with(rank), scratch / "c"),
        partial(save, Entry.OURS, state, scratch / "d"),
        partial(two_stage.load, state, scratch / "good"),
    )
    with signal_when_writing(number, is_here=rank == culprit):
        return survive(rank, culprit, scratch, lambda: [outcome(call) for call in calls])


def require_incomplete_and_replaceable(rank: int, root: Path) -> None:
    """A new job finds no checkpoint, and can save there."""
    ours = partial(load, Entry.OURS, state_of(rank, CUTS, no_data), root)
    found = require_refused(ours, IncompleteCheckpointError, str(root), "metadata.json")
    assert "a save began" in found.text, "what is there is not said"
    theirs = outcome(partial(load, Entry.MEGATRON, state_of(rank, CUTS, no_data), root))
    assert "is not a distributed checkpoint" in theirs.text
    save(Entry.OURS, state_with(rank), root)
    loaded = load(Entry.OURS, state_of(rank, CUTS, no_data), root)
    assert differences(rank, CUTS, loaded) == []
    names = {path.name for path in root.rglob(".*") if path.is_file() and path.stat().st_size}
    assert not names - {".zarray"}


@pytest.mark.parametrize(
    ("entry", "backend", "culprit", "number"),
    [
        (Entry.OURS, PACKS, 0, signal.SIGKILL),
        (Entry.MEGATRON, ZARR, 3, signal.SIGSTOP),
    ],
    ids=str,
)
def test_a_rank_lost_in_the_middle_of_a_save_is_named_by_the_others(
    entry: Entry, backend: Any, culprit: int, number: int, tmp_path: Path
) -> None:
    results = run_processes(4, lose_rank_in_save, entry, backend, culprit, number, tmp_path)

    assert isinstance(results.pop(culprit), RankDiedError), results
    for first, *later in results:
        require_failure(first, PeerError, f"[{culprit}]", "save to ", global_rank=culprit)
        assert first.text.startswith(f"rank {culprit}: "), first
        for failure in (first, *later):
            assert require_failure(failure, PeerError).seconds < PROMPT_S, failure
    assert not [*tmp_path.glob("[cd]/metadata.json"), *tmp_path.glob("[cd]/index")]
    late = [first for first, *_ in results if PeerTimeoutError.__name__ in first.kinds]
    for failure in late:
        assert "did not reach this collective within 5 s" in failure.text
        assert "TimeoutError" in failure.kinds
    if number == signal.SIGSTOP:
        assert late
    else:
        assert any(PeerLostError.__name__ in first.kinds for first, *_ in results)
    require_on_ranks(4, require_incomplete_and_replaceable, tmp_path / "c", default=backend)


def fail_in_a_foreign_load(rank: int, root: Path) -> Any:
    """Rank 1 lacks memory within Megatron-Core's wrapper, whose other ranks wait in a broadcast."""
    prepare(TIMEOUT_S)
    allow_torch_dist()
    texts = logged()

    def out_of_memory(*_: Any) -> None:
        raise MemoryError("out of memory")

    with cpu_stand_ins():
        save(
            Entry.OURS,
            state_of(rank, [on_grid("w", (8,), (2,))]),
            root,
            sharded_strategy=("torch_dist", 1),
        )
        base: Any = resolve(StrategyAction.LOAD_SHARDED, None, ("torch_dist", 1))
        if rank == 1:
            base.load = out_of_memory
        wrapped = FullyParallelLoadStrategyWrapper(base)
        try:
            load(
                Entry.OURS,
                state_of(rank, [on_grid("w", (8,), (2,))], no_data),
                root,
                sharded_strategy=wrapped,
            )
        except PeerError as error:
            found = [type(error).__name__, str(error), repr(error.__cause__), texts]
        if rank == 1:
            until(lambda: texts)
    dist.destroy_process_group()  # as when the error ends the process,
    gc.collect()  # which also ends what frames of the error hold
    return found


def test_what_failed_in_a_foreign_strategy_is_logged_and_chained(tmp_path: Path) -> None:
    (lost, text, *_), (late, _, cause, logged) = run_processes(
        2, fail_in_a_foreign_load, tmp_path / "c"
    )

    assert lost == "PeerLostError"
    assert late in {"PeerLostError", "PeerTimeoutError"}
    assert "rank 1 left by an error of its own: " in text
    for said in (text, cause, "".join(logged)):
        assert "out of memory" in said
    assert any(line.startswith("rank 1: ") and "out of memory" in line for line in logged)


def stop_host_of_store(rank: int, port: int, scratch: Path) -> Any:
    """As without a launcher: rank 0 hosts the key-value store, and rank 0 is what stops."""
    prepare(TIMEOUT_S)
    dist.barrier()
    dist.destroy_process_group()
    limit, address = timedelta(seconds=100), f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=4, timeout=limit)
    with signal_when_writing(signal.SIGSTOP, is_here=rank == 0):
        return survive(rank, 0, scratch, partial(save, Entry.OURS, state_with(rank), scratch / "c"))


def test_a_stopped_rank_that_hosts_the_key_value_store_does_not_hang_the_others(
    tmp_path: Path,
) -> None:
    stopped, *others = run_processes(4, stop_host_of_store, free_port(), tmp_path)

    assert isinstance(stopped, RankDiedError)
    for failure in others:
        assert require_failure(failure, PeerError, "perhaps rank 0").seconds < PROMPT_S, failure
    assert not (tmp_path / "c" / "metadata.json").exists()
