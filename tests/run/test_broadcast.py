"""Ranks that share the reading: what is read, how often, and what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.comm.threads import ThreadCommunicator, run_ranks
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.errors import PeerError, PlanError, StorageError
from dist_ckpt_strategies.plan.broadcast import build_broadcast_plan
from dist_ckpt_strategies.run.broadcast import BoxTarget, run_broadcast
from dist_ckpt_strategies.run.report import BroadcastReport, GroupReport
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Region
from tests.support.leaks import threads_left
from tests.support.memory_store import MemoryArrays
from tests.support.samples import random_values

OPTIONS = Options(timeout_s=5)

Fill = Callable[[Box], torch.Tensor]


@dataclass
class Group:
    """Some arrays, what each rank wants of them, and for each a store that counts its reads."""

    arrays: list[ArraySpec]
    wants: list[list[Box]]
    max_inflight_bytes: int = 512 << 20
    stores: list[MemoryArrays] = field(init=False)

    def __post_init__(self) -> None:
        """Give every rank a store of its own, with the same content."""
        values = {array.key: random_values(array.shape, array.dtype) for array in self.arrays}
        self.stores = [MemoryArrays(dict(values)) for _ in self.wants]

    def load(
        self, comm: ThreadCommunicator, fill: Fill | None = None
    ) -> tuple[list[torch.Tensor], BroadcastReport]:
        """What one rank wants, loaded by all. Collective."""
        plan = build_broadcast_plan(
            [BoxTable.of(boxes) for boxes in self.wants],
            self.arrays,
            max_inflight_bytes=self.max_inflight_bytes,
        )
        tensors = [(fill or self.empty)(box) for box in self.wants[comm.rank]]
        targets = [
            BoxTarget(box, tensor)
            for box, tensor in zip(self.wants[comm.rank], tensors, strict=True)
        ]
        store = self.stores[comm.rank]
        return tensors, run_broadcast(plan, self.arrays, targets, store, comm, OPTIONS)

    def empty(self, box: Box) -> torch.Tensor:
        """A new tensor for a box."""
        dtype = getattr(torch, self.arrays[box.array].dtype.value)
        return torch.zeros(box.region.shape, dtype=dtype)

    def expected(self, box: Box) -> Any:
        """The content of a box."""
        return self.stores[0].arrays[self.arrays[box.array].key][box.region.slices()]

    def wrong(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[Box]:
        """The boxes of a rank that did not arrive."""
        return [
            box
            for box, tensor in zip(self.wants[rank], tensors, strict=True)
            if host_view(tensor.cpu()).tobytes()
            != np.ascontiguousarray(self.expected(box)).tobytes()
        ]

    def num_read(self, rank: int) -> int:
        """Bytes that a rank has asked of its store."""
        return sum(read.target.nbytes for reads in self.stores[rank].reads for read in reads)


def replicas(num_ranks: int, **options: Any) -> Group:
    """Every rank wants everything: a few megabytes, in matrices and many vectors."""
    shapes = [(700, 1000), (300, 999), *[(64, 50 + n) for n in range(20)], (5,), ()]
    arrays = [ArraySpec(f"w{n}", shape, DType.FLOAT32, shape) for n, shape in enumerate(shapes)]
    boxes = [Box(n, 4, Region.whole(array.shape)) for n, array in enumerate(arrays)]
    return Group(arrays, [list(boxes) for _ in range(num_ranks)], **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_each_byte_is_read_once_by_the_group_and_evenly(num_ranks: int) -> None:
    group = replicas(num_ranks)
    for rank, (tensors, report) in enumerate(run_ranks(num_ranks, group.load)):
        assert group.wrong(rank, tensors) == []
        assert report.read_nbytes == group.num_read(rank)
        assert report.filled_nbytes == sum(t.nbytes for t in tensors)
        assert report.read_nbytes + report.received_nbytes == sum(t.nbytes for t in tensors)
    read = [group.num_read(rank) for rank in range(num_ranks)]

    assert sum(read) == sum(array.nbytes for array in group.arrays)
    assert max(read) <= 1.1 * sum(read) / num_ranks


def test_what_one_rank_alone_wants_is_read_by_all_of_them() -> None:
    group = replicas(4)
    group.wants = [[], group.wants[1], [], []]
    results = run_ranks(4, group.load)

    assert group.wrong(1, results[1][0]) == []
    assert max(map(group.num_read, range(4))) <= 1.1 * results[1][1].received_nbytes / 3


def transposed(group: Group, box: Box) -> torch.Tensor:
    flipped = group.empty(Box(box.array, box.itemsize, box.region)).T
    return flipped.contiguous().T


def test_tensors_that_need_a_copy_get_one() -> None:
    group = replicas(2)
    group.wants = [[box for box in boxes if box.region.ndim == 2] for boxes in group.wants]
    results = run_ranks(2, lambda comm: group.load(comm, lambda box: transposed(group, box)))

    assert all(group.wrong(rank, tensors) == [] for rank, (tensors, _) in enumerate(results))


def test_the_same_box_wanted_twice_fills_two_tensors() -> None:
    group = replicas(2)
    group.wants = [[*boxes, *boxes] for boxes in group.wants]
    results = run_ranks(2, group.load)

    assert all(group.wrong(rank, tensors) == [] for rank, (tensors, _) in enumerate(results))
    assert sum(map(group.num_read, range(2))) == sum(array.nbytes for array in group.arrays)


def test_the_next_rounds_are_read_while_one_is_sent() -> None:
    group = replicas(2, max_inflight_bytes=1 << 20)
    run_ranks(2, group.load)
    for store in group.stores:
        events = [event for event in store.events if event.startswith("read")]
        begun = np.cumsum([1 if event == "read begun" else -1 for event in events])
        assert len(events) > 20
        assert begun.max() == 2
        assert begun[-1] == 0


@pytest.mark.parametrize("reader", [0, 3])
def test_a_failed_read_is_raised_on_every_rank_with_its_key(reader: int) -> None:
    group = replicas(4, max_inflight_bytes=1 << 20)
    group.stores[reader].fails.add("w0")
    seen = run_ranks(4, lambda comm: caught(lambda: group.load(comm)))
    for rank, error in enumerate(seen):
        assert isinstance(error, StorageError), seen
        assert error.key == "w0"
        assert error.global_rank == reader
        assert isinstance(error, PeerError) == (rank != reader)
    assert all(store.in_flight == [] for store in group.stores)


def test_a_target_that_cannot_be_filled_is_an_error_on_every_rank() -> None:
    group = replicas(2)

    def load(comm: ThreadCommunicator) -> Any:
        return caught(lambda: group.load(comm, too_small if comm.rank else None))

    def too_small(box: Box) -> torch.Tensor:
        return group.empty(box).reshape(-1)[:3]

    first, second = run_ranks(2, load)
    assert isinstance(first, PeerError)
    assert first.global_rank == 1
    assert isinstance(second, Exception)


def test_a_box_outside_its_array_is_refused_everywhere() -> None:
    group = replicas(2)
    group.wants[1][0] = Box(0, 4, Region((0, 0), (701, 1000)))
    seen = run_ranks(2, lambda comm: caught(lambda: group.load(comm)))

    assert all(isinstance(error, PlanError) and error.key == "w0" for error in seen)


def test_no_thread_is_left() -> None:
    before = threading.enumerate()
    run_ranks(4, replicas(4).load)

    assert threads_left(before) == []


def caught(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def test_a_summary_shows_the_largest_and_the_mean_of_each_figure() -> None:
    one = BroadcastReport(2, 150, 100, 50, 0.5, 0.25, 0.125, 0.0, 1.0)
    other = BroadcastReport(2, 350, 300, 50, 0.0, 0.25, 0.125, 0.0, 1.0)
    text = str(GroupReport((one, other)))

    assert text.startswith("2 ranks: ")
    assert "read_nbytes max 300 mean 200" in text
    assert "reading_s max 0.500 mean 0.250" in text
    assert "waiting for reads 0.500 s" in str(one)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("travels", ["cpu", "cuda"])
@pytest.mark.parametrize("lives", ["cpu", "cuda"])
def test_tensors_on_a_gpu_are_filled_over_the_host_and_directly(
    num_ranks: int, travels: str, lives: str
) -> None:
    group = replicas(num_ranks, max_inflight_bytes=2 << 20)
    device = torch.device(travels, 0) if travels == "cuda" else torch.device("cpu")

    def load(comm: ThreadCommunicator) -> Any:
        return group.load(comm, lambda box: group.empty(box).to(lives))

    for rank, (tensors, _) in enumerate(run_ranks(num_ranks, load, device=device)):
        assert group.wrong(rank, tensors) == []
