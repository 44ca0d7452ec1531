"""The rules of the process group that plays NCCL: breaking one is an error that names it."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.entries import Failure, outcome
from tests.support.nccl_rules import WATCHDOG_EXIT, NcclRules, join_nccl
from tests.support.played_cuda import GARBAGE, Stream
from tests.support.ranks import RankDiedError, run_processes

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is NCCL itself"),
]


def tensor(number: float = 1.0, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number), device="cuda")


def synchronize(*works: Any) -> None:
    for work in works:
        work.wait()
    torch.cuda.synchronize()


def on_rank(rank: int, program: Callable[[int], Any], stuck_s: float, separate_queues: bool) -> Any:
    NcclRules.stuck_s = stuck_s
    join_nccl(separate_queues=separate_queues)
    return outcome(lambda: program(rank))


def run(
    program: Callable[[int], Any],
    size: int = 2,
    stuck_s: float = NcclRules.stuck_s,
    *,
    separate_queues: bool = False,
) -> list[Any]:
    return run_processes(size, on_rank, program, stuck_s, separate_queues, timeout_s=40.0)


def other_order(rank: int) -> None:
    work: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(tensor(), async_op=True),
        lambda: dist.all_gather([tensor(), tensor()], tensor(), async_op=True),
    ]
    synchronize(*(each() for each in (work if rank else work[::-1])))


def read_before_wait(rank: int) -> None:
    found = [tensor(), tensor()]
    dist.all_gather(found, tensor(rank), async_op=True)
    found[0].cpu()


def overwrite_before_wait(rank: int) -> None:
    mine = tensor(rank)
    dist.all_gather([tensor(), tensor()], mine, async_op=True)
    mine.zero_()


def cpu_tensor(_rank: int) -> None:
    dist.all_reduce(torch.ones(4))


def both_send_first(rank: int) -> None:
    works = [dist.isend(tensor(), 1 - rank), dist.irecv(tensor(), 1 - rank)]
    synchronize(*works)


def first_use_by_a_subset(rank: int) -> None:
    if rank < 2:
        operation = dist.irecv if rank else dist.isend
        synchronize(*dist.batch_isend_irecv([dist.P2POp(operation, tensor(), 1 - rank)]))


def crossed_queues(rank: int) -> None:
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.all_reduce(tensor(), group=group)
    torch.cuda.synchronize()
    works = [dist.all_reduce(tensor(), group=g, async_op=True) for g in groups[:: 1 - 2 * rank]]
    synchronize(*works)


def aborts_one_by_one(rank: int) -> None:
    """Each rank's works wait for the other; the first to be aborted is behind another."""
    groups: list[Any] = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.barrier(group=group)
    works = [dist.all_reduce(tensor(), group=g, async_op=True) for g in groups[:: 1 - 2 * rank]]
    for group in groups[:: 2 * rank - 1]:
        group._get_backend(torch.device("cuda")).abort()
    synchronize(*works)


@pytest.mark.parametrize(
    ("rule", "program", "size"),
    [
        ("one order per communicator", other_order, 2),
        ("results are there after a wait", read_before_wait, 2),
        ("results are there after a wait", overwrite_before_wait, 2),
        ("CPU tensors are refused", cpu_tensor, 2),
        ("a queue is done in order", both_send_first, 2),
        ("communicators are made by all members at first use", first_use_by_a_subset, 3),
        ("a queue is done in order", crossed_queues, 2),
        ("communicators are aborted together", aborts_one_by_one, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_breaking_a_rule_is_an_error_that_names_the_rule(
    rule: str, program: Callable[[int], None], size: int
) -> None:
    waits = program in {both_send_first, first_use_by_a_subset, crossed_queues, aborts_one_by_one}
    stuck_s = 2.5 if waits else NcclRules.stuck_s
    for found in run(program, size, stuck_s)[:2]:
        assert isinstance(found, Failure), found
        assert found.text.startswith(rule), found


def test_communicators_with_queues_of_their_own_may_cross() -> None:
    assert run(crossed_queues, separate_queues=True) == [None, None]


def late_copy(_rank: int) -> Any:
    host, stream = torch.zeros(4), Stream()
    found: Any = stream
    with torch.cuda.stream(found):
        host.copy_(tensor(3.0), non_blocking=True)
    before = host.view(torch.uint8)[0].item()
    stream.synchronize()
    return before, host[0].item()


def test_a_copy_on_a_stream_has_landed_once_the_host_has_waited() -> None:
    assert run(late_copy) == [(GARBAGE, 3.0)] * 2


def abort(rank: int) -> Any:
    dist.barrier()
    if rank:
        return None
    mine, found = tensor(3), [tensor(), tensor()]
    works = [dist.all_reduce(mine, async_op=True), dist.all_gather(found, tensor(), async_op=True)]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    backend.abort()
    synchronize(*works)
    later = outcome(lambda: dist.all_reduce(mine))
    return mine.tolist(), found[1].view(torch.uint8)[0].item(), later


def test_abort_ends_pending_works_without_an_error_and_with_garbage() -> None:
    (reduced, received, later), _ = run(abort)

    assert reduced == [3.0] * 4
    assert received == GARBAGE
    assert "DistBackendError" in later.kinds


def abort_before_its_first_use(_rank: int) -> Any:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    backend.abort()
    mine = tensor(3)
    dist.all_reduce(mine)
    return mine.tolist()


def test_an_abort_leaves_a_group_usable_that_has_no_communicator_yet() -> None:
    assert run(abort_before_its_first_use) == [[6.0] * 4] * 2


def lose_a_peer(rank: int, how: str, handling: str) -> Any:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = handling
    join_nccl()
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=3))
    dist.barrier(group=group)
    if rank and how == "dies":
        os._exit(9)
    if rank:
        return None
    return outcome(lambda: synchronize(dist.all_reduce(tensor(), group=group, async_op=True)))


@pytest.mark.parametrize(("how", "handling"), [("dies", "3"), ("dies", "0"), ("hangs", "3")])
def test_the_watchdog_ends_the_survivors_of_a_rank(how: str, handling: str) -> None:
    found, _ = run_processes(2, lose_a_peer, how, handling, timeout_s=40.0)

    if handling == "0":
        assert found.text.startswith("watchdog: rank 1 has died"), found
    else:
        assert isinstance(found, RankDiedError)
        assert found.exit_code == WATCHDOG_EXIT


def limited_wait(rank: int) -> Any:
    dist.barrier()
    if rank:
        return None
    work: Any = dist.all_reduce(tensor(), async_op=True)
    first = outcome(lambda: work.wait(timedelta(seconds=0.3)))
    return first, outcome(lambda: dist.all_reduce(tensor()))


def test_a_wait_with_a_limit_aborts_the_group() -> None:
    (first, later), _ = run(limited_wait)

    assert "timed out" in first.text
    assert "was aborted" in later.text
