"""Shards of a clique, and from disks to who wants them: whole, reported as bad, or an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.core.report import ReplicationReport
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PeerError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.local.plan import ExchangePlan, build_exchange_plan
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardReader, ShardWriter
from dist_ckpt_strategies.local.shard_format import (
    BufferSpec,
    FilledShard,
    LocalShard,
    LocalShardId,
    SaveId,
)
from dist_ckpt_strategies.local.transfer import Retrieval, run_replicate, run_retrieve
from tests.support.leaks import open_files_below, threads_left
from tests.support.thread_ranks import run_ranks

SAVE = SaveId(7, "a1")

Tensors = Sequence[torch.Tensor]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def part_of(rank: int, tensors: Tensors, save: SaveId = SAVE) -> LocalShard:
    """A shard of these tensors."""
    buffers = tuple(
        BufferSpec(f"t{n}", DType(str(t.dtype).removeprefix("torch.")), tuple(t.shape))
        for n, t in enumerate(tensors)
    )
    return LocalShard(LocalShardId(save, rank), 4, "", "basic", buffers)


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


OpenWriter = Callable[[LocalShard], Any]


@dataclass
class Clique:
    """What each member saves, and the directory that its files end up in."""

    states: Sequence[Tensors]
    max_bucket_nbytes: int
    root: Path

    def directory(self, rank: int) -> ShardDirectory:
        """Where a member keeps its files."""
        return ShardDirectory(self.root / f"node{rank}")

    def writers(self, rank: int) -> OpenWriter:
        """Make the files of a member."""
        return lambda shard: self.directory(rank).create(shard, rank)

    def save(
        self, comm: Communicator, writers: OpenWriter | None = None, save: SaveId = SAVE
    ) -> ReplicationReport:
        """Replicate one member's state. Collective."""
        tensors = self.states[comm.rank]
        return run_replicate(
            comm,
            FilledShard(part_of(comm.rank, tensors, save), tuple(tensors)),
            writers or self.writers(comm.rank),
            max_bucket_nbytes=self.max_bucket_nbytes,
        )

    def files(self) -> list[str]:
        """All files of all members."""
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file())


def caught(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def require_all_raise(seen: Sequence[Exception | None], kind: type[Exception], rank: int) -> None:
    """Every rank raises that kind of error and names that rank."""
    for place, error in enumerate(seen):
        assert isinstance(error, kind), seen
        assert isinstance(error, CheckpointError)
        assert error.global_rank == rank
        assert isinstance(error, PeerError) == (place != rank)


def mixed() -> list[Tensors]:
    """States of unequal sizes: empty, of no dims, in no order, and of odd types."""
    base = noise(6 * 7 * 8 * 4, 1).view(torch.float32).reshape(6, 7, 8)
    numbers = noise(640, 2).view(torch.complex64)
    return [
        [base.permute(2, 0, 1), base[:, ::2], torch.empty(0, 5), torch.tensor(3.5)],
        [numbers.conj(), numbers.conj().imag, noise(300_000, 3), noise(1, 4).view(torch.bool)[:0]],
        [
            noise(50, 5).view(torch.bfloat16).expand(3, 25),
            torch.tensor([True, False]),
            noise(65_537),
        ],
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1 << 30, 4096, 501])
def test_every_member_has_a_file_of_every_shard(size: int, bucket: int, tmp_path: Path) -> None:
    clique = Clique(mixed()[:size], bucket, tmp_path)
    reports = run_ranks(size, clique.save)

    assert {report.num_shards for report in reports} == {size}
    assert sum(r.received_nbytes for r in reports) == (size - 1) * sum(
        r.own_nbytes for r in reports
    )
    for rank in range(size):
        for found in clique.directory(rank).find():
            tensors = clique.states[found.shard_id.global_rank]
            with ShardReader(found.path) as reader:
                for number, tensor in enumerate(tensors):
                    target = noise(tensor.numel() * tensor.element_size()).numpy()
                    reader.read(reader.shard.byte_offsets[number], target)
                    assert target.tobytes() == bytes_of(tensor)
    assert len(clique.files()) == size * size


