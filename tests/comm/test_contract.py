"""What every communicator does: one process alone, four threads, four processes of a gloo group."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt_strategies import errors
from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PeerError,
    PeerLostError,
    StorageError,
    StorageTimeoutError,
    error_from_peer,
)
from tests.faults.injection import TARGETS, failing_call
from tests.support.processes import until
from tests.support.ranks import done_by
from tests.support.thread_ranks import run_ranks

Check = Callable[[Communicator], None]

# Messages and bytes

MESSAGES: list[Any] = [
    None, True, 0, -(1 << 70), 2.5, "", "ü✓\ud800 \0", [], {},
    [None, [1, "a"], {"k": [2.5, None]}], "x" * 500, "x" * 501, "x" * 200_000,
]  # fmt: skip


def messages_of_every_json_type_arrive(comm: Communicator) -> None:
    """Those of 504 bytes, two of them brackets and two quotes, go beside the number."""
    for message, follows in product(MESSAGES, (False, True)):
        assert comm.all_gather(message, follows=follows) == [message] * comm.size


def messages_of_ranks_stay_in_their_place_and_step(comm: Communicator) -> None:
    """Silence is None; what one rank does to a message no other rank sees."""
    found = comm.all_gather("here" if comm.rank == comm.size - 1 else None)
    assert found == [None] * (comm.size - 1) + ["here"]
    mine = [comm.rank]
    for step in range(100):
        found = comm.all_gather([mine, step], follows=step % 2 == 1)
        assert found == [[[rank], step] for rank in range(comm.size)]
        if comm.size > 1:
            found[0][0].append("changed")


def pattern(source: int, to: int, number: int, size: int) -> Any:
    return np.random.default_rng([source, to, number]).integers(0, 256, size, np.uint8)


def bytes_go_both_ways_between_all_ranks(comm: Communicator) -> None:
    """Memory is the caller's again once an exchange is over."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for sizes in ([1], [7, 0, 100_000, 3], [8 << 20], []):
        parts = list(enumerate(sizes))
        sends = [(to, pattern(comm.rank, to, n, size)) for to in others for n, size in parts]
        receives = [(by, np.zeros(size, np.uint8)) for by in others for n, size in parts]
        comm.exchange(sends, receives)
        for _, data in sends:
            np.asarray(data)[...] = 9
        comm.all_gather(None)
        expected = [pattern(by, comm.rank, n, size) for by in others for n, size in parts]
        for (_, into), content in zip(receives, expected, strict=True):
            assert np.array_equal(into, content)


def ranks_without_a_part_in_an_exchange_take_part_all_the_same(comm: Communicator) -> None:
    into = np.zeros(3, np.uint8)
    sends = [(2, np.array([1, 2, 3], np.uint8))] if comm.rank == 1 and comm.size > 2 else []
    comm.exchange(sends, [(1, into)] if comm.rank == 2 else [])
    assert into.tolist() == ([1, 2, 3] if comm.rank == 2 else [0] * 3)


# Steps that all ranks do, of which one fails


def failing(comm: Communicator, made: Mapping[int, Callable[[], BaseException]]) -> Any:
    """What a step comes to in which some ranks raise."""

    def step() -> int:
        if comm.rank in made:
            error = made[comm.rank]()
            raise error
        return comm.rank * 10

    try:
        return run_collectively(comm, step)
    except Exception as error:  # noqa: BLE001 - the check looks at it
        found = error
    assert found.__cause__ is not found, "following its causes never comes to an end"
    return found


def at(rank: int, kind: type[CheckpointError] = StorageError) -> Callable[[], CheckpointError]:
    path = f"/ckpt/w.{rank}/0"
    return lambda: kind(f"w.{rank}: broken", key=f"w.{rank}", path=path)


def our_errors() -> Iterable[type[CheckpointError]]:
    """Those that say no more than a text, a key and a path."""
    for kind in vars(errors).values():
        is_ours = isinstance(kind, type) and issubclass(kind, CheckpointError)
        if is_ours and not issubclass(kind, PeerError):
            yield kind


