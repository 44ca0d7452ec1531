"""A checkpoint of any format as a mapping of lazy arrays: no process group, no GPU.

Every tool reads through this. What is stored how stands in ``formats`` and, of formats that are for
exchange alone, in the files of those names here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.core.array import COMMON_OBJECT, ArraySpec, ObjectId
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    array_not_found,
    raises_megatron_errors,
)
from dist_ckpt_strategies.formats.base import open_packs
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint, StoredCheckpoint
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    located,
    other_contents,
    read_marker,
)
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    default_allowed,
    load_content,
    require_archive,
)
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, file_errors
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.lazy_array import LazyArray
from dist_ckpt_strategies.tools.plan_convert import Format
from dist_ckpt_strategies.tools.safetensors import SafetensorsCheckpoint, holds_safetensors
from dist_ckpt_strategies.tools.zarr3 import Zarr3Checkpoint

T = TypeVar("T")


@raises_megatron_errors
def open(  # noqa: A001 - dist_ckpt_strategies.open
    path: str | Path,
    *,
    options: Options | None = None,
    allow: Allowed = (),
    verify: Verify | str | None = None,
) -> OpenedCheckpoint:
    """Open a finished checkpoint of any format to read it; nothing on disk changes.

    Works in any process, alone: needs no process group and no GPU. Reads names, shapes and places;
    elements are read when they are asked for.

    Args:
        path: directory of a checkpoint of ("safetensors", 1), ("zarr", 1), ("zarr", 3) or
            ("torch_dist", 1), or of files of safetensors, which have a model's arrays alone; of
            ("safetensors", 1) also its URL.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that objects and the common state may be unpickled to.
        verify: ``"read"`` compares all that is read with its digests, ``"off"`` does not; by
            default as the options say.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: what is there is no finished checkpoint.
        CorruptCheckpointError: its index is damaged.
        IncompatibleVersionError: this package does not read its format, or not from there.
        StrategyError: it is no address, or an option is out of range.
    """
    chosen = (options or options_from_environment()).with_changes(verify=verify)
    return open_at(located(path, chosen, what="path"), chosen, allow)


def open_at(root: Location, options: Options, allow: Allowed) -> OpenedCheckpoint:
    """Like ``open``, at an absolute place."""
    return OpenedCheckpoint(root, *_stored(root, options, allow), options, allow)


def _stored(root: Location, options: Options, allow: Allowed) -> tuple[Format, StoredCheckpoint]:
    if isinstance(root, Path) and holds_safetensors(root):
        return Format.SAFETENSORS, SafetensorsCheckpoint(root, options)
    backend = _backend(root)
    if backend == PACKS.sharded_format:
        return Format.PACK, open_packs(root, options)
    if isinstance(root, Bucket):
        expected = "('safetensors', 1): others are not read from an object store"
        raise IncompatibleVersionError(f"{root}: format {backend}; expected {expected}")
    kinds = {kind.backend: kind for kind in (Format.ZARR1, Format.ZARR3, Format.TORCH_DIST)}
    if backend not in kinds:
        expected = ", ".join(map(str, (PACKS.sharded_format, *kinds)))
        raise IncompatibleVersionError(f"{root}: format {backend}; expected {expected}")
    if kinds[backend] is Format.TORCH_DIST:
        from dist_ckpt_strategies.tools.torch_dist import TorchDistCheckpoint  # noqa: PLC0415

        return Format.TORCH_DIST, TorchDistCheckpoint(root, options, [*default_allowed(), *allow])
    kind = Format1Checkpoint if kinds[backend] is Format.ZARR1 else Zarr3Checkpoint
    return kinds[backend], kind(root, options)


def _backend(root: Location) -> tuple[str, int]:
    if isinstance(root, Path):
        with file_errors(None, root):
            is_none = root.is_dir() and not (root / MARKER_NAME).exists()
            other = other_contents(root) if is_none else ""
        if other:
            raise CheckpointNotFoundError(f"{root} is no checkpoint: {other}", path=str(root))
    marker = read_marker(root)
    if marker.common_format != ("torch", 1):
        raise IncompatibleVersionError(
            f"{root}: common state of format {marker.common_format}, expected ('torch', 1)"
        )
    return marker.sharded_format


class OpenedCheckpoint(Mapping[str, LazyArray]):
    """The arrays of a checkpoint by key, read as they are asked for. Any thread may read.

    A read raises a StorageError where elements are missing or damaged, or where another save has
    replaced the checkpoint since it was opened. What is compared:

    - ("safetensors", 1): everything, with its digest, unless ``verify`` is ``"off"``.
    - ("torch_dist", 1): it has no digests. Each shard is compared with the CRC-32 in its archive.
    - ("zarr", 1), ("zarr", 3), files of safetensors: they have no digests. Sizes are compared.

    Attributes:
        root: the place, absolute.
        kind: what ``convert`` calls its format.
        stored: what reads it in its own format.
        options: how it is read.
        objects: the ShardedObjects by unique key, ``KEY/shard_OFFSET_SHAPE``; each is unpickled,
            with the list of allowed classes, when it is asked for.
    """

    def __init__(
        self,
        root: Location,
        kind: Format,
        stored: StoredCheckpoint,
        options: Options,
        allow: Allowed,
    ) -> None:
        self.root, self.kind = root, kind
        self.stored, self.options, self._allow = stored, options, allow
        self.objects: Mapping[str, Any] = _Objects(self)

    @property
    def format(self) -> tuple[str, int]:
        """Backend and version of the sharded state, such as ("safetensors", 1)."""
        return self.kind.backend

    @property
    def identity(self) -> str:
        """Tells this save from others at the same place, where anything does."""
        return self.stored.identity

    @property
    def features(self) -> tuple[str, ...]:
        """Of packs; see ``pack.UNVERIFIED``."""
        return self.stored.features

    @cached_property
    @raises_megatron_errors
    def common(self) -> dict[str, Any]:
        """The common state: all that is neither a sharded tensor nor a ShardedObject."""
        content = self.unchanged(self.common_content)
        state: dict[str, Any] = load_content(
            content, f"{self.root}/{COMMON_NAME}", "common state", self.allowed
        )
        return state

    @raises_megatron_errors
    def __getitem__(self, key: str) -> LazyArray:
        """The array of that key; ArrayNotFoundError, a KeyError, if there is none."""
        if not isinstance(key, str):
            raise array_not_found(str(key), [], self.root)
        (array,) = self.unchanged(lambda: self.find([key]))
        return self._lazy(array)

    def __iter__(self) -> Iterator[str]:
        """The keys, sorted."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Number of arrays."""
        return len(self._keys)

    def zarr_store(self) -> Any:
        """The arrays as a read-only store of zarr-python: ``zarr.open(checkpoint.zarr_store())``.

        A Zarr v3 hierarchy, made up as it is read: the parts of a key between its slashes are
        groups, chunks have at most 16 MiB. Of dtypes that Zarr lacks, such as bfloat16, the bits
        are an array of uint8 or uint16, whose attribute ``dtype`` names them. Reads raise what
        those of the arrays raise.

        Raises a MissingDependencyError without zarr-python 3.
        """
        from dist_ckpt_strategies.tools.zarr_view import zarr_store  # noqa: PLC0415 - optional

        arrays = self.unchanged(lambda: self.find(self._keys))
        return zarr_store({array.key: self._lazy(array) for array in arrays})

    def __repr__(self) -> str:
        """Place, format and number of arrays."""
        return f"<checkpoint {self.root}: {self.format}, {len(self)} arrays>"

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.unchanged(lambda: [*self.stored.keys()])))

    # What the tools read

    @cached_property
    def allowed(self) -> Allowed:
        """The classes that objects may be unpickled to."""
        return [*default_allowed(), *self._allow]

    def unchanged(self, step: Callable[[], T]) -> T:
        """The result of a step that reads it; a StorageError if another save has replaced it."""
        return self.stored.save.read(step)

    def find(self, keys: Iterable[str]) -> list[ArraySpec]:
        """The arrays of these keys, sorted, as they are stored."""
        stored, arrays = self.stored, list(self.stored.find(keys).values())
        if isinstance(stored, PackCheckpoint):
            return [replace(array, blocks=tuple(stored.blocks(array.key))) for array in arrays]
        return arrays

    def read_into(self, *reads: ArrayRead) -> None:
        """Fill memory with regions of arrays that ``find`` has given. What has digests is verified.

        Raises a StorageError if elements are missing or damaged, or cannot be read.
        """
        self.stored.begin_reads(reads).wait(self.options.timeout_s)

    def _lazy(self, array: ArraySpec) -> LazyArray:
        def read(wanted: ArrayRead) -> None:
            self.unchanged(lambda: self.read_into(wanted))

        return LazyArray(array, read, self.options.max_inflight_bytes)

    @cached_property
    def object_ids(self) -> Sequence[ObjectId]:
        """All shards of objects, sorted; not one that stands for the file of the common state."""
        ids = sorted(self.unchanged(lambda: [*self.stored.object_ids()]))
        if COMMON_OBJECT in ids:
            try:
                self.stored.common_content()
            except IncompleteCheckpointError:
                ids.remove(COMMON_OBJECT)
        return tuple(ids)

    def object_content(self, object_id: ObjectId) -> bytes:
        """One shard of an object, for ``load_content``; errors as in ``read_into``."""
        content = self.stored.object_content(object_id)
        require_archive(content, self.stored.object_path(object_id), object_id.unique_key)
        return content

    def common_content(self) -> bytes:
        """The file of the common state, or what it would hold where an object has it instead.

        Megatron-Core 0.19 and later keep the common state among the objects. Raises
        IncompleteCheckpointError if there is neither, CorruptCheckpointError if it is damaged.
        """
        try:
            content = self.stored.common_content()
        except IncompleteCheckpointError:
            if COMMON_OBJECT not in self.stored.object_ids():
                raise
            return self.object_content(COMMON_OBJECT)
        require_archive(content, f"{self.root}/{COMMON_NAME}", "common state")
        return content


class _Objects(Mapping[str, Any]):
    """Objects by unique key."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self._opened = opened

    @cached_property
    def _ids(self) -> dict[str, ObjectId]:
        return {object_id.unique_key: object_id for object_id in self._opened.object_ids}

    @raises_megatron_errors
    def __getitem__(self, key: str) -> Any:
        opened = self._opened
        if key not in self._ids:
            raise array_not_found(key, list(self._ids), opened.root)
        content = opened.unchanged(lambda: opened.object_content(self._ids[key]))
        return load_content(content, f"{opened.root}/{key}", key, opened.allowed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<objects of {self._opened.root}: {', '.join(self._ids) or 'none'}>"
