"""The backend ("local_replicated", 1): one checkpoint on the nodes' own disks, kept in copies.

Each rank writes its shards as a local shard file, with copies on the nodes of its clique. Every
node also gets ``common.pt`` and ``metadata.json``, which Megatron-Core looks for on every rank.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import (
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import LocalOptions, Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StrategyError,
)
from dist_ckpt_strategies.formats.commit import make_directory, set_marker_aside
from dist_ckpt_strategies.formats.locations import is_finished
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.part_files import PartDirectory, read_first_header
from dist_ckpt_strategies.local.replication import LazyCliqueReplicationStrategy
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    metadata_object,
    metadata_tensor,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    ShardedTensor,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    conversions,
    destination,
    warn_of_conversions,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    file_errors,
    read_file,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import limited, run_with_limit
from dist_ckpt_strategies.storage.store import Directory
from dist_ckpt_strategies.storage.time_limit import OPENING, WORK, restart_limit, time_limit
from dist_ckpt_strategies.strategies.registry import Configured, require_own

BACKEND = "local_replicated"
VERSION = 1

_ITERATION = re.compile(r"(\d+)\D*$")
"""The number that the directory's name ends with."""


class _OnNodes(Configured):
    """What both strategies know about this rank's node."""

    _local: LocalOptions

    def root(self, checkpoint_dir: str | Path, comm: Communicator) -> Path:
        """The checkpoint's directory on this rank's node."""
        found = Path(checkpoint_dir).absolute()
        if self._local.node_directory is None:
            return found
        return Path(self._local.node_directory(comm.global_rank(comm.rank))) / found.name

    def _manager(
        self,
        checkpoint_dir: str | Path,
        comm: Communicator,
        cliques: LazyCliqueReplicationStrategy | None,
    ) -> LocalCheckpointManager:
        return LocalCheckpointManager(
            self.root(checkpoint_dir, comm),
            repl_strategy=cliques,
            group=self._group,
            timeout_s=self.options.timeout_s,
            max_bucket_bytes=self._local.max_bucket_bytes,
            allow=self._allow,
        )


