"""One rank's failure is a failure everywhere, and says whose it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies import errors
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import (
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
    run_on_first_rank,
)
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
    SaveTimeoutError,
    ShapeMismatchError,
    StorageError,
    StrategyNotFoundError,
    UnsafeObjectError,
)
from tests.comm.communicators import Carrier, over_gloo, over_threads
from tests.faults.injection import TARGETS, failing_call


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

    if fails:
        assert str(last) == f"rank {len(others)}: broken"
        assert all(isinstance(error, StorageError) for error in others)
        return
    for found, blamed in [(last, 0), *((error, len(others)) for error in others)]:
        assert isinstance(found, PeerLostError)
        assert "out of step" in str(found)
        assert found.global_rank == blamed


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


def raises(comm: Communicator, made: dict[int, Callable[[], BaseException]]) -> None:
    """A step that raises what is made for the rank."""

    def step() -> None:
        if comm.rank in made:
            error = made[comm.rank]()
            raise error

    run_collectively(comm, step)


def test_an_error_that_is_not_ours_is_raised_as_it_is_and_told_to_the_others(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(raises, {1: partial(ZeroDivisionError, "by zero")})

    assert isinstance(results[1], ZeroDivisionError)
    for rank in (0, 2, 3):
        assert isinstance(results[rank], PeerError)
        assert str(results[rank]) == "rank 1: ZeroDivisionError: by zero"


class FaceError(IncompleteCheckpointError):
    """A class that a face made of one of ours."""


def test_a_class_derived_from_ours_is_its_nearest_of_ours_to_the_others() -> None:
    results = over_threads(raises, {0: partial(FaceError, "gone", key="w")})

    assert all(isinstance(error, IncompleteCheckpointError) for error in results)
    assert all(isinstance(error, PeerError) for error in results[1:])


def test_a_failure_that_cannot_be_told_as_it_is_does_not_leave_the_others_waiting(
    four_ranks: Carrier,
) -> None:
    odd = partial(StorageError, "odd \ud800", key="\udc80", path=Path("/a/b"))  # type: ignore[arg-type]
    results = four_ranks(raises, {1: odd})

    assert all(isinstance(error, StorageError) for error in results)
    assert all(error.path == "/a/b" for error in results if isinstance(error, PeerError))


def test_a_failure_that_a_rank_learnt_from_a_peer_keeps_class_and_rank(
    four_ranks: Carrier,
) -> None:
    reported = partial(errors.error_from_peer, 3, "IncompleteCheckpointError", "gone", key="w")
    own = partial(IncompleteCheckpointError, "gone", key="w")
    results = four_ranks(raises, {2: reported, 3: own})

    assert all(isinstance(error, IncompleteCheckpointError) for error in results)
    assert {str(error) for error in results} == {"rank 3: gone"}


def gathers(comm: Communicator) -> list[Any]:
    return run_and_gather(comm, lambda: {"rank": comm.rank} if comm.rank else None)


def test_results_are_gathered_by_rank(carrier: Carrier) -> None:
    results = carrier(gathers)

    expected = [None] + [{"rank": rank} for rank in range(1, len(results))]
    assert all(found == expected for found in results)


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


def test_an_interrupt_is_not_reported_as_a_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        raises(Communicator(), {0: KeyboardInterrupt})


# What a rank cannot say, or has not the memory for, the others learn all the same


def says_what_is_no_json(comm: Communicator) -> list[Any]:
    seen: list[Any] = []
    try:
        run_and_gather(comm, lambda: {1, 2} if comm.rank == 2 else [comm.rank])
    except CheckpointError as error:
        seen = [isinstance(error, PeerError), str(error)]
    return [*seen, run_collectively(comm, lambda: comm.rank)]


@pytest.mark.multiprocess
def test_what_cannot_be_sent_is_an_error_on_all_ranks_which_stay_in_step() -> None:
    text = "rank 2: TypeError: Object of type set is not JSON serializable"

    assert over_gloo(says_what_is_no_json)[:4] == [[r != 2, text, r] for r in range(4)]


def test_what_the_system_says_of_a_file_is_a_storage_error_on_every_rank(
    four_ranks: Carrier,
) -> None:
    denied = partial(PermissionError, 13, "Permission denied", "/ckpt/w/0.0")
    results = four_ranks(raises, {1: denied})

    for rank, error in enumerate(results):
        assert isinstance(error, StorageError)
        assert isinstance(error, PermissionError) == (rank == 1)
        assert str(error) == "rank 1: PermissionError: /ckpt/w/0.0: Permission denied"
        assert (error.path, error.global_rank) == ("/ckpt/w/0.0", 1)


def waits_too_long_for_a_save(comm: Communicator) -> list[Any]:
    def step() -> None:
        if comm.rank == 3:
            raise SaveTimeoutError(None, "the save is not done after 5 s")

    with pytest.raises(PeerTimeoutError, match="rank 3: the save is not done") as caught:
        run_collectively(comm, step)
    return [type(caught.value).__name__, run_collectively(comm, lambda: comm.rank)]


def test_after_a_save_that_takes_too_long_ranks_are_in_step(four_ranks: Carrier) -> None:
    assert four_ranks(waits_too_long_for_a_save) == [["SaveTimeoutError", n] for n in range(4)]


def has_no_memory_for_the_others(comm: Communicator) -> list[Any]:
    content = b"x" * (comm.rank + 1)
    seen: list[Any] = []
    try:
        if comm.rank == 1:
            with failing_call(TARGETS["np.frombuffer"], 1):
                run_and_gather_bytes(comm, lambda: content)
        else:
            run_and_gather_bytes(comm, lambda: content)
    except CheckpointError as error:
        seen.append(str(error))
    return [*seen, *run_and_gather_bytes(comm, lambda: content)]


@pytest.mark.multiprocess
def test_bytes_that_one_rank_has_no_memory_for_are_an_error_on_all() -> None:
    everyone = [b"x", b"xx", b"xxx", b"xxxx"]

    found = over_gloo(has_no_memory_for_the_others)

    assert found == [["rank 1: MemoryError: injected", *everyone]] * 4
