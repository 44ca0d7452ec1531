"""Shards on their way to who wants them: from files and memory, whole or reported as bad."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.plan import ExchangePlan, build_exchange_plan
from dist_ckpt_strategies.local.replicate import FilledShard, run_replicate
from dist_ckpt_strategies.local.retrieve import (
    FileSource,
    Retrieval,
    run_retrieve,
)
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.shard_format import LocalShardId
from tests.local.test_replicate import (
    SAVE,
    Flipping,
    Tensors,
    bytes_of,
    caught,
    mixed,
    noise,
    part_of,
)
from tests.support.leaks import open_files_below, threads_left
from tests.support.thread_ranks import run_ranks


@dataclass
class Disks:
    """The files of every rank, each with the shards that it keeps."""

    root: Path
    states: Sequence[Tensors]
    held: list[set[int]]
    message_nbytes: int = 4096
    paths: dict[tuple[int, int], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the files."""
        for rank, owners in enumerate(self.held):
            for owner in owners:
                self.paths[rank, owner] = self._write(rank, owner)

    def _write(self, rank: int, owner: int) -> Path:
        directory = ShardDirectory(self.root / f"node{rank}")

        tensors = self.states[owner]
        run_replicate(
            Communicator([rank]), FilledShard(part_of(owner, tensors), tuple(tensors)),
            lambda shard: directory.create(shard, rank), max_bucket_nbytes=1 << 20,
        )  # fmt: skip
        return directory.holder_directory(rank) / f"{LocalShardId(SAVE, owner)}.part"

    def plan(self, wanted: Mapping[int, Sequence[int]]) -> ExchangePlan:
        """Who gets what from whom."""
        available = {
            rank: [str(LocalShardId(SAVE, owner)) for owner in owners]
            for rank, owners in enumerate(self.held)
        }
        named = {
            rank: [str(LocalShardId(SAVE, o)) for o in wanted.get(rank, ())] for rank in available
        }
        return build_exchange_plan(available, named)

    def retrieve(self, comm: Communicator, plan: ExchangePlan) -> Retrieval:
        """Carry it out. Collective."""

        def open_source(shard_id: str) -> FileSource:
            return FileSource(shard_id, self.paths.get((comm.rank, owner_of(shard_id))))

        return run_retrieve(
            comm, lambda: plan, open_source, max_inflight_nbytes=self.message_nbytes
        )

    def run(self, wanted: Mapping[int, Sequence[int]]) -> list[Retrieval]:
        """Carry it out on all ranks."""
        plan = self.plan(wanted)
        return run_ranks(len(self.held), lambda comm: self.retrieve(comm, plan))

    def require_whole(self, found: Retrieval, owners: Sequence[int]) -> None:
        """Raise unless these shards are there, bit for bit, and no others."""
        assert set(found.shards) == {str(LocalShardId(SAVE, owner)) for owner in owners}
        for shard_id, retrieved in found.shards.items():
            tensors = self.states[owner_of(shard_id)]
            assert retrieved.shard == part_of(owner_of(shard_id), tensors)
            assert list(map(bytes_of, retrieved.payloads)) == list(map(bytes_of, tensors))
            assert [(t.dtype, t.shape) for t in retrieved.payloads] == [
                (t.dtype, t.shape) for t in tensors
            ]


def owner_of(shard_id: str) -> int:
    return LocalShardId.require(shard_id).global_rank


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("message_nbytes", [1 << 30, 4096, 77])
def test_parts_that_all_lie_at_the_next_rank_travel_in_a_circle(
    message_nbytes: int, tmp_path: Path
) -> None:
    disks = Disks(tmp_path, mixed(), [{2}, {0}, {1}], message_nbytes)
    results = disks.run({rank: [rank] for rank in range(3)})
    for rank, found in enumerate(results):
        disks.require_whole(found, [rank])
        assert found.bad == {}