class LocalReplicatedSaveShardedStrategy(_OnNodes, SaveShardedStrategy):  # type: ignore[misc]
    """Saves every rank's shards to its node, and copies of them within its clique.

    The common state of Megatron-Core, which rank 0 has written by then, is copied to every node.

    Args:
        backend: ``"local_replicated"``.
        version: 1.
        local: cliques and directories.
        group: all ranks; the world by default.
        options: timeouts; by default from the environment.
        allow: further classes that objects may be of.
        cliques: shared with other strategies, so that process groups are made once.
        changes: fields of LocalOptions that differ from ``local``: ``replication_factor=3``.
    """

    @raises_megatron_errors
    def __init__(  # noqa: PLR0913 - Megatron's two, and options by name
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        local: LocalOptions | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
        cliques: LazyCliqueReplicationStrategy | None = None,
        **changes: Any,
    ) -> None:
        require_own(BACKEND, (VERSION,), backend, version)
        super().__init__(backend, version)
        self._configure(options, allow, group)
        self._local = replace(local or LocalOptions(), **changes)
        self._cliques = cliques or LazyCliqueReplicationStrategy(
            self._local.replication_jump,
            self._local.replication_factor,
            allow_uneven=self._local.allow_uneven,
            max_bucket_bytes=self._local.max_bucket_bytes,
            timeout_s=self.options.timeout_s,
        )

    @raises_megatron_errors
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards, copies of its clique's, and the common state, durably.

        Collective over the group. Does not write ``metadata.json`` on the node of the first rank,
        where Megatron-Core does, but on all others.

        Raises:
            PlanError: a tensor cannot be stored.
            UnsafeObjectError: an object is of a class that is not allowed.
            StorageError: a file cannot be written; a PeerError of that class elsewhere.
        """
        self.save_with_common(sharded_state_dict, checkpoint_dir, None)

    @raises_megatron_errors
    def save_with_common(
        self, sharded_state_dict: StateDict, checkpoint_dir: str | Path, common_dir: Path | None
    ) -> None:
        """Like ``save``, for a caller that has not yet replaced an earlier checkpoint.

        Args:
            sharded_state_dict: as in ``save``.
            checkpoint_dir: as in ``save``.
            common_dir: where the first rank finds ``common.pt``; the caller moves it into place
                later, and an earlier checkpoint stays as it is until all else is written. None: it
                is in ``checkpoint_dir`` already.
        """
        comm = self.communicator("save", f"to {checkpoint_dir}")
        manager = run_collectively(comm, lambda: self._manager(checkpoint_dir, comm, self._cliques))
        root = manager.root_local_ckpt_dir

        def prepare() -> bytes:
            make_directory(root)
            if common_dir is None:
                set_marker_aside(root)
            common_path = Path(common_dir or checkpoint_dir).absolute() / COMMON_NAME
            with file_errors("common state", common_path):
                return read_file(common_path) if comm.rank == 0 else b""

        def complete() -> None:
            is_first_node = names[comm.rank] == names[0] and self._local.node_directory is None
            if not is_first_node:
                _write_common(root, common)

        with time_limit(self.options.timeout_s, OPENING, then=WORK):
            common = run_and_gather_bytes(comm, partial(run_with_limit, prepare, root))[0]
            restart_limit()
        described = run_and_gather(comm, lambda: _described(sharded_state_dict))
        arrays = {key: found for some, _ in described for key, found in some.items()}
        stored = {
            "arrays": [[key, *arrays[key]] for key in sorted(arrays)],
            "objects": sorted(name for _, names in described for name in names),
        }
        content = {"common_digest": _digest(common), "stored": stored}
        if self._local.algo == "atomic":
            state = run_collectively(
                comm, lambda: MCoreTensorAwareStateDict(content, sharded_state_dict)
            )
        else:
            state, _ = MCoreTensorAwareStateDict.dealt_out(comm, content, sharded_state_dict)
        iteration = _ITERATION.search(Path(checkpoint_dir).name)
        manager.save(state, int(iteration[1]) if iteration else 0)
        with time_limit(self.options.timeout_s):
            names = run_and_gather(comm, lambda: PartDirectory(root).name())
            run_collectively(comm, complete)


class LocalReplicatedLoadShardedStrategy(_OnNodes, LoadShardedStrategy):  # type: ignore[misc]
    """Loads every rank's shards from its node, or from a rank that has a copy.

    Args:
        local: directories; cliques play no role in a load.
        group: all ranks; the world by default.
        options: timeouts; by default from the environment.
        allow: further classes that objects may be of.
        changes: fields of LocalOptions that differ from ``local``.
    """

    @raises_megatron_errors
    def __init__(
        self,
        *,
        local: LocalOptions | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
        **changes: Any,
    ) -> None:
        super().__init__()
        self._configure(options, allow, group)
        self._local = replace(local or LocalOptions(), **changes)

    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> StateDict:
        """Load what the state dict requests, in any parallel layout.

        Collective over the group. Tensors are filled, and converted, as by ``load`` of
        ``("zarr", 1)`` and ``("zarr", 2)``.

        Raises:
            DTypeMismatchError: another dtype is stored, and the option ``strict_dtype`` is set.
            CorruptCheckpointError: ``common.pt``, which Megatron-Core has read already, is not the
                one of this save.
            NoReplicasAvailableError: all copies of some rank's shards are lost or damaged.
            CoverageError: a requested region or object is in no file.
        """
        comm = self.communicator("load", f"from {checkpoint_dir}")
        manager = run_collectively(comm, lambda: self._manager(checkpoint_dir, comm, None))
        state, _ = manager.load()
        own: dict[int, torch.Tensor] = {}

        def check() -> Conversions:
            content = state.common_state_dict
            _require_common_of_save(Path(checkpoint_dir).absolute(), content["common_digest"])
            values = sharded_values(sharded_state_dict)
            tensors = [value for value in values if isinstance(value, ShardedTensor)]
            stored = {key: dtype for key, _, dtype in content["stored"]["arrays"]}
            converted = conversions(tensors, stored, is_strict=self.options.strict_dtype)
            own.update({id(t): destination(t) for t in tensors if t.data is not None})
            return converted

        def fill(tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
            if tensor.data is None:
                return loaded.to(tensor.dtype)
            own[id(tensor)].detach().copy_(loaded)
            return own[id(tensor)]

        with time_limit(self.options.timeout_s):
            converted = run_and_gather(comm, check)
        found = dict(state.loaded(comm, sharded_state_dict, fill))
        warn_of_conversions(comm, checkpoint_dir, converted)
        return found

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each array. Rank-local.

        Raises:
            IncompleteCheckpointError: this node has no file of it; call ``prepare_local_load``.
        """
        found = self._stored(checkpoint_dir).items()
        return {key: value for key, value in found if isinstance(value, ShardedTensor)}

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        return self._stored(checkpoint_dir)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Not offered: all shards of a rank are one file, with copies on other nodes."""
        raise StrategyError(
            f"{checkpoint_dir}: arrays of {key_prefix!r} cannot be removed from a local "
            "checkpoint; save another without them"
        )

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"local_replicated"``."""
        require_own(BACKEND, (VERSION,), loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_own(BACKEND, (VERSION,), BACKEND, loaded_version)

    def _stored(self, checkpoint_dir: str | Path) -> StateDict:
        """The arrays and objects of the whole checkpoint, from a file on this node."""
        comm = self.communicator("look at a checkpoint")
        with time_limit(self.options.timeout_s):
            root = self.root(checkpoint_dir, comm)
            header = read_first_header(PartDirectory(root))
        if header is None:
            raise IncompleteCheckpointError(
                f"{root}: this node has no local shard file of the checkpoint; every rank has to "
                "call prepare_local_load first",
                path=str(root),
            )
        stored = header.content["common"]["stored"]
        found: StateDict = {}
        for key, shape, dtype in stored["arrays"]:
            chunk = tuple(max(1, extent) for extent in shape)
            found[key] = metadata_tensor(ArraySpec(key, tuple(shape), DType(dtype), chunk))
        for key, offset, shape in stored["objects"]:
            name = ObjectId(key, tuple(offset), tuple(shape))
            found[name.unique_key] = metadata_object(name)
        return found


@raises_megatron_errors
def prepare_local_load(
    checkpoint_dir: str | Path,
    *,
    local: LocalOptions | None = None,
    group: ProcessGroup | None = None,
    options: Options | None = None,
) -> None:
    """Restore ``common.pt`` and ``metadata.json`` on every node that has lost them.

    Collective. Megatron-Core's ``load`` looks for both on every rank before it asks a strategy;
    this package's own ``load`` calls this itself.

    Raises:
        IncompleteCheckpointError: no node has them.
    """
    loader = LocalReplicatedLoadShardedStrategy(local=local, group=group, options=options)
    comm = loader.communicator("preparation", f"of {checkpoint_dir}")
    root = run_collectively(comm, lambda: loader.root(checkpoint_dir, comm))
    with time_limit(loader.options.timeout_s, OPENING, then=WORK):
        restore_common(comm, root, str(checkpoint_dir))


def restore_common(comm: Communicator, root: Path, name: str) -> None:
    """Write the common state and the marker on every node that has lost them. Collective.

    Args:
        comm: all ranks.
        root: this rank's directory.
        name: the checkpoint, for messages.
    """

    def own() -> bytes:
        path = root / COMMON_NAME
        if not (is_finished(root) and path.exists()):
            return b""
        with file_errors("common state", path):
            content = read_file(path)
        found = read_first_header(PartDirectory(root))
        is_of_save = found is None or found.content["common"]["common_digest"] == _digest(content)
        return content if is_of_save else b""

    everyone = run_and_gather_bytes(comm, partial(run_with_limit, own, root))
    restart_limit()
    common = next(filter(None, everyone), None)

    def restore() -> None:
        if common is None:
            raise IncompleteCheckpointError(
                f"{name}: no node has a whole {COMMON_NAME} and metadata.json", path=name
            )
        if everyone[comm.rank] != common:
            make_directory(root)
            _write_common(root, common)

    run_collectively(comm, restore)


def _described(sharded: StateDict) -> list[Any]:
    """The arrays and objects of a state dict, of JSON types."""
    arrays, objects = {}, []
    for value in sharded_values(sharded):
        if isinstance(value, ShardedTensor):
            spec = shard_spec(value)
            arrays[spec.key] = [list(spec.array_shape), spec.dtype.value]
        elif is_main(value):
            name = object_id(value)
            objects.append([name.key, list(name.offset), list(name.shape)])
    return [arrays, objects]


def _digest(common: bytes) -> str:
    """Links local shard files to the common state of their save."""
    return xxhash.xxh3_128_hexdigest(common)


@limited
def _write_common(root: Path, common: bytes) -> None:
    """Write ``common.pt`` and the marker. All ranks of a node may: they write equal files."""
    path = root / COMMON_NAME
    with file_errors("common state", path):
        if not (path.exists() and read_file(path) == common):
            write_file(path, common)
    Directory(root).write(MARKER_NAME, CheckpointMarker(BACKEND, VERSION).to_json())


@limited
def _require_common_of_save(checkpoint_dir: Path, expected: str) -> None:
    """Raise unless ``common.pt``, which Megatron-Core has read already, has this digest."""
    path = checkpoint_dir / COMMON_NAME
    with file_errors("common state", path):
        found = _digest(read_file(path))
    if found != expected:
        raise CorruptCheckpointError(
            f"common state: {path} has digest {found}, expected {expected}; it is damaged, or of "
            "another save",
            path=str(path),
        )
