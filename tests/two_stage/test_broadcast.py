"""Ranks that share the reading: what is read, how often, and what a failure does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.two_stage.broadcast import Target, run_group_plan
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions
from tests.support.memory_store import MemoryArrays
from tests.support.samples import random_values
from tests.support.thread_ranks import ThreadCommunicator, run_ranks

OPTIONS = Options(timeout_s=5)

Want = tuple[int, Region]
Fill = Callable[[Want], torch.Tensor]


@dataclass
class Group:
    """Some arrays, what each rank requests, and for each a store that counts its reads."""

    arrays: list[ArraySpec]
    wants: list[list[Want]]
    max_inflight_bytes: int = 512 << 20
    caches: Sequence[str | None] = ()
    stores: list[MemoryArrays] = field(init=False)

    def __post_init__(self) -> None:
        """Give every rank a store of its own, with the same content."""
        values = {array.key: random_values(array.shape, array.dtype) for array in self.arrays}
        self.stores = [MemoryArrays(dict(values)) for _ in self.wants]

    def plan(self) -> GroupPlan:
        """What the ranks do."""
        return build_group_plan(
            [encode_regions(regions) for regions in self.wants],
            self.arrays,
            self.caches or [None] * len(self.wants),
            max_inflight_bytes=self.max_inflight_bytes,
        )

    def load(
        self, comm: ThreadCommunicator, fill: Fill | None = None
    ) -> tuple[list[torch.Tensor], BroadcastReport]:
        """What one rank requests, loaded by all. Collective."""
        own, store = self.wants[comm.rank], self.stores[comm.rank]
        tensors = [(fill or self.empty)(want) for want in own]
        targets = [Target(*want, tensor) for want, tensor in zip(own, tensors, strict=True)]
        return tensors, run_group_plan(
            self.plan(), self.arrays, targets, lambda: store, comm, OPTIONS
        )

    def empty(self, want: Want) -> torch.Tensor:
        """A new tensor for a region."""
        dtype = getattr(torch, self.arrays[want[0]].dtype.value)
        return torch.zeros(want[1].shape, dtype=dtype)

    def expected(self, want: Want) -> Any:
        """The content of a region."""
        return self.stores[0].arrays[self.arrays[want[0]].key][want[1].slices()]

    def wrong(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[Want]:
        """The regions of a rank that did not arrive."""
        return [
            want
            for want, tensor in zip(self.wants[rank], tensors, strict=True)
            if host_view(tensor.cpu()).tobytes()
            != np.ascontiguousarray(self.expected(want)).tobytes()
        ]


def replicas(num_ranks: int, **options: Any) -> Group:
    """Every rank requests everything: a few megabytes, in matrices and many vectors."""
    shapes = [(700, 1000), (300, 999), *[(64, 50 + n) for n in range(20)], (5,), ()]
    arrays = [ArraySpec(f"w{n}", shape, DType.FLOAT32, shape) for n, shape in enumerate(shapes)]
    regions = [(n, Region.whole(array.shape)) for n, array in enumerate(arrays)]
    return Group(arrays, [list(regions) for _ in range(num_ranks)], **options)


class Watched(MemoryArrays):
    """A store whose reads are noted, when they begin and when they are done."""

    def __init__(self, inner: MemoryArrays, note: Callable[[str, set[Any]], None]) -> None:
        super().__init__(inner.arrays)
        self.note = note

    def begin_reads(self, reads: Sequence[Any]) -> Any:
        """See ArrayReader."""
        names = {(read.array.key, read.region) for read in reads}
        self.note("begun", names)
        transfer: Any = super().begin_reads(reads)
        transfer.act = partial(self._act, transfer.act, names)
        return transfer

    def _act(self, act: Callable[[], None], names: set[Any]) -> None:
        act()
        self.note("done", names)


def test_reads_from_the_page_cache_follow_the_readers_own() -> None:
    group = replicas(2, caches=["a", "a"], max_inflight_bytes=1 << 20)
    first: list[set[Any]] = [set(), set()]
    for batch in (batch for batches in group.plan().rounds for batch in batches):
        first[batch.reader] |= {(group.arrays[s.array].key, s.region) for s in batch.slices}
    done: set[Any] = set()
    early: list[Any] = []

    def note(rank: int, event: str, names: set[Any]) -> None:
        if event == "done":
            done.update(names)
        else:
            early.extend((names & first[1 - rank]) - done)

    group.stores = [Watched(s, partial(note, rank)) for rank, s in enumerate(group.stores)]
    run_ranks(2, group.load)

    assert early == []
    assert done == first[0] | first[1]


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
        return group.load(comm, lambda want: group.empty(want).to(lives))

    for rank, (tensors, _) in enumerate(run_ranks(num_ranks, load, device=device)):
        assert group.wrong(rank, tensors) == []
