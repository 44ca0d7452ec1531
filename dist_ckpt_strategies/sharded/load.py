"""Load a sharded state dict: open and plan, read; nothing is filled unless every rank can load.

A load takes these collectives: one gather, after every rank has opened the checkpoint and made its
plan; where the sharding is to be validated and was not by the save or load before, another with
the description of all shards, and the check; the reads.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, Region, ShardSpec
from dist_ckpt_strategies.device import (
    HostSnapshot,
    build_batches,
    copy_into,
    host_view,
    require_plain,
    to_host,
    torch_dtype,
)
from dist_ckpt_strategies.errors import DTypeMismatchError, PlanError, ShapeMismatchError
from dist_ckpt_strategies.formats.checkpoints import StoredCheckpoint
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    digest_of,
    mapped_values,
    message_of,
    object_id,
    shard_from_message,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.checks import (
    VALIDATED,
    require_same_checkpoint,
    require_validated,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, restart_limit
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader

logger = logging.getLogger(__name__)

TensorRegion = tuple[ArraySpec, Region, torch.Tensor]
"""A region of an array, and the tensor that has its shape: of any strides and device."""

Conversions = list[list[str]]
"""Key, stored and wanted dtype of each array that a load converts, sorted."""

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class ReadItem:
    """How one wanted shard is filled.

    Attributes:
        array: the stored array.
        source: region of the stored array to read; None where the shard lies wholly beyond it.
        target: the same region, in coordinates of the wanted tensor; None where that is all of it.
        is_padded: whether a part of the tensor has no counterpart in storage and becomes zeros.
    """

    array: ArraySpec
    source: Region | None
    target: Region | None
    is_padded: bool


def build_read_item(want: ShardSpec, array: ArraySpec) -> ReadItem:
    """Match a shard that a rank wants with the array that a checkpoint holds.

    Where ``may_mismatch`` is set and shapes differ, the read is clipped to what is stored and the
    rest of the tensor is padding, as in Megatron-Core 0.15's TensorStore loader.

    Raises:
        ShapeMismatchError: shapes differ, or the shard reaches outside, and ``may_mismatch`` is
            not set; or the number of dims differs.
    """
    key, region = want.id
    shape = array.shape
    if shape != want.array_shape and not (
        want.may_mismatch and len(shape) == len(want.array_shape)
    ):
        raise ShapeMismatchError(
            f"{key}: shape {shape} in the checkpoint, {want.array_shape} requested; "
            "build the model with the settings of the run that saved it; only for a padded "
            "vocabulary, set allow_shape_mismatch on the ShardedTensor",
            key=key,
        )
    if 0 in region.shape:
        return ReadItem(array, None, None, is_padded=False)
    for start, num, size in zip(*region, shape, strict=True):
        if start < 0 or start + num > size:
            break
    else:
        return ReadItem(array, region, None, is_padded=False)
    if not want.may_mismatch:
        raise ShapeMismatchError(
            f"{key}: {region} requested, outside the array's shape {shape}",
            key=key,
        )
    source = region.intersect(Region.whole(shape))
    if source is None:
        return ReadItem(array, None, None, is_padded=True)
    return ReadItem(array, source, source.within(region), is_padded=source.shape != region.shape)


@dataclass(eq=False)
class ShardedLoad:
    """One load, in steps. ``describe`` is rank-local and comes first; the others are collective.

    Messages call the checkpoint ``name``. ``destination_of`` gives the tensor to fill for a
    ShardedTensor. ``validates``: Megatron-Core's own checks of the sharding are run too.
    """

    comm: Communicator
    state: StateDict
    checkpoint: StoredCheckpoint
    name: object
    options: Options
    allow: Allowed
    destination_of: Callable[[Any], torch.Tensor]
    validates: bool = False

    _messages: list[Message] = field(default_factory=list, init=False)
    _plan: list[tuple[Any, ReadItem, torch.Tensor]] = field(default_factory=list, init=False)
    _objects: list[Any] = field(default_factory=list, init=False)
    _converted: Conversions = field(default_factory=list, init=False)
    _loaded: Any = field(default=None, init=False)

    def describe(self) -> Message:
        """Plan the reads; what the other ranks have to know. Rank-local.

        Raises a ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError or StorageError if this
        rank cannot be given what it asks for.
        """
        values = list(sharded_values(self.state))
        self._messages = list(map(message_of, values))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        self._objects = [value for value in values if not isinstance(value, ShardedTensor)]
        keys, checkpoint = {tensor.key for tensor in tensors}, self.checkpoint
        stored = checkpoint.save.read(lambda: checkpoint.find(keys))
        specs = [spec for spec in map(shard_from_message, self._messages) if spec is not None]
        is_strict = self.options.strict_dtype
        reads, self._converted = matched(tensors, specs, stored, is_strict=is_strict)
        results = map(self.destination_of, tensors)
        self._plan = list(zip(tensors, reads, results, strict=True))
        own = digest_of(self._messages) if self.validates else ""
        return [own, VALIDATED.last, checkpoint.identity]

    def begin(self, answers: Sequence[Message]) -> None:
        """Raise where the ranks' shards do not fit together, or their checkpoints. Collective.

        A PlanError if main replicas of a key do not fit, a StorageError if the checkpoints differ.
        """
        owns, lasts, identities = zip(*answers, strict=True)
        require_same_checkpoint(self.comm, self.name, identities)
        group = digest_of(owns)
        if any(owns) and any(last != group for last in lasts):
            require_validated(self.comm, self._messages, group)

    def run(self, finish: Callable[[StateDict], Any] = lambda state: state) -> Any:
        """Read everything; what ``finish`` makes of the loaded state dict. Collective.

        A missing or damaged chunk or object is a StorageError; on the other ranks a PeerError of
        the same class.
        """
        read, save = partial(self._read, finish), self.checkpoint.save
        converted = run_and_gather(self.comm, lambda: save.read(read), is_sparse=True)
        if any(converted):
            warn_of_conversions(self.comm, self.name, filter(None, converted))
        return self._loaded

    def _read(self, finish: Callable[[StateDict], Any]) -> Message:
        """Fill every tensor; what this rank has converted, if anything. Rank-local."""
        comm, started = self.comm, time.monotonic()
        loaded: dict[int, Any] = {}
        reads = []
        nbytes = 0
        for tensor, read, result in self._plan:
            loaded[id(tensor)] = result
            target = result.detach()[(None,) * tensor.prepend_axis_num]
            if read.is_padded:
                target.zero_()
            if read.source is not None:
                part = target if read.target is None else target[read.target.slices()]
                reads.append((read.array, read.source, part))
                nbytes += part.numel() * read.array.dtype.itemsize
        run_reads(self.checkpoint.array_reader(), reads, self.options)
        figures = len(self._plan), nbytes, time.monotonic() - started
        if self._objects:
            self._read_objects(loaded)
        text = "rank %s: load from %s: num_tensors %d, nbytes %d, seconds %.3f"
        logger.log(comm.report_level, text, comm.global_ranks[comm.rank], self.name, *figures)
        self._loaded = finish(mapped_values(lambda value: loaded[id(value)], self.state))
        return self._converted or None

    def _read_objects(self, loaded: dict[int, Any]) -> None:
        allow, checkpoint = self.allow, self.checkpoint

        def read(wanted: Any) -> None:
            name = object_id(wanted)
            path = checkpoint.object_path(name)
            content = checkpoint.object_content(name)
            loaded[id(wanted)] = load_content(content, path, name.unique_key, allow)

        jobs = (Job(found.key, found.unique_key, partial(read, found)) for found in self._objects)
        Transfer(jobs, 1).wait(self.options.timeout_s)


def run_reads(store: ArrayReader, reads: Sequence[TensorRegion], options: Options) -> None:
    """Fill every tensor, of any dtype, from storage.

    CPU tensors of the stored dtype are read into directly, all at once. Others are read through
    memory of the stored dtype, pinned for CUDA, batch by batch, and converted as ``copy_`` does;
    that takes at most ``max_inflight_bytes`` (or the largest tensor).

    Two tensors may be one memory, as tied weights are; a PlanError if they are stored unlike.
    """
    direct: list[ArrayRead] = []
    staged: list[tuple[TensorRegion, int]] = []
    tied: list[TensorRegion] = []
    places: set[Any] = set()
    for read in reads:
        array, region, tensor = read
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in places:
            tied.append(read)
            continue
        places.add(place)
        is_plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and tensor.dtype == torch_dtype(array.dtype):
            direct.append(ArrayRead(array, region, host_view(tensor)))
        else:
            staged.append((read, region.numel * array.dtype.itemsize))
    if direct:
        store.begin_reads(direct).wait(options.timeout_s)
    memory = HostSnapshot()
    for batch in build_batches(staged, options.max_inflight_bytes) if staged else ():
        _read_staged(store, batch, memory, options)
    for array, region, tensor in tied:
        again = torch.empty_like(tensor)
        run_reads(store, [(array, region, again)], options)
        if len({host.tobytes() for host in to_host([tensor, again])}) > 1:
            raise PlanError(
                f"{array.key}: its data is also that of another tensor of this load, for which "
                "the checkpoint holds other values; untie the two, or load one of them",
                key=array.key,
            )


def _read_staged(
    store: ArrayReader, reads: Sequence[TensorRegion], memory: HostSnapshot, options: Options
) -> None:
    """A function, so that nothing looks at the memory any more when it has to grow."""
    layouts = [(region.shape, torch_dtype(array.dtype)) for array, region, _ in reads]
    is_cuda = any(tensor.device.type == "cuda" for _, _, tensor in reads)
    hosts = [slot.tensor for slot in memory.slots(layouts, is_pinned=is_cuda)]
    requests = [
        ArrayRead(array, region, host_view(host))
        for (array, region, _), host in zip(reads, hosts, strict=True)
    ]
    store.begin_reads(requests).wait(options.timeout_s)
    copy_into([tensor for _, _, tensor in reads], hosts)


def load_sharded(comm: Communicator, open_load: Callable[[], ShardedLoad]) -> StateDict:
    """Read what each rank asks for; a state dict of the same structure. Collective.

    Every rank raises the ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError or StorageError
    of one.
    """
    loads: list[ShardedLoad] = []

    def describe() -> Message:
        loads.append(open_load())
        return loads[0].describe()

    answers = run_and_gather(comm, describe)
    restart_limit()
    loads[0].begin(answers)
    loaded: StateDict = loads[0].run()
    return loaded


def matched(
    tensors: Iterable[Any],
    specs: Iterable[ShardSpec],
    stored: Mapping[str, ArraySpec],
    *,
    is_strict: bool,
) -> tuple[list[ReadItem], Conversions]:
    """How ShardedTensors are filled from stored arrays, and what that converts.

    Decides for checkpoints of every kind what may be loaded into what: errors are those of
    ``build_read_item`` and ``conversions``.
    """
    reads = [build_read_item(spec, stored[spec.key]) for spec in specs]
    dtypes = {key: array.dtype.value for key, array in stored.items()}
    return reads, conversions(tensors, dtypes, is_strict=is_strict)


def conversions(
    tensors: Iterable[Any], stored: Mapping[str, str], *, is_strict: bool
) -> Conversions:
    """What a load of ShardedTensors converts, where ``stored`` names the dtypes of the arrays.

    With ``is_strict`` raises a DTypeMismatchError that names the first.
    """
    dtypes = {(t.key, t.dtype if t.data is None else t.data.dtype) for t in tensors}
    wanted = [(key, str(dtype).removeprefix("torch.")) for key, dtype in dtypes]
    found = sorted([key, stored[key], to] for key, to in wanted if stored.get(key, to) != to)
    if found and is_strict:
        key, is_stored, is_wanted = found[0]
        others = f"; {len(found) - 1} more arrays differ" if len(found) > 1 else ""
        raise DTypeMismatchError(
            f"{key}: dtype {is_stored} in the checkpoint, {is_wanted} requested{others}; load it "
            "as it is stored, or without strict_dtype, which converts it",
            key=key,
        )
    return found


def warn_of_conversions(
    comm: Communicator, checkpoint_dir: object, converted: Iterable[Conversions]
) -> None:
    """Log one warning, on the first rank, if any rank of a load has converted an array."""
    found = sorted({tuple(each) for of_rank in converted for each in of_rank})
    if not found or comm.rank != 0:
        return
    examples = found[:_NUM_EXAMPLES]
    named = ", ".join(f"{key} ({stored} to {wanted})" for key, stored, wanted in examples)
    text = (
        f"load from {checkpoint_dir}: arrays converted to the dtype requested: "
        f"{len({key for key, _, _ in found})}, such as {named}; strict_dtype=True makes this an "
        "error"
    )
    logger.warning("%s", text)


def destination(tensor: Any) -> torch.Tensor:
    """The tensor that a load fills: the ShardedTensor's own data, or a new one on the CPU.

    Where Megatron-Core's torch_dist has given the data its prepended dims, it is a view of that.
    Errors are those of ``require_fillable``.
    """
    stated = tuple(tensor.local_shape)
    data: torch.Tensor | None = tensor.data
    if data is None:
        return torch.empty(stated, dtype=tensor.dtype, device="cpu")
    require_fillable([tensor])
    return data if tuple(data.shape) == stated else data.detach()[(0,) * tensor.prepend_axis_num]


def require_fillable(values: Iterable[Any]) -> None:
    """Raise unless a load can fill the data of the ShardedTensors among the values.

    A ShapeMismatchError if one has another shape than its ShardedTensor says, and a PlanError if
    its elements do not lie in memory of their own.
    """
    for value in values:
        data = value.data
        if data is None or not isinstance(value, ShardedTensor):
            continue
        require_plain(data, key=value.key, is_filled=True)
        stated, found = tuple(value.local_shape), tuple(data.shape)
        if found not in {stated, (1,) * value.prepend_axis_num + stated}:
            raise ShapeMismatchError(
                f"{value.key}: its data has shape {found}, its local_shape is {stated}",
                key=value.key,
            )