def where_no_rank_fails_each_has_its_own_result(comm: Communicator) -> None:
    assert failing(comm, {}) == comm.rank * 10
    everyone = run_and_gather(comm, lambda: {"rank": comm.rank} if comm.rank else None)
    assert everyone == [None] + [{"rank": rank} for rank in range(1, comm.size)]


def a_failure_on_one_rank_reaches_all_of_them(comm: Communicator) -> None:
    for number, kind in enumerate(our_errors()):
        rank = number % comm.size
        error = failing(comm, {rank: at(rank, kind)})
        assert isinstance(error, kind)
        assert isinstance(error, PeerError) == (comm.rank != rank)
        for base in kind.__mro__:
            assert base.__module__ != "builtins" or isinstance(error, base)
        assert str(error) == f"rank {rank}: w.{rank}: broken"
        assert (error.key, error.path) == (f"w.{rank}", f"/ckpt/w.{rank}/0")
        assert error.global_rank == rank


def where_several_fail_each_raises_its_own_and_the_others_the_first(comm: Communicator) -> None:
    error = failing(comm, {rank: at(rank) for rank in (1, 3)})
    if comm.size > 1:
        blamed = 3 if comm.rank == 3 else 1
        assert str(error) == f"rank {blamed}: w.{blamed}: broken"


class FaceError(IncompleteCheckpointError):
    """A class made from one of ours."""


ODD: Any = {"key": "\udc80", "path": Path("/a/b")}
FILE = "/ckpt/w/0.0"
KINDS: list[tuple[dict[int, Callable[[], BaseException]], type[Exception], str, str | None]] = [
    ({1: partial(ZeroDivisionError, "by zero")}, PeerError, "ZeroDivisionError: by zero", None),
    ({0: partial(FaceError, "gone")}, IncompleteCheckpointError, "gone", None),
    ({1: partial(StorageError, "odd \ud800", **ODD)}, StorageError, "odd", "/a/b"),
    (
        {1: partial(PermissionError, 13, "denied", FILE)},
        StorageError,
        f"PermissionError: {FILE}: denied",
        FILE,
    ),
    (
        {
            2: partial(error_from_peer, 3, "IncompleteCheckpointError", "gone"),
            3: partial(IncompleteCheckpointError, "gone"),
        },
        IncompleteCheckpointError,
        "gone",
        None,
    ),
]
"""Who raises what, and what the other ranks raise: its class, text and path."""


def errors_of_all_kinds_are_reported_to_the_others_as_far_as_they_can_be(
    comm: Communicator,
) -> None:
    for raised, kind, text, path in KINDS if comm.size > 1 else ():
        error, own = failing(comm, raised), raised.get(comm.rank)
        assert isinstance(error, type(own()) if own else kind)
        assert own or not isinstance(error, PermissionError)
        if not isinstance(error, ZeroDivisionError):
            assert isinstance(error, CheckpointError)
            assert str(error).startswith(f"rank {max(raised)}: {text}")
            assert own or (error.path, error.global_rank) == (path, max(raised))
    assert failing(comm, {}) == comm.rank * 10  # in step


def a_step_of_the_first_rank_is_done_by_it_alone_and_fails_on_all(comm: Communicator) -> None:
    done: list[int] = []
    run_on_first_rank(comm, lambda: done.append(comm.rank))
    assert done == ([0] if comm.rank == 0 else [])

    def fail() -> None:
        raise StorageError("broken")

    with pytest.raises(StorageError, match="rank 0: broken"):
        run_on_first_rank(comm, fail)


def an_interrupt_is_no_failure_to_agree_on(comm: Communicator) -> None:
    if comm.size == 1:
        with pytest.raises(KeyboardInterrupt):
            failing(comm, {0: KeyboardInterrupt})


CHECKS: list[Check] = [
    messages_of_every_json_type_arrive,
    messages_of_ranks_stay_in_their_place_and_step,
    bytes_go_both_ways_between_all_ranks,
    ranks_without_a_part_in_an_exchange_take_part_all_the_same,
    where_no_rank_fails_each_has_its_own_result,
    a_failure_on_one_rank_reaches_all_of_them,
    where_several_fail_each_raises_its_own_and_the_others_the_first,
    errors_of_all_kinds_are_reported_to_the_others_as_far_as_they_can_be,
    a_step_of_the_first_rank_is_done_by_it_alone_and_fails_on_all,
    an_interrupt_is_no_failure_to_agree_on,
]


