"""Checkpoints as a storage that ``torch.distributed.checkpoint`` (DCP) reads; see ``dcp_writer``.

Nothing here talks to a peer: what ranks have to tell each other travels in DCP's own plans.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.device import require_plain, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    PlanError,
    as_checkpoint_error,
)
from dist_ckpt_strategies.formats.base import layers
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.objects import Allowed, allowing, load_content
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.sharded.read import TensorRead, run_reads
from dist_ckpt_strategies.storage.io_pool import (
    ENDING,
    OPENING,
    WORK,
    Deadline,
    Job,
    Transfer,
    run_within,
)
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, open_at

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_READERS = 16
"""Objects that are read at the same time: a request each where the checkpoint is in a bucket."""

PATHS = "dcp_paths"
"""In the index: where in nested containers each value stood whose key does not say so."""


class Placed:
    """The methods of writers and readers for their place."""

    checkpoint_id: Any = None
    _options: Options

    def reset(self, checkpoint_id: Any = None) -> None:
        """Go to another place from now on, if there is one. DCP calls it."""
        if checkpoint_id is not None:
            root = located(checkpoint_id, self._options, what="path")
            self.checkpoint_id = root if isinstance(root, Path) else checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is the address of a checkpoint. DCP calls it."""
        try:
            located(checkpoint_id, options_from_environment(), what="path")
        except CheckpointError:
            return False
        return True

    @property
    def _root(self) -> Location:
        return located(self.checkpoint_id, self._options, what="path")


def plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with what each Stateful returns in its place; an error of one names its key."""
    plain = dict[str, Any]()
    for key, value in state_dict.items():
        with naming(f"{key}: state_dict()", key):
            plain[key] = value.state_dict() if isinstance(value, Stateful) else value
    return plain


def with_text_keys(value: Any) -> Any:
    """The same values in dicts and lists of their own, under the texts of their keys.

    DCP knows keys by their texts, and would put what it has loaded of ``{0: ...}`` beside it.
    """
    if isinstance(value, Mapping):
        return {str(key): with_text_keys(inner) for key, inner in value.items()}
    return [*map(with_text_keys, value)] if isinstance(value, list) else value


def put_back(own: Any, loaded: Any) -> Any:
    """The state's own dicts and lists, filled from what ``with_text_keys`` has made of them."""
    match own, loaded:
        case MutableMapping(), Mapping() if {*map(str, own)} == loaded.keys():
            for key in own:
                own[key] = put_back(own[key], loaded[str(key)])
        case list(), list() if len(own) == len(loaded):
            own[:] = map(put_back, own, loaded)
        case _:
            return loaded
    return own