@dataclass
class FailingWriter:
    """A writer whose disk is full from some point on."""

    inner: ShardWriter
    fails_at: str
    num_taken: int = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the other writer's."""
        return getattr(self.inner, name)

    def write(self, byte_offset: int, content: Bytes) -> None:
        """See ShardWriter."""
        self.num_taken += 1
        if self.fails_at == "take" and self.num_taken > 2:
            raise StorageError("no space left", key="t0", path="disk")
        self.inner.write(byte_offset, content)

    def finish(self, digests: Sequence[int]) -> None:
        """See ShardWriter."""
        if self.fails_at == "finish":
            raise StorageError("no space left", key="t0", path="disk")
        self.inner.finish(digests)


@pytest.mark.parametrize("fails_at", ["open", "take", "finish"])
@pytest.mark.parametrize(("member", "owner"), [(0, 0), (2, 1)])
def test_a_full_disk_is_raised_on_every_rank_and_leaves_no_part(
    fails_at: str, member: int, owner: int, tmp_path: Path
) -> None:
    clique = Clique([[noise(30_000, rank)] for rank in range(3)], 4096, tmp_path)

    def save(comm: Communicator) -> Exception | None:
        good = clique.writers(comm.rank)

        def open_writer(shard: LocalShard) -> Any:
            writer = good(shard)
            if comm.rank != member or shard.shard_id.global_rank != owner:
                return writer
            if fails_at == "open":
                writer.abandon()
                raise StorageError("no space left", key="t0", path="disk")
            return FailingWriter(writer, fails_at)

        return caught(lambda: clique.save(comm, open_writer))

    require_all_raise(run_ranks(3, save), StorageError, member)
    assert clique.files() == []


@dataclass
class Flipping:
    """A communicator over which one byte of what this rank receives is flipped."""

    inner: Communicator
    from_rank: int
    number: int
    place: int = 0
    num_received: int = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the other communicator's."""
        return getattr(self.inner, name)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self.inner.exchange(sends, receives)
        for receive in receives:
            if receive.from_rank != self.from_rank:
                continue
            if self.num_received == self.number:
                torch.as_tensor(receive.into)[self.place] ^= 0x10
            self.num_received += 1


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_byte_that_changes_on_the_way_is_noticed(number: int, tmp_path: Path) -> None:
    clique = Clique([[noise(30_000, rank)] for rank in range(3)], 8192, tmp_path)

    def save(comm: Any) -> Exception | None:
        carrier = comm
        if comm.rank == 2:
            carrier = Flipping(comm, from_rank=0, number=number, place=17)
        return caught(lambda: clique.save(carrier))

    seen = run_ranks(3, save)
    require_all_raise(seen, CorruptCheckpointError, 2)
    assert "rank 0 sent" in str(seen[1])
    assert clique.files() == []


def test_members_of_different_saves_are_refused_on_all(tmp_path: Path) -> None:
    clique = Clique([[noise(9000, rank)] for rank in range(3)], 4096, tmp_path)

    def save(comm: Communicator) -> Exception | None:
        other = SaveId(7, "b2") if comm.rank == 1 else SAVE
        return caught(lambda: clique.save(comm, save=other))

    seen = run_ranks(3, save)
    assert all(isinstance(error, PlanError) for error in seen), seen
    assert clique.files() == []


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

        own = {
            str(LocalShardId(SAVE, owner)): path
            for (rank, owner), path in self.paths.items()
            if rank == comm.rank
        }
        return run_retrieve(comm, plan, own, max_inflight_nbytes=self.message_nbytes)

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


def test_a_file_that_is_cut_while_it_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = Disks(tmp_path, [[noise(30_000)]], [{0}, set()])
    read = ShardReader.read

    def read_later(reader: ShardReader, byte_offset: int, target: Any) -> None:
        os.truncate(disks.paths[0, 0], 20_000)
        read(reader, byte_offset, target)

    monkeypatch.setattr(ShardReader, "read", read_later)
    for found in disks.run({0: [0], 1: [0]}):
        assert [rank for rank, _ in found.bad] == [0]
        assert found.shards == {}


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


def test_no_thread_and_no_open_file_is_left(tmp_path: Path) -> None:
    clique = Clique(mixed(), 4096, tmp_path / "clique")
    disks = Disks(tmp_path / "disks", mixed(), [{0, 1, 2}, set(), set()])
    before = threading.enumerate()
    run_ranks(3, clique.save)
    disks.run({rank: [rank] for rank in range(3)})

    assert threads_left(before) == []
    assert open_files_below(tmp_path) == []
