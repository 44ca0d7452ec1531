"""What a rank cannot say, or has not the memory for, the others learn all the same."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import (
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PeerTimeoutError,
    SaveTimeoutError,
    StorageError,
)
from tests.comm.communicators import Carrier, over_gloo
from tests.faults.injection import TARGETS, failing_call


def says_what_is_no_json(comm: Communicator) -> list[Any]:
    seen: list[Any] = []
    try:
        run_and_gather(comm, lambda: {1, 2} if comm.rank == 2 else [comm.rank])
    except CheckpointError as error:
        seen = [isinstance(error, PeerError), str(error)]
    return [*seen, run_collectively(comm, lambda: comm.rank)]


@pytest.mark.multiprocess
def test_what_cannot_be_told_is_an_error_on_all_ranks_which_stay_in_step() -> None:
    text = "rank 2: TypeError: Object of type set is not JSON serializable"

    assert over_gloo(says_what_is_no_json)[:4] == [[r != 2, text, r] for r in range(4)]


def meets_an_error_of_a_file(comm: Communicator) -> None:
    def step() -> None:
        if comm.rank == 1:
            raise PermissionError(13, "Permission denied", "/ckpt/w/0.0")

    run_collectively(comm, step)


def test_what_the_system_says_of_a_file_is_a_storage_error_on_every_rank(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(meets_an_error_of_a_file)

    for rank, error in enumerate(results):
        assert isinstance(error, StorageError)
        assert isinstance(error, PermissionError) == (rank == 1)
        assert str(error) == "rank 1: PermissionError: /ckpt/w/0.0: Permission denied"
        assert (error.path, error.global_rank) == ("/ckpt/w/0.0", 1)


class FinalError(ValueError):
    """No class can be this and another."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("no class may be derived from this one")


def meets_an_odd_error(comm: Communicator) -> None:
    def step() -> None:
        if comm.rank == 1:
            raise FinalError("odd")

    run_collectively(comm, step)


def test_an_error_of_a_class_that_nothing_can_be_derived_from_is_ours_too(
    four_ranks: Carrier,
) -> None:
    results = four_ranks(meets_an_odd_error)

    assert {str(error) for error in results} == {"rank 1: FinalError: odd"}
    assert all(isinstance(error, CheckpointError) for error in results)
    assert not isinstance(results[1], PeerError)


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
def test_bytes_that_one_rank_has_no_room_for_are_an_error_on_all() -> None:
    everyone = [b"x", b"xx", b"xxx", b"xxxx"]

    found = over_gloo(has_no_memory_for_the_others)

    assert found == [["rank 1: MemoryError: injected", *everyone]] * 4
