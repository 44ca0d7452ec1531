"""One rank's failure is a failure everywhere, and says whose it was."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from dist_ckpt_strategies import errors
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively, run_on_first_rank
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    CoverageError,
    DuplicateWriterError,
    IncompleteCheckpointError,
    MissingDependencyError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ShapeMismatchError,
    StorageError,
    StrategyNotFoundError,
    UnsafeObjectError,
)
from tests.comm.communicators import Carrier, over_threads


def fails_on(comm: Communicator, ranks: list[int], kind: str) -> Any:
    def step() -> int:
        if comm.rank in ranks:
            cls = getattr(errors, kind)
            raise cls(f"w.{comm.rank}: broken", key=f"w.{comm.rank}", path=f"/ckpt/w.{comm.rank}/0")
        return comm.rank * 10

    return run_collectively(comm, step)


def steps_apart(comm: Communicator, *, fails: bool) -> Any:
    """The last rank is in another step than the others."""

    def step() -> None:
        if fails and comm.rank == comm.size - 1:
            raise StorageError("broken")

    return (
        run_collectively(comm, step)
        if comm.rank == comm.size - 1
        else run_and_gather(comm, lambda: 3)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_in_different_steps_find_out(fails: bool, four_ranks: Carrier) -> None:
    *others, last = four_ranks(partial(steps_apart, fails=fails))

    for error in others:
        assert isinstance(error, PeerLostError)
        assert "out of step" in str(error)
        assert error.global_rank == len(others)
    if fails:
        assert str(last) == f"rank {len(others)}: broken"
    else:
        assert isinstance(last, PeerLostError)
        assert last.global_rank == 0


def test_where_no_rank_fails_each_has_its_own_result(carrier: Carrier) -> None:
    results = carrier(fails_on, [], "StorageError")

    assert results == [rank * 10 for rank in range(len(results))]


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_on_one_rank_reaches_all_of_them(failing: int, four_ranks: Carrier) -> None:
    results = four_ranks(fails_on, [failing], "CorruptCheckpointError")

    for rank, error in enumerate(results):
        assert isinstance(error, CorruptCheckpointError)
        assert isinstance(error, PeerError) == (rank != failing)
        assert str(error) == f"rank {failing}: w.{failing}: broken"
        assert error.key == f"w.{failing}"
        assert error.path == f"/ckpt/w.{failing}/0"
        assert error.global_rank == failing


@pytest.mark.parametrize(
    "kind",
    [
        CheckpointError,
        CoverageError,
        DuplicateWriterError,
        ShapeMismatchError,
        StrategyNotFoundError,
        StorageError,
        ArrayNotFoundError,
        CheckpointNotFoundError,
        CheckpointExistsError,
        IncompleteCheckpointError,
        UnsafeObjectError,
        MissingDependencyError,
    ],
)
def test_a_handler_takes_the_same_branch_on_every_rank(kind: type[CheckpointError]) -> None:
    results = over_threads(fails_on, [2], kind.__name__)

    builtins = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    for error in results:
        assert isinstance(error, kind)
        assert all(isinstance(error, base) for base in builtins)
        assert str(error) == "rank 2: w.2: broken"


def test_where_several_fail_each_raises_its_own_and_the_others_the_first(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(fails_on, [1, 3], "StorageError")

    assert [str(error) for error in results] == [
        "rank 1: w.1: broken",
        "rank 1: w.1: broken",
        "rank 1: w.1: broken",
        "rank 3: w.3: broken",
    ]


def fails_with_an_error_of_somebody_else(comm: Communicator) -> None:
    def step() -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("by zero")

    run_collectively(comm, step)


def test_an_error_that_is_not_ours_is_raised_as_it_is_and_told_to_the_others(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(fails_with_an_error_of_somebody_else)

    assert isinstance(results[1], ZeroDivisionError)
    for rank in (0, 2, 3):
        assert isinstance(results[rank], PeerError)
        assert str(results[rank]) == "rank 1: ZeroDivisionError: by zero"


class FaceError(IncompleteCheckpointError):
    """A class that a face made of one of ours."""


def fails_with_a_class_made_elsewhere(comm: Communicator) -> None:
    def step() -> None:
        if comm.rank == 0:
            raise FaceError("gone", key="w")

    run_collectively(comm, step)


def test_a_class_derived_from_ours_is_its_nearest_of_ours_to_the_others() -> None:
    results = over_threads(fails_with_a_class_made_elsewhere)

    assert all(isinstance(error, IncompleteCheckpointError) for error in results)
    assert all(isinstance(error, PeerError) for error in results[1:])


def fails_with_odd_attributes(comm: Communicator) -> None:
    def step() -> None:
        if comm.rank == 1:
            from pathlib import Path  # noqa: PLC0415

            raise StorageError("odd \ud800", key="\udc80", path=Path("/a/b"))  # type: ignore[arg-type]

    run_collectively(comm, step)


def test_a_failure_that_cannot_be_told_as_it_is_does_not_leave_the_others_waiting(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(fails_with_odd_attributes)

    assert all(isinstance(error, StorageError) for error in results)
    assert all(error.path == "/a/b" for error in results if isinstance(error, PeerError))


def reports_what_a_peer_reported(comm: Communicator) -> None:
    """Ranks 2 and 3 agreed among themselves before; rank 3 had failed."""

    def step() -> None:
        if comm.rank == 2:
            raise errors.error_from_peer(3, "IncompleteCheckpointError", "gone", key="w")
        if comm.rank == 3:
            raise IncompleteCheckpointError("gone", key="w")

    run_collectively(comm, step)


def test_a_failure_that_a_rank_learnt_from_a_peer_keeps_class_and_rank(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(reports_what_a_peer_reported)

    assert all(isinstance(error, IncompleteCheckpointError) for error in results)
    assert {str(error) for error in results} == {"rank 3: gone"}


def goes_on_after_a_failure(comm: Communicator) -> list[Any]:
    seen: list[Any] = []
    for attempt in range(5):
        try:
            fails_on(comm, [attempt], "StorageError")
        except StorageError as error:
            seen.append(error.global_rank)
    seen.append(run_collectively(comm, lambda: comm.rank))
    return seen


def test_ranks_are_in_step_after_a_failure(four_ranks: Carrier) -> None:
    results = four_ranks(goes_on_after_a_failure)

    assert results == [[0, 1, 2, 3, rank] for rank in range(4)]


def gathers(comm: Communicator, failing: list[int]) -> list[Any]:
    def step() -> Any:
        if comm.rank in failing:
            raise StorageError("broken", key="w")
        return {"rank": comm.rank} if comm.rank else None

    return run_and_gather(comm, step)


def test_results_are_gathered_by_rank(carrier: Carrier) -> None:
    results = carrier(gathers, [])

    expected = [None] + [{"rank": rank} for rank in range(1, len(results))]
    assert all(found == expected for found in results)


def test_a_failure_while_gathering_reaches_all(four_ranks: Carrier) -> None:
    results = four_ranks(gathers, [2])

    assert all(isinstance(error, StorageError) for error in results)
    assert {str(error) for error in results} == {"rank 2: broken"}


def first_rank_only(comm: Communicator, fails: bool) -> list[int]:
    done: list[int] = []

    def step() -> None:
        done.append(comm.rank)
        if fails:
            raise StorageError("broken")

    run_on_first_rank(comm, step)
    return done


def test_a_step_of_the_first_rank_is_done_by_it_alone(carrier: Carrier) -> None:
    results = carrier(first_rank_only, False)  # noqa: FBT003

    assert results == [[0]] + [[]] * (len(results) - 1)


def test_a_failure_of_the_first_ranks_step_reaches_all(four_ranks: Carrier) -> None:
    results = four_ranks(first_rank_only, True)  # noqa: FBT003

    assert all(str(error) == "rank 0: broken" for error in results)


def steps_aside(comm: Communicator) -> str:
    """Its step meets the others too early, and nobody comes: its failure must not meet again."""
    if comm.rank == 3:
        return "away"
    started = time.monotonic()
    try:
        run_collectively(comm, lambda: comm.all_gather("early"))
    except PeerTimeoutError:
        return "in time" if time.monotonic() - started < 8.0 else "late"
    return "no error"


def test_after_a_timeout_within_a_step_no_rank_waits_a_second_time(four_ranks: Carrier) -> None:
    assert four_ranks(steps_aside, timeout_s=4.0) == ["in time"] * 3 + ["away"]


def interrupted(comm: Communicator) -> str:
    def step() -> None:
        raise KeyboardInterrupt

    try:
        run_collectively(comm, step)
    except KeyboardInterrupt:
        return "left at once"
    return "went on"


def test_an_interrupt_is_no_failure_to_agree_on() -> None:
    from dist_ckpt_strategies.comm.base import SoloCommunicator  # noqa: PLC0415

    assert interrupted(SoloCommunicator()) == "left at once"