@pytest.mark.parametrize("check", CHECKS)
def test_one_process_alone(check: Check) -> None:
    check(Communicator())


@pytest.mark.parametrize("check", CHECKS)
def test_four_threads(check: Check) -> None:
    run_ranks(4, check, 60.0)


# What a rank logs of its own error


@pytest.mark.slow
def test_a_rank_logs_its_error_where_it_raises_another_or_waits_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def raise_on_rank_1(comm: Communicator, meanwhile: Callable[[], BaseException]) -> Any:
        found = failing(comm, {0: meanwhile, 1: partial(CorruptCheckpointError, "broken")})
        return found, found.__cause__

    first, second = run_ranks(2, partial(raise_on_rank_1, meanwhile=partial(StorageError, "full")))
    assert (str(first[0]), str(second[0])) == ("rank 0: full", "rank 1: broken")
    assert not caplog.messages

    silent = partial(StorageTimeoutError, "silent")
    _, (error, cause) = run_ranks(2, partial(raise_on_rank_1, meanwhile=silent))
    assert (str(error), str(cause)) == ("rank 0: silent", "rank 1: broken")
    (line,) = until(lambda: caplog.messages)
    assert line.startswith("rank 1: ")
    assert line.endswith("CorruptCheckpointError: broken")

    def wait_for_a_line() -> BaseException:
        until(lambda: len(caplog.messages) == 2)
        return StorageError("full")

    _, (error, _) = run_ranks(2, partial(raise_on_rank_1, meanwhile=wait_for_a_line))
    assert str(error) == "rank 1: broken"
    assert caplog.messages == [line] * 2


# What only separate processes can show


def what_cannot_be_reported_is_an_error_on_all_ranks_which_stay_in_step(comm: Communicator) -> None:
    with pytest.raises(CheckpointError) as caught:
        run_and_gather(comm, lambda: {1, 2} if comm.rank == 2 else [comm.rank])
    assert isinstance(caught.value, PeerError) == (comm.rank != 2)
    assert str(caught.value) == "rank 2: TypeError: Object of type set is not JSON serializable"


def bytes_that_one_rank_has_no_memory_for_are_an_error_on_all(comm: Communicator) -> None:
    content = b"x" * (comm.rank + 1)
    full = failing_call(TARGETS["np.frombuffer"], 1) if comm.rank == 1 else nullcontext()
    with pytest.raises(CheckpointError, match="rank 1: MemoryError: injected"), full:
        run_and_gather_bytes(comm, lambda: content)
    assert run_and_gather_bytes(comm, lambda: content) == [b"x", b"xx", b"xxx", b"xxxx"]


def apart(comm: Communicator, step: Callable[[], None]) -> None:
    """The last rank is in another step than the others."""
    if comm.rank == comm.size - 1:
        run_collectively(comm, step)
    else:
        run_and_gather(comm, lambda: 3)


def ranks_in_different_steps_find_out(comm: Communicator) -> None:
    """A failure is reported; without one nothing can be asked afterwards."""

    def fail() -> None:
        raise CorruptCheckpointError("broken")

    last = comm.size - 1
    with pytest.raises(CorruptCheckpointError, match=f"rank {last}: broken"):
        apart(comm, fail)
    with pytest.raises(PeerLostError, match="out of step") as caught:
        apart(comm, lambda: None)
    assert caught.value.global_rank == (0 if comm.rank == last else last)


def on_gloo_rank(_rank: int) -> None:
    comm = open_communicator(None, timeout_s=60.0, purpose="a test")
    for check in CHECKS:
        check(comm)
    what_cannot_be_reported_is_an_error_on_all_ranks_which_stay_in_step(comm)
    bytes_that_one_rank_has_no_memory_for_are_an_error_on_all(comm)
    ranks_in_different_steps_find_out(comm)


@pytest.mark.multiprocess
def test_four_processes() -> None:
    done_by(4, on_gloo_rank)
