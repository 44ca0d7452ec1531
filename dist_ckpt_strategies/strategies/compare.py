"""``compare``: whether a state is what a checkpoint holds, mostly without reading its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, Region, groups
from dist_ckpt_strategies.device import host_batches, on_own_gpu, settle, to_host
from dist_ckpt_strategies.errors import PlanError, StrategyError, raises_megatron_errors
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, load_content
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.megatron.shards import (
    CONTENT_METADATA_KEY,
    StateDict,
    is_main,
    object_id,
    padding_in,
    shard_data,
    shard_spec,
    sharded_values,
    split_for_save,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.agreement import require_same_checkpoint
from dist_ckpt_strategies.sharded.load import build_read_item
from dist_ckpt_strategies.sharded.read import run_reads
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, Deadline, run_within
from dist_ckpt_strategies.strategies.compare_report import (
    CompareReport,
    Found,
    missing_from,
    report_of,
    unknown_of,
)
from dist_ckpt_strategies.tools.diff import (
    MAX_PLACES,
    ArrayDifference,
    Difference,
    ObjectDifference,
    element_difference,
    is_equal,
    merged,
)
from dist_ckpt_strategies.tools.diff_values import differing_places
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, open_at
from dist_ckpt_strategies.tools.plan_convert import blocks

State = StateDict | Callable[[], StateDict]
"""A sharded state dict, or a function that returns it."""


@raises_megatron_errors
def compare(
    sharded_state_dict: State,
    checkpoint_dir: str | Path,
    *,
    ignore: Sequence[str] = (),
    allow: Allowed = (),
    options: Options | None = None,
) -> CompareReport:
    """Compare the state of all ranks with a checkpoint of any format, bit for bit.

    Collective over the world; two gathers. Every rank compares all that it holds, replicas too.
    Shards that packs hold as blocks are compared by their digests, and read only if these differ;
    others are read, ``max_inflight_bytes`` at a time. Nothing is changed.

    Args:
        sharded_state_dict: as for ``save``, with data; or a function that returns it.
        checkpoint_dir: what ``dist_ckpt_strategies.open`` reads. An array that it holds in another
            dtype is compared after a conversion, as a load does it.
        ignore: globs: keys of arrays and objects, and of the common state's first level, that are
            not compared, such as ``"args"``.
        allow: further classes that objects and the common state may be of.
        options: timeouts and memory bounds; by default from the environment.

    Raises:
        PlanError: a ShardedTensor has no data.
        StorageError: the checkpoint is missing, incomplete or damaged.
        UnsafeObjectError: an object needs a class that is not allowed.
        PeerError: the same, on another rank.
    """
    invalid: list[StrategyError] = []
    try:
        chosen = options or options_from_environment()
    except StrategyError as error:
        invalid, chosen = [error], Options()
    name = f"with {checkpoint_dir}"
    comm = open_communicator(None, timeout_s=chosen.timeout_s, purpose="compare", detail=name)
    with no_garbage_collection():
        return _Comparison(comm, chosen, tuple(ignore), allow).run(
            sharded_state_dict, checkpoint_dir, invalid
        )


class _Comparison:
    """A comparison of all ranks."""

    def __init__(
        self, comm: Communicator, options: Options, ignore: tuple[str, ...], allow: Allowed
    ) -> None:
        self._comm, self._options, self._ignore, self._allow = comm, options, ignore, allow
        self._opened: OpenedCheckpoint
        self._keys: list[str] = []  # those stored, and unique keys of objects
        self._ids: list[str] = []
        self._values: list[Any] = []
        self._common: StateDict = {}

    def run(
        self, state: State, checkpoint_dir: str | Path, invalid: Sequence[StrategyError]
    ) -> CompareReport:
        """The report. Collective."""
        comm = self._comm

        def begin() -> Message:
            for error in invalid:
                raise error
            self._values, self._common = split_state(state, self._ignore)
            return self._open(checkpoint_dir)

        identities, held = zip(*run_and_gather(comm, begin), strict=True)  # 1
        require_same_checkpoint(comm, checkpoint_dir, identities)
        opened, deadline = self._opened, Deadline.after(WORK * self._options.timeout_s)
        step = lambda: opened.unchanged(lambda: self._found(deadline).to_message())  # noqa: E731
        answers = run_and_gather(comm, step)  # 2
        is_held = np.bitwise_or.reduce([np.frombuffer(bytes.fromhex(h), np.uint8) for h in held])
        names = [*self._keys, *self._ids]
        is_held = np.unpackbits(is_held, count=len(names)).astype(bool)
        absent = [name for name, is_there in zip(names, is_held, strict=True) if not is_there]
        num_arrays = int(is_held[: len(self._keys)].sum())
        missing = missing_from(absent, set(self._keys))
        nums = num_arrays, int(is_held.sum()) - num_arrays
        return report_of(str(checkpoint_dir), comm.global_ranks, answers, missing, *nums)

    def _open(self, checkpoint_dir: str | Path) -> Message:
        """Identity of the checkpoint, and which of its names this rank holds, as bits."""
        options, ignore = self._options, self._ignore
        root = located(checkpoint_dir, options)

        def look() -> None:
            self._opened = opened = open_at(root, options, self._allow)
            self._keys = [key for key in opened if not is_ignored(key, ignore)]
            ids = (name for name in opened.object_ids if not is_ignored(name.key, ignore))
            self._ids = [name.unique_key for name in ids]

        run_within(Deadline.after(OPENING * options.timeout_s), root, look)
        names, held = [*self._keys, *self._ids], set(map(name_of, self._values))
        bits = np.packbits(np.fromiter((name in held for name in names), bool, len(names)))
        return [self._opened.identity, bits.tobytes().hex()]

    def _found(self, deadline: Deadline) -> Found:
        """The differences of this rank's state. Rank-local."""
        opened, names = self._opened, {*self._keys, *self._ids}
        values = [value for value in self._values if name_of(value) in names]
        unknown = unknown_of(value for value in self._values if name_of(value) not in names)
        differences = self._compared([v for v in values if isinstance(v, ShardedTensor)], deadline)
        objects = list(unknown.objects)
        for value in values:
            if not isinstance(value, ShardedTensor):
                name = object_id(value)
                stored = opened.object_content(name)
                objects += self._unlike_object(name.unique_key, stored, value.data)
        stored = opened.common_content()
        objects += self._unlike_object(COMMON_NAME, stored, self._common)
        return differences._replace(arrays=[*differences.arrays, *unknown.arrays], objects=objects)

    def _unlike_object(self, key: str, stored: bytes, value_now: Any) -> list[ObjectDifference]:
        opened = self._opened
        value = load_content(stored, f"{opened.root}/{key}", key, opened.allowed)
        if key == COMMON_NAME:
            value = kept_common(value, self._ignore)
        return object_differences(key, value, value_now, opened.allowed)

    def _compared(self, tensors: Sequence[Any], deadline: Deadline) -> Found:
        """The differences between ShardedTensors and the stored arrays of their keys."""
        opened = self._opened
        keys = {tensor.key for tensor in tensors}
        arrays = {array.key: array for array in opened.find(keys)}
        digests = opened.stored.digests(keys) if isinstance(opened.stored, PackCheckpoint) else {}
        parts: list[_Part] = []
        differing: list[ArrayDifference] = []
        converted = set()
        nbytes = 0
        for tensor in tensors:
            spec, array, data = shard_spec(tensor), arrays[tensor.key], shard_data(tensor)
            try:
                item = build_read_item(spec, array)
            except PlanError:
                shapes = str(array.shape), str(spec.array_shape)
                differing.append(ArrayDifference(spec.key, Difference.SHAPE, *shapes))
                continue
            if array.dtype is not spec.dtype:
                converted.add((spec.key, array.dtype.value, spec.dtype.value))
            if item.source is None or not item.source.numel:
                continue
            stored = digests.get((spec.key, item.source)) if array.dtype is spec.dtype else None
            part = data if item.target is None else data[item.target.slices()]
            parts.append(_Part(array, item.source, part, stored))
            nbytes += part.numel() * part.element_size()
        to_read = list(self._unlike(parts))
        unlike = chain.from_iterable(self._read(batch, deadline) for batch in to_read)
        read = sum(p.region.numel * p.array.dtype.itemsize for batch in to_read for p in batch)
        return Found([*differing, *merged(unlike)], (), sorted(converted), nbytes, read)

    def _unlike(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """The parts whose digests are not those stored, or not known, in batches to be read."""
        budget = self._options.max_inflight_bytes
        settle([part.data for part in parts])
        unlike = [part for part in parts if part.digests is None]
        known = [part for part in parts if part.digests is not None]
        hosts = chain.from_iterable(host_batches([part.data for part in known], budget))
        for part, host in zip(known, hosts, strict=True):
            if not _has_digests(host.reshape(-1).view(np.uint8), part.digests):
                unlike.append(part)
        pieces = chain.from_iterable(part.pieces(budget // 4) for part in unlike)
        yield from groups(pieces, budget // 2, lambda p: p.data.numel() * p.data.element_size())

    def _read(self, parts: Sequence[_Part], deadline: Deadline) -> Iterator[ArrayDifference]:
        """The differences between parts and the stored elements, which are read in their dtypes."""
        memory = [torch.empty(p.data.shape, dtype=p.data.dtype, device="cpu") for p in parts]
        reads = [(p.array, p.region, m) for p, m in zip(parts, memory, strict=True)]
        run_reads(self._opened.stored.begin_reads, reads, self._options, deadline)
        with on_own_gpu():
            hosts = to_host([part.data for part in parts])
        for part, host, stored in zip(parts, hosts, to_host(memory), strict=True):
            if not is_equal(stored, host):
                yield element_difference(part.array.key, part.region, stored, host)


def split_state(state: State, ignore: Sequence[str]) -> tuple[list[Any], dict[Any, Any]]:
    """The sharded values of a state, and its common state. Rank-local.

    But for what is ignored, and for padding, which means nothing.
    """
    given = state() if callable(state) else state
    sharded, common = split_for_save(given, None)
    padding = {(value.key, value.global_offset) for value in padding_in(given)}
    kept = (value for value in sharded_values(sharded) if not is_ignored(value.key, ignore))
    values = [
        value
        for value in kept
        if (value.data is not None or is_main(value))  # other replicas may lack it
        and (value.key, value.global_offset) not in padding
    ]
    return values, kept_common(common, ignore)


def kept_common(common: Mapping[Any, Any], ignore: Sequence[str]) -> dict[Any, Any]:
    """The common state, but for what is ignored or describes the save."""
    ignored = (*ignore, CONTENT_METADATA_KEY)
    return {key: value for key, value in common.items() if not is_ignored(key, ignored)}


def is_ignored(key: object, ignore: Sequence[str]) -> bool:
    """Whether one of the globs matches a key."""
    return any(fnmatchcase(str(key), pattern) for pattern in ignore)


def object_differences(
    key: str, stored: Any, value: Any, allowed: Allowed
) -> list[ObjectDifference]:
    """The differences between a stored object and that of the state. Rank-local.

    The state's is compared as it would be loaded.
    """
    content = dump_loadable(value, name=key, allow=allowed)
    places = differing_places(stored, load_content(content, "the state", key, allowed))
    first_places = islice(places, MAX_PLACES)
    return [ObjectDifference(key, Difference.VALUES, *place) for place in first_places]


class _Part(NamedTuple):
    """A region of a stored array, what the state has of it, and its digests, if they count."""

    array: ArraySpec
    region: Region
    data: torch.Tensor
    digests: Digests | None

    def pieces(self, max_nbytes: int) -> Iterator[_Part]:
        """The part, cut into smaller ones."""
        for region in blocks(self.region, self.data.element_size(), max_nbytes):
            data = self.data[region.within(self.region).slices()]
            yield _Part(self.array, region, data, None)


def name_of(value: Any) -> str:
    """The key of a ShardedTensor, or the unique key of a ShardedObject."""
    return str(value.key if isinstance(value, ShardedTensor) else value.unique_key)


def _has_digests(content: Any, digests: Digests | None) -> bool:
    starts = range(0, content.size, RANGE_NBYTES)
    actual = [xxh3_64_intdigest(content[at : at + RANGE_NBYTES].data) for at in starts]
    return digests is not None and actual == digests.tolist()
