"""Where a group load gets its arrays and objects: a checkpoint of ours, or any load strategy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, array_from_wire, array_to_wire
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import dump_object, object_path
from dist_ckpt_strategies.megatron.bases import ShardedObject
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    message_of,
    object_id,
    shard_spec,
    value_from_message,
)
from dist_ckpt_strategies.storage.base import (
    ArrayRead,
    ArrayReader,
    HostArray,
    StoredCheckpoint,
    Transfer,
)
from dist_ckpt_strategies.storage.io_pool import PendingTransfers
from dist_ckpt_strategies.two_stage.load import GroupLoad


class CheckpointSource:
    """A checkpoint of a format of this package; see Source.

    Args:
        locate: gives its location; may raise.
        open_checkpoint: opens it there; may raise.
    """

    may_cut = True

    def __init__(
        self,
        locate: Callable[[], Location],
        open_checkpoint: Callable[[Location], StoredCheckpoint],
    ) -> None:
        self._locate = locate
        self._open = open_checkpoint
        self._checkpoint: StoredCheckpoint

    def open(self) -> Path | None:
        """See Source."""
        location = self._locate()
        self._checkpoint = self._open(location)
        return location if isinstance(location, Path) else None

    def name(self, tensor: Any) -> str:
        """See Source."""
        return str(tensor.key)

    def find(self, names: Sequence[str], comm: Communicator) -> Sequence[ArraySpec]:
        """See Source. The metadata of each array is read by one rank."""

        def look_up() -> bytes:
            share = names[comm.rank :: comm.size]
            found = self._checkpoint.find(share)
            return "\n".join(json.dumps(array_to_wire(found[key])) for key in share).encode()

        shares = agree_and_gather_bytes(comm, look_up)
        return _Arrays(len(names), [share.decode().split("\n") for share in shares])

    def open_reader(self, *, fills_page_cache: bool) -> ArrayReader:
        """See Source."""
        checkpoint = self._checkpoint
        return checkpoint.buffered_reader if fills_page_cache else checkpoint.array_reader

    def object_content(self, unique_key: str) -> bytes:
        """See Source."""
        found = ObjectId.parse(unique_key)
        assert found is not None  # noqa: S101 - made from an ObjectId on another rank
        return self._checkpoint.object_content(found)

    def object_path(self, object_id: ObjectId) -> str:
        """See Source."""
        return self._checkpoint.object_path(object_id)


class _Arrays(Sequence[ArraySpec]):
    """Arrays, decoded when they are first needed: a rank needs few of a large group's.

    Args:
        num_arrays: how many.
        lines: for each rank, one line for each array that it has looked up, in turn.
    """

    def __init__(self, num_arrays: int, lines: Sequence[Sequence[str]]) -> None:
        self._num_arrays = num_arrays
        self._lines = lines
        self._found: dict[int, ArraySpec] = {}

    def __len__(self) -> int:
        return self._num_arrays

    @overload
    def __getitem__(self, number: int) -> ArraySpec: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ArraySpec]: ...
    def __getitem__(self, number: int | slice) -> ArraySpec | Sequence[ArraySpec]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        found = self._found.get(number)
        if found is None:
            line = self._lines[number % len(self._lines)][number // len(self._lines)]
            found = self._found[number] = array_from_wire(json.loads(line))
        return found


class StrategySource:
    """Any load strategy, called once with all that this rank reads; see Source.

    Each distinct shard counts as an array of its own, which is read whole.

    Args:
        root: the checkpoint directory, for messages.

    Attributes:
        loaded: what the strategy returned for ``own_part``; set it before anything is read.
    """

    may_cut = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._load: GroupLoad
        self.loaded: StateDict = {}

    def open(self) -> Path | None:
        """See Source. What the ranks pass on is in their memory."""
        return None

    def name(self, tensor: Any) -> str:
        """See Source. Replicas have the same name."""
        shard_spec(tensor)  # refuses what no plan can hold
        wire = message_of(tensor)
        wire[3] = 0  # whichever replica
        return json.dumps(wire)

    def find(self, names: Sequence[str], comm: Communicator) -> Sequence[ArraySpec]:
        """See Source. A name describes the shard; one chunk of the array is one shard."""
        return agree(comm, lambda: [_array_around(json.loads(name)) for name in names])

    def own_part(self, load: GroupLoad, rank: int) -> StateDict:
        """What this rank asks the strategy for: tensors by number, objects by unique key.

        Flat: torch_dist loses dicts that are empty.
        """
        self._load = load
        tensors = {self.name(tensor): tensor for tensor in load.tensors}
        # A reader has requested what it reads. torch_dist changes what it is given.
        own: StateDict = {n: copy.copy(tensors[load.names[n]]) for n in load.read_by(rank)}
        objects = {object_id(found).unique_key: found for found in load.objects}
        own |= {
            key: objects.get(key) or ShardedObject.empty_from_unique_key(key)
            for key in load.shares.read_by(rank)
        }
        return own

    def open_reader(self, *, fills_page_cache: bool) -> ArrayReader:  # noqa: ARG002 - see Source
        """See Source."""
        regions = {target.array: target.region for target in self._load.targets}
        found: dict[tuple[ArraySpec, Region], HostArray] = {}
        for number in (number for number in self.loaded if isinstance(number, int)):
            tensor: torch.Tensor = self.loaded[number]
            array, region = self._load.arrays[number], regions[number]
            if tensor.numel() != region.numel:
                raise PlanError(
                    f"{array.key}: shape {tuple(tensor.shape)} loaded, {region.shape} expected",
                    key=array.key,
                )
            shaped = tensor.to(getattr(torch, array.dtype.value)).reshape(region.shape)
            found[array, region] = to_host([shaped])[0]
        return _LoadedRegions(found)

    def object_content(self, unique_key: str) -> bytes:
        """See Source."""
        return dump_object(self.loaded[unique_key], name=unique_key)

    def object_path(self, object_id: ObjectId) -> str:
        """See Source."""
        return str(object_path(self._root, object_id))


def _array_around(wire: list[Any]) -> ArraySpec:
    spec = shard_spec(value_from_message(wire))
    chunk = tuple(max(1, extent) for extent in spec.region.shape)
    return ArraySpec(spec.key, spec.array_shape, spec.dtype, chunk)


class _LoadedRegions:
    """An ArrayReader of regions in memory, which are read whole."""

    def __init__(self, regions: Mapping[tuple[ArraySpec, Region], HostArray]) -> None:
        self._regions = regions

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayReader. A region that is read into its own memory stays as it is."""
        for read in reads:
            source = self._regions[read.array, read.region]
            if source.ctypes.data != read.target.ctypes.data:
                np.copyto(read.target, source)
        return PendingTransfers(())
