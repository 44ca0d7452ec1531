"""Packs: any shards are laid out, written and read, and no changed or missing byte goes unseen."""

import random
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, ShardId, ShardSpec
from dist_ckpt_strategies.core.blocks import padded
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    CoverageError,
    IncompatibleVersionError,
    PlanError,
)
from dist_ckpt_strategies.formats import pack
from dist_ckpt_strategies.formats.issues import Problem
from dist_ckpt_strategies.formats.pack import (
    MAX_BLOCKS,
    UNVERIFIED,
    PackLayout,
    PackLimits,
    lay_out,
)
from dist_ckpt_strategies.formats.pack_header import parse_header, verify_pack
from dist_ckpt_strategies.formats.pack_read import BlockReads, read_jobs
from dist_ckpt_strategies.formats.pack_write import PackRecord, file_of, write_pack
from dist_ckpt_strategies.storage.io_pool import Transfer
from tests.support.packs import MemoryPlace, small_ranges
from tests.support.sharding import at_random

DTYPES = [*DType]
COMMON = b"the common state"


def shards_of(seed: int, num_arrays: int = 5, max_size: int = 9) -> list[ShardSpec]:
    """All blocks of arrays of random shapes and dtypes, cut in random boxes."""
    chance = random.Random(seed)
    shards = []
    for number in range(num_arrays):
        shape = tuple(
            chance.randint(0 if chance.random() < 0.1 else 1, max_size)
            for _ in range(chance.randint(0, 4))
        )
        dtype, key = chance.choice(DTYPES), f"a{number}"
        cut = at_random(key, shape, chance.randint(1, 6), seed=chance.randrange(99))
        for part in cut.parts:
            shard = ShardId(key, Region(part.offset, part.shape))
            shards.append(ShardSpec(shard, shape, dtype))
    return shards


def objects_of(seed: int) -> list[tuple[ObjectId, bytes]]:
    chance = random.Random(seed)
    return [
        (ObjectId(f"o{n}", (at,), (3,)), chance.randbytes(chance.randrange(200)))
        for n in range(chance.randrange(3))
        for at in range(3)
    ]


def content_of(shard: ShardSpec) -> Any:
    """The elements of a shard: random bytes."""
    chance = np.random.default_rng(zlib.crc32(str(shard.id).encode()))
    content = chance.integers(0, 2 if shard.dtype is DType.BOOL else 256, shard.nbytes, np.uint8)
    return content.view(shard.dtype.numpy).reshape(shard.region.shape)


class Written:
    """Packs in memory, and what they hold."""

    def __init__(self, seed: int, limits: PackLimits | None = None) -> None:
        self.shards, self.objects = shards_of(seed), objects_of(seed)
        sizes = [(name, len(content)) for name, content in self.objects]
        self.laid_out = self.shards, sizes, len(COMMON)
        self.layout = lay_out(*self.laid_out, rank=3, limits=limits or PackLimits())
        self.place: Any = MemoryPlace({})
        arrays = [content_of(shard).reshape(-1).view(np.uint8) for shard in self.shards]
        others = [*(content for _, content in self.objects), COMMON]
        self.contents = [*arrays, *(np.frombuffer(content, np.uint8) for content in others)]
        self.records = [self.write(pack, n) for n, pack in enumerate(self.layout.packs)]

    def write(self, pack: PackLayout, number: int) -> PackRecord:
        batches = [[self.contents[n]] for n in pack.sources if n >= 0]
        name = f"{number:016x}"
        return write_pack(self.place, name, pack, batches, save_id="s", rank=3, num_packs=7)[0]

    def read_all(self, boxes: dict[ShardId, Region] | None = None, *, verify: bool = True) -> None:
        """Read all blocks, or boxes of them, and compare them with what was written."""
        stored = {shard.id: content_of(shard) for shard in self.shards}
        table, width = self.layout.table, self.layout.table.origin.shape[1]
        keys = [table.keys[number] for number in table.array.tolist()]
        ids = [ShardId(key, table.region(row)) for row, key in enumerate(keys)]
        wanted = [(boxes or {}).get(id_, Region.whole(id_.region.shape)) for id_ in ids]
        expected = [stored[id_][(*b.slices(), ...)] for id_, b in zip(ids, wanted, strict=True)]
        targets = [np.zeros(content.shape, content.dtype) for content in expected]
        offset = padded([box.offset for box in wanted], width, 0)
        shape = padded([box.shape for box in wanted], width, 1)
        packs = dict(enumerate(self.records))
        reads = BlockReads(packs, table.place, table.extent, offset, shape, targets, keys)
        jobs = read_jobs(self.place, reads, {}, 8 * pack.RANGE_NBYTES, verify=verify)
        Transfer(jobs, 1).wait()
        for id_, target, content in zip(ids, targets, expected, strict=True):
            assert target.tobytes() == content.tobytes(), id_