@contextmanager
def naming(what: str, key: str) -> Iterator[None]:
    """Within the block an error says what failed, and of which key, if it does not already."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a state's own code raises
        found = as_checkpoint_error(error)
        if found.key is None:
            found.key, found.args = key, (f"{what} failed: {found.message}",)
        raise found from found.__cause__


def done(value: T) -> Future[T]:
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class PackStorageReader(Placed, StorageReader):
    """Loads checkpoints of every format that ``dist_ckpt_strategies.open`` reads.

    For ``torch.distributed.checkpoint.load``. Each rank reads what it needs, and compares it with
    its digests. DCP is told of whole arrays: which blocks hold them is found by columns.

    Args:
        path: directory or URL of the checkpoint.
        options: timeouts of storage, and memory bounds; by default from the environment.
        allow: further classes that bytes may be unpickled to.
        verify: ``"read"`` or ``"off"``, of packs; by default as the options say.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        options: Options | None = None,
        allow: Allowed = (),
        verify: Verify | str | None = None,
    ) -> None:
        chosen = options or options_from_environment()
        self._options, self._allow = chosen.with_changes(verify=verify), tuple(allow)
        self._opened: OpenedCheckpoint | None = None
        self._metadata: Metadata | None = None  # of what is open, until DCP has asked for it
        self.keys: list[str] = []  # of what is open: arrays and objects
        self.reset(path)

    def open(self) -> OpenedCheckpoint:
        """Open the checkpoint that the next load reads; errors as ``dist_ckpt_strategies.open``."""
        root, deadline = self._root, Deadline.after(OPENING * self._options.timeout_s)
        open_ = partial(open_at, root, self._options, self._allow)
        self._opened = opened = run_within(deadline, root, open_)
        self._metadata = run_within(
            deadline, root, lambda: opened.unchanged(partial(_metadata, opened))
        )
        self.keys = list(self._metadata.state_dict_metadata)
        return opened

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """The content of the checkpoint, each array as one chunk. DCP calls it.

        (It hands on metadata of each rank's own where a parameter is named ``kwargs``.)
        """
        metadata, self._metadata = self._metadata, None
        if metadata is None or self._checkpoint.root != self._root:
            self.open()
            return self.read_metadata()
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - DCP's
        *args: Any,
        **_: Any,
    ) -> None:
        """Nothing is left to be done. DCP calls it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with what tells this save from others."""
        return replace(plan, storage_data=self._checkpoint.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are; CheckpointChangedError if ranks have opened different saves."""
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise CheckpointChangedError(
                f"{self.checkpoint_id}: ranks have opened different checkpoints there; it was "
                "replaced meanwhile, or a node sees an old copy: load again",
                path=str(self.checkpoint_id),
            )
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify what this rank needs; bytes are given to DCP last. DCP calls it.

        Raises:
            UnsafeObjectError: bytes need a class that is not allowed.
            PlanError: a tensor cannot be filled.
            StorageError: an array or object is missing or damaged.
        """
        opened, options = self._checkpoint, self._options
        deadline = Deadline.after(WORK * options.timeout_s)
        of_tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        of_objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        contents = _read_objects(opened, of_objects, options, deadline)
        targets = [planner.resolve_tensor(item) for item in of_tensors]
        stored = opened.stored

        def fill() -> None:
            specs = stored.find({item.storage_index.fqn for item in of_tensors})
            pairs = zip(of_tensors, targets, strict=True)
            reads = [_read(specs, item, target, options) for item, target in pairs]
            run_reads(stored.begin_reads, [r for r in reads if r[1].numel], options, deadline)

        stored.save.read(fill, ENDING * options.timeout_s)
        for item, target in zip(of_tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in of_objects:
            planner.load_bytes(item, io.BytesIO(contents[item.storage_index.fqn]))
        return done(None)

    @property
    def _checkpoint(self) -> OpenedCheckpoint:
        return self.open() if self._opened is None else self._opened  # it may have no keys


def _metadata(opened: OpenedCheckpoint) -> Metadata:
    content: dict[str, Any] = {key: BytesStorageMetadata() for key in _objects(opened)}
    stored, paths = opened.stored, dict[str, Any]()
    for key, spec in stored.find(stored.keys()).items():
        size = torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(torch_dtype(spec.dtype))
        content[key] = TensorStorageMetadata(properties, size, [chunk])
    if isinstance(stored, PackCheckpoint):
        for one in layers(stored):
            paths = one.index.facts.get(PATHS, {}) | paths
    return Metadata(content, {key: tuple(paths.get(key, (key,))) for key in content})


def _objects(opened: OpenedCheckpoint) -> dict[str, ObjectId]:
    """The objects by the keys that DCP knows them by: a grid of one by that of the object."""
    return {
        name.key if all(size == 1 for size in name.shape) else name.unique_key: name
        for name in opened.object_ids
    }


def _read_objects(
    opened: OpenedCheckpoint, items: Sequence[ReadItem], options: Options, deadline: Deadline
) -> dict[str, bytes]:
    """The stored bytes of objects, by key; they unpickle to allowed classes only."""
    keys = {item.storage_index.fqn for item in items}
    stored, limit_s = opened.stored, ENDING * options.timeout_s
    contents = dict.fromkeys(sorted(keys), b"")
    names = stored.save.read(partial(_objects, opened), limit_s) if keys else {}

    def read(key: str) -> None:
        contents[key] = stored.object_content(names[key])

    jobs = [Job(key, names[key].unique_key, partial(read, key)) for key in contents]
    wait = partial(Transfer(jobs, _NUM_READERS).wait, deadline.left_s)
    stored.save.read(wait, limit_s)
    is_whole = type(stored) is PackCheckpoint  # a base may be of another format
    require_allowed(contents.items(), opened.root, opened.allowed, is_whole=is_whole)
    return contents


def require_allowed(
    contents: Iterable[tuple[str, bytes]], place: object, allow: Allowed, *, is_whole: bool
) -> None:
    """Unpickle bytes once, to what is allowed: DCP does it freely. Equal ones are tried once.

    Raises:
        UnsafeObjectError: bytes need a class that is not allowed.
        CorruptCheckpointError: they are not whole; not checked of those that ``is_whole`` is of.
    """
    tried: set[bytes] = set()
    with allowing(allow):  # once, since the list is long
        for key, content in contents:
            if content not in tried:
                load_content(content, str(place), key, (), is_whole=is_whole)
                tried.add(content)


def _read(
    specs: Mapping[str, ArraySpec], item: ReadItem, target: torch.Tensor, options: Options
) -> TensorRead:
    """The read that an item of a plan asks for."""
    key, shape = item.storage_index.fqn, tuple(item.lengths)
    spec, tensor = specs[key], target.detach()
    require_plain(tensor, key=key, is_filled=True)
    if tuple(tensor.shape) != shape:
        raise PlanError(
            f"{key}: a tensor of shape {tuple(tensor.shape)} to fill, its plan has {shape}", key=key
        )
    if options.strict_dtype and tensor.dtype != torch_dtype(spec.dtype):
        raise PlanError(
            f"{key}: dtype {spec.dtype.value} in the checkpoint, {tensor.dtype} requested; load it "
            "as it is stored, or without strict_dtype, which converts it",
            key=key,
        )
    origin = item.storage_index.offset or (0,) * len(shape)
    start = tuple(map(sum, zip(origin, item.storage_offsets, strict=True)))
    return spec, Region(start, shape), tensor