def test_one_holder_serves_all(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [*mixed(), []], [set(), set(), {0, 1, 2, 3}, set()])
    for rank, found in enumerate(disks.run({rank: [rank] for rank in range(4)})):
        disks.require_whole(found, [rank])


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "emptied", "missing", "renamed", "pipe"]
)
@pytest.mark.parametrize("sender", [0, 1])
def test_a_bad_copy_is_reported_on_every_rank_and_not_returned(
    damage: str, sender: int, tmp_path: Path
) -> None:
    held: list[set[int]] = [set(), {0, 1}, {2}, set()]
    held[sender] |= {0}
    disks = Disks(tmp_path, [[noise(30_000, n)] for n in range(3)], held)
    path = disks.paths[sender, 0]
    if damage == "flipped":
        flip(path, 20_000)
    elif damage in {"truncated", "emptied"}:
        os.truncate(path, 20_000 if damage == "truncated" else 0)
    else:
        path.unlink()
    if damage == "renamed":
        path.write_bytes(disks.paths[1, 1].read_bytes())
    elif damage == "pipe":
        os.mkfifo(path)
    results = disks.run({0: [0], 1: [1], 2: [2], 3: [1]})

    for found, owners in zip(results, ([], [1], [2], [1]), strict=True):
        assert list(found.bad) == [(sender, str(LocalShardId(SAVE, 0)))]
        assert found.bad == results[0].bad
        disks.require_whole(found, owners)


def test_a_file_that_is_cut_while_it_is_read_is_reported(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [[noise(30_000)]], [{0}, set()])
    plan = disks.plan({0: [0], 1: [0]})

    def retrieve(comm: Communicator) -> Retrieval:
        def open_source(shard_id: str) -> FileSource:
            source = FileSource(shard_id, disks.paths[0, 0])
            os.truncate(disks.paths[0, 0], 20_000)
            return source

        return run_retrieve(comm, lambda: plan, open_source, max_inflight_nbytes=4096)

    for found in run_ranks(2, retrieve):
        assert [rank for rank, _ in found.bad] == [0]
        assert found.shards == {}


def test_every_bad_copy_is_reported_at_once(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [[noise(30_000, n)] for n in range(3)], [{1}, {2}, {0}])
    for path in disks.paths.values():
        flip(path, 20_000)
    for found in disks.run({rank: [rank] for rank in range(3)}):
        assert [(rank, owner_of(id_)) for rank, id_ in found.bad] == [(0, 1), (1, 2), (2, 0)]
        assert found.shards == {}


def test_a_rank_that_was_to_have_a_copy_and_has_none_is_reported(tmp_path: Path) -> None:
    disks = Disks(tmp_path, mixed(), [{0}, set()])
    plan = disks.plan({1: [0]})
    del disks.paths[0, 0]
    for found in run_ranks(2, lambda comm: disks.retrieve(comm, plan)):
        assert [rank for rank, _ in found.bad] == [0]
        assert ["has no copy" in reason for reason in found.bad.values()] == [True]


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_byte_that_changes_on_the_way_never_gets_in(number: int, tmp_path: Path) -> None:
    disks = Disks(tmp_path, [[noise(30_000)]], [{0}, set(), set()])
    plan = disks.plan({1: [0], 2: [0]})

    def retrieve(comm: Any) -> Any:
        carrier = comm
        if comm.rank == 2:
            carrier = Flipping(comm, from_rank=0, number=number, place=99)
        return disks.retrieve(carrier, plan)

    for found in run_ranks(3, retrieve):
        assert [rank for rank, _ in found.bad] == [0]
        assert found.shards == {}


def test_a_source_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    disks = Disks(tmp_path, mixed(), [{0}, set()])
    plan = disks.plan({1: [0]})

    def open_source(shard_id: str) -> FileSource:
        raise PlanError(f"{shard_id}: nothing of that name")

    seen = run_ranks(
        2,
        lambda c: caught(
            lambda: run_retrieve(c, lambda: plan, open_source, max_inflight_nbytes=99)
        ),
    )
    assert all(isinstance(error, PlanError) for error in seen), seen


def test_no_thread_and_no_open_file_is_left(tmp_path: Path) -> None:
    disks = Disks(tmp_path, mixed(), [{0, 1, 2}, set(), set()])
    before = threading.enumerate()
    disks.run({rank: [rank] for rank in range(3)})

    assert threads_left(before) == []
    assert open_files_below(tmp_path) == []