def boxes_in(shards: Sequence[ShardSpec], seed: int) -> dict[ShardId, Region]:
    chance, boxes = random.Random(seed), {}
    for shard in shards:
        offset = tuple(chance.randrange(n) if n else 0 for n in shard.region.shape)
        shape = tuple(
            chance.randint(1, n - o) if n else 0
            for n, o in zip(shard.region.shape, offset, strict=True)
        )
        boxes[shard.id] = Region(offset, shape)
    return boxes


seeds = st.integers(0, 1 << 30)
ranges = st.sampled_from([16, 64, 256 << 10])


@settings(deadline=None, max_examples=60)
@given(seed=seeds, nbytes=ranges, limit=st.sampled_from([100, 1000, 1 << 32]))
@pytest.mark.slow
def test_any_boxes_of_any_blocks_are_read_as_they_were_written(
    seed: int, nbytes: int, limit: int
) -> None:
    with small_ranges(nbytes):
        written = Written(seed, PackLimits(limit))
        written.read_all()
        written.read_all(boxes_in(written.shards, seed))
        written.read_all(boxes_in(written.shards, seed + 1), verify=False)
        for name in written.records:
            assert [*verify_pack(written.place, name.name, name)] == []


# Damage


@pytest.fixture(scope="module")
def small() -> Written:
    """A pack of some kilobytes with arrays, objects, the common state and padding."""
    with small_ranges(64):
        written = next(w for w in map(Written, range(100)) if len(w.objects) > 3 and is_padded(w))
    assert len(written.records) == 1
    return written


def is_padded(written: Written) -> bool:
    return written.layout.packs[0].sources[-1] < 0 and bool(written.shards)


def issues_of(written: Written, content: bytes, expected: PackRecord | None) -> list[Any]:
    place: Any = MemoryPlace({file_of(written.records[0].name): content})
    try:
        return [*verify_pack(place, written.records[0].name, expected)]
    except IncompatibleVersionError as error:  # a flip in the version or in the features
        assert expected is None
        return [error]


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.slow
def test_every_flipped_byte_and_every_cut_of_a_pack_is_found(
    small: Written, is_listed: bool
) -> None:
    (record,), pack = small.records, small.layout.packs[0]
    whole, chance = small.place.files[file_of(record.name)], random.Random(1)
    expected = record if is_listed else None
    with small_ranges(64):
        for at in range(len(whole)):
            changed = bytearray(whole)
            changed[at] ^= 1 << chance.randrange(8)
            issues = issues_of(small, bytes(changed), expected)
            assert issues, at
            if record.data_start <= at < record.data_start + sum(pack.sizes):
                assert len(issues) == 1
                assert issues[0].problem is Problem.DAMAGED
                assert "written by rank 3: bytes" in issues[0].expected
            cut = issues_of(small, whole[:at], expected)
            assert [one.problem for one in cut] == [Problem.DAMAGED], at
        assert issues_of(small, whole, expected) == []
        assert issues_of(small, whole + b"\0", expected)


@pytest.mark.slow
def test_reads_find_every_flipped_byte_of_blocks_and_digests(small: Written) -> None:
    (record,), table = small.records, small.layout.table
    name = file_of(record.name)
    whole = small.place.files[name]
    starts = [record.data_start + start for _, start, _ in table.place.tolist()]
    itemsizes = [DType(table.facts[number].dtype).itemsize for number in table.array.tolist()]
    sizes = (table.extent.prod(1) * itemsizes).tolist()
    inside = [
        at for start, size in zip(starts, sizes, strict=True) for at in range(start, start + size)
    ]
    digests = range(record.nbytes - 8 * (record.num_ranges + 4), record.nbytes)
    with small_ranges(64):
        for at in [*random.Random(2).sample(inside, 300), *digests]:
            small.place.files[name] = whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :]
            with pytest.raises(CorruptCheckpointError, match="is damaged"):
                small.read_all()
        small.place.files[name] = whole
        small.read_all()


