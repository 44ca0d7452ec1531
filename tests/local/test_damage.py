"""Damaged files: the loaded state is the saved one, or all ranks say that there is none.

``benchmarks/damage.py`` does this to thousands of bytes, of two saves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoReplicasAvailableError,
)
from dist_ckpt_strategies.local.encoding import decode_shard, default_local_allowed, encode_state
from dist_ckpt_strategies.local.inventory import load_newest
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.shard_format import (
    MAGIC,
    LocalShard,
    LocalShardId,
    SaveId,
    footer_nbytes,
)
from dist_ckpt_strategies.local.transfer import run_replicate
from tests.local.clique_worlds import described, state_of, values_of
from tests.support.thread_ranks import run_ranks

NUM_RANKS = 4
NUM_CUTS = 5
ITERATION = 3

EXPECTED = [described(values_of(rank, ITERATION)) for rank in range(NUM_RANKS)]
"""What a load has to bring."""


@dataclass(frozen=True)
class Nodes:
    """A checkpoint of four ranks; 0 and 1 keep copies for each other, and so do 2 and 3."""

    root: Path
    num_nodes: int = NUM_RANKS

    def directory(self, rank: int) -> ShardDirectory:
        """The disk of a rank."""
        return ShardDirectory(self.root / f"node{rank % self.num_nodes}")

    def save_pair(self, first: int, comm: Communicator) -> None:
        """Write the files of one of two neighbours. Collective over them."""
        rank = first + comm.rank
        encoded = encode_state(
            state_of(rank, ITERATION),
            LocalShardId(SaveId(ITERATION, "a1"), rank),
            NUM_RANKS,
            "",
            default_local_allowed(),
        )

        run_replicate(
            comm, encoded,
            lambda shard: self.directory(rank).create(shard, rank), max_bucket_nbytes=1 << 20,
        )  # fmt: skip

    def load(self, comm: Communicator) -> Any:
        """What a rank loads, or why it does not. Collective."""
        directory = self.directory(comm.rank)
        try:
            (shard,) = load_newest(comm, directory, "", max_inflight_nbytes=1 << 20)
            state = decode_shard(shard, default_local_allowed())
        except CheckpointError as error:
            return error
        return described(state.state_dict)

    def files(self) -> list[Path]:
        """All files, sorted."""
        return sorted(path for path in self.root.rglob("*") if path.is_file())


def saved(root: Path, num_nodes: int) -> Nodes:
    found = Nodes(root, num_nodes)
    for first in (0, 2):
        run_ranks(2, partial(found.save_pair, first))
    return found


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    """The checkpoint, each rank on a node of its own; a test leaves its files as they were."""
    return saved(tmp_path_factory.mktemp("nodes"), NUM_RANKS)


def shortened(nbytes: int, content: bytes) -> bytes:
    return content[:nbytes]


def flipped(place: int, bit: int, content: bytes) -> bytes:
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


def loaded_with(nodes: Nodes, paths: Sequence[Path], damage: Callable[[bytes], bytes]) -> list[Any]:
    """What every rank loads while some files are damaged alike."""
    before = [path.read_bytes() for path in paths]
    for path, content in zip(paths, before, strict=True):
        path.write_bytes(damage(content))
    try:
        return run_ranks(NUM_RANKS, nodes.load)
    finally:
        for path, content in zip(paths, before, strict=True):
            path.write_bytes(content)


def test_the_files_as_they_are_bring_the_state(nodes: Nodes) -> None:
    assert len(nodes.files()) == 2 * NUM_RANKS
    assert run_ranks(NUM_RANKS, nodes.load) == EXPECTED


def require_noticed(found: Sequence[Any]) -> None:
    """Raise unless every rank says that no save is complete."""
    for error in found:
        assert isinstance(error, NoReplicasAvailableError), found


def test_a_file_that_ends_early_is_made_good_by_the_other_copy(nodes: Nodes) -> None:
    choice = random.Random(22)
    for number in range(NUM_CUTS):
        path = choice.choice(nodes.files())
        nbytes = choice.randrange(path.stat().st_size) if number else 0
        found = loaded_with(nodes, [path], partial(shortened, nbytes))
        assert found == EXPECTED, (path, nbytes)


def test_both_copies_that_end_early_are_noticed(nodes: Nodes) -> None:
    choice = random.Random(23)
    for number in range(NUM_CUTS):
        name = choice.choice(nodes.files()).name
        copies = [path for path in nodes.files() if path.name == name]
        size = copies[0].stat().st_size
        nbytes = choice.randrange(size) if number else size - 1
        require_noticed(loaded_with(nodes, copies, partial(shortened, nbytes)))


@pytest.mark.parametrize("damage", [partial(flipped, -1, 0), partial(shortened, 5000)])
def test_a_damaged_copy_is_made_good_by_another_one_on_the_same_disk(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    nodes = saved(tmp_path, 1)
    for path in nodes.files():
        assert loaded_with(nodes, [path], damage) == EXPECTED, path


def crafted(fields: Mapping[str, Any], content: bytes) -> bytes:
    """A whole file with other fields in its description, and the digest that it should have."""
    first = len(content) - footer_nbytes(content[-32:])
    new = json.dumps({**json.loads(content[first:-32]), **fields}).encode()
    size = len(new).to_bytes(8, "little")
    return content[:first] + new + xxhash.xxh3_128_digest(new + size) + size + MAGIC


def without_a_tensor(content: bytes) -> bytes:
    """A whole file whose description has one tensor less than the state in it."""
    first = len(content) - footer_nbytes(content[-32:])
    fields = json.loads(content[first:-32])
    some = {name: [*fields[name][:-2], fields[name][-1]] for name in ("buffers", "digests")}
    start = LocalShard.from_message(fields).byte_offsets[-1]
    cut = LocalShard.from_message(fields | some)
    description = content[start : start + cut.buffers[-1].nbytes]
    whole = content[: cut.byte_offsets[-1]] + description + content[first:]
    return crafted(some, whole)


def test_a_crafted_state_is_an_error_of_ours(nodes: Nodes) -> None:
    copies = [path for path in nodes.files() if "_0_local" in path.name]
    found = loaded_with(nodes, copies, without_a_tensor)

    assert isinstance(found[0], CorruptCheckpointError)
    assert found[1:] == EXPECTED[1:]


def restate(path: Path, world_size: int) -> Path:
    """A copy of a shard, kept by a rank that there is not, which states another world size."""
    other = path.parents[1] / "77" / path.name
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(crafted({"world_size": world_size}, path.read_bytes()))
    return other


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 1000])
def test_copies_that_state_another_world_size_are_not_of_the_save(
    world_size: int, tmp_path: Path
) -> None:
    nodes = saved(tmp_path, NUM_RANKS)
    for path in nodes.files():
        restate(path, world_size)
    assert run_ranks(NUM_RANKS, nodes.load) == EXPECTED