@settings(deadline=None, max_examples=300)
@given(data=st.data())
@pytest.mark.slow
def test_a_damaged_header_that_is_parsed_is_an_error_of_ours(data: st.DataObject) -> None:
    header = bytearray(Written(5).layout.packs[0].header("s"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, len(header.rstrip(b" ")) - 1))
        header[at] = data.draw(st.sampled_from(b'0123456789"{}[],:@#-.e \\xnull'))
    with suppress(CheckpointError):
        parse_header(bytes(header), "packs/00/00.safetensors")


# Limits


@pytest.mark.slow
def test_objects_and_long_keys_are_divided_among_packs() -> None:
    objects = [(ObjectId("o", (n,), (MAX_BLOCKS + 5,)), 1) for n in range(MAX_BLOCKS + 5)]
    layout = lay_out([], objects, 3)
    assert [len([n for n in pack.sources if n >= 0]) for pack in layout.packs] == [MAX_BLOCKS, 6]

    keys = [f"{n}" + "\N{GRINNING FACE}" * 100_000 for n in range(60)]
    shards = [ShardSpec(ShardId(key, Region((), ())), (), DType.COMPLEX128) for key in keys]
    layout = lay_out(shards)
    assert len(layout.packs) > 1
    assert max(pack.data_start for pack in layout.packs) < 100_000_000


def test_a_rank_with_bytes_enough_writes_packs_of_equal_size() -> None:
    whole = Region((0,), (100,))
    shards = [ShardSpec(ShardId(f"w{n}", whole), (100,), DType.INT8) for n in range(12)]
    for share, expected in ((200, [3] * 4), (500, [6] * 2), (2000, [12])):
        layout = lay_out(shards, limits=PackLimits(num_packs=4, share_nbytes=share))
        assert [len([n for n in pack.sources if n >= 0]) for pack in layout.packs] == expected


def test_a_shard_without_elements_is_not_in_the_way_of_another_with_its_origin() -> None:
    shards = [ShardSpec(ShardId("w", Region((0,), (n,))), (4,), DType.FLOAT32) for n in (0, 4)]
    for some in (shards, shards[::-1]):
        table = lay_out(some, [], None, rank=0, limits=PackLimits()).table
        assert [table.region(row) for row in range(len(table))] == [Region((0,), (4,))]


def test_blocks_of_one_rank_that_do_not_fit_together_are_refused() -> None:
    def shard(key: str, offset: int, size: int, shape: int = 8) -> ShardSpec:
        return ShardSpec(ShardId(key, Region((offset,), (size,))), (shape,), DType.INT8)

    with pytest.raises(CoverageError, match=r"w: \[2:4\] and \[2:8\]"):
        lay_out([shard("w", 2, 2), shard("w", 2, 6)], rank=4)
    with pytest.raises(PlanError, match="on rank 4"):
        lay_out([shard("w", 0, 2), shard("w", 2, 6, 9)], rank=4)


@pytest.mark.parametrize("rank", [-1, 1 << 32])
def test_a_header_of_no_rank_is_refused(rank: int) -> None:
    header = lay_out([], (), 3, rank=rank).packs[0].header("s")
    with pytest.raises(CorruptCheckpointError, match=str(rank)):
        parse_header(header, "packs/00/00.safetensors")


def test_later_versions_and_unknown_features_are_refused() -> None:
    (packed,) = lay_out([], [], 3, features=[UNVERIFIED]).packs
    header = packed.header("s")
    assert parse_header(header, "p").features == (UNVERIFIED,)
    for old, new in ((b'"version":"1"', b'"version":"2"'), (b"unverified", b"compressed")):
        with pytest.raises(IncompatibleVersionError, match="install a newer"):
            parse_header(header.replace(old, new), "p")
