"""The backend ("local_replicated", 1): one checkpoint on the nodes' own disks, kept in copies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import LocalOptions, Options, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.commit import make_directory, set_marker_aside
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.part_files import PartDirectory
from dist_ckpt_strategies.local.replication import LazyCliqueReplicationStrategy
from dist_ckpt_strategies.megatron.bases import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    ShardedTensor,
)
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    metadata_object,
    metadata_tensor,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, file_errors, read_file
from dist_ckpt_strategies.storage.io_pool import run_with_limit
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_limit
from dist_ckpt_strategies.strategies.local_directory import (
    BACKEND,
    VERSION,
    complete_directory,
    digest_of_common,
    require_common_of_save,
    restore_common,
    stored_in,
)
from dist_ckpt_strategies.strategies.registry import require_own
from dist_ckpt_strategies.strategies.sharded_load import (
    Conversions,
    conversions,
    destination,
    warn_of_conversions,
)

_ITERATION = re.compile(r"(\d+)\D*$")


class LocalReplicatedSaveShardedStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """Saves every rank's shards to its node, and copies of them within its clique.

    The common state of Megatron-Core, which rank 0 has written by then, is copied to every node.

    Args:
        backend: ``"local_replicated"``.
        version: 1.
        local: cliques and directories.
        group: all ranks; the world by default.
        options: timeouts; by default what the environment says.
        allow: further classes that objects may be of.
        cliques: shared with other strategies, so that process groups are made once.
        changes: fields of LocalOptions that are others than in ``local``: ``replication_factor=3``.
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
        require_own((BACKEND, VERSION), backend, version)
        super().__init__(backend, version)
        changed = replace(local or LocalOptions(), **changes)
        self._node = _Node(changed, group, _options(options), tuple(allow))
        self._cliques = cliques or lazy_cliques(self._node.local, self._node.options)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are part of a rank's state."""
        return True

    @raises_megatron_errors
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part and its clique's, and the common state, durably.

        Collective over the group. Does not write ``metadata.json`` on the node of the first rank,
        where Megatron-Core does, but on all others.

        Raises:
            PlanError: a tensor cannot be stored.
            UnsafeObjectError: an object is of a class that is not allowed.
            StorageError: a part cannot be written; a PeerError of that class elsewhere.
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
            common_dir: where the first rank finds ``common.pt``; its caller moves that into place,
                and an earlier checkpoint stays as it is until all else is written. None: it is in
                ``checkpoint_dir`` already.
        """
        comm = self._node.communicator("save", f"to {checkpoint_dir}")
        root, manager = agree(comm, lambda: self._node.opened(checkpoint_dir, comm, self._cliques))

        def prepare() -> bytes:
            make_directory(root)
            if common_dir is None:
                set_marker_aside(root)
            common_path = Path(common_dir or checkpoint_dir).absolute() / COMMON_NAME
            with file_errors("common state", common_path):
                return read_file(common_path) if comm.rank == 0 else b""

        def complete() -> None:
            is_first_node = names[comm.rank] == names[0] and self._node.local.node_directory is None
            if not is_first_node:
                complete_directory(root, common, is_marked=True)

        with time_limit(self._node.options.timeout_s):
            common = agree_and_gather_bytes(comm, partial(run_with_limit, prepare, root))[0]
            restart_limit()
        described = agree_and_gather(comm, lambda: _described(sharded_state_dict))
        extra = {"common_digest": digest_of_common(common), "stored": _union(described)}
        state = self._state(comm, extra, sharded_state_dict)
        manager.save(state, _iteration_of(checkpoint_dir))
        with time_limit(self._node.options.timeout_s):
            names = agree_and_gather(comm, lambda: PartDirectory(root).name())
            agree(comm, complete)

    def _state(
        self, comm: Communicator, extra: StateDict, sharded: StateDict
    ) -> MCoreTensorAwareStateDict:
        if self._node.local.algo == "atomic":
            return agree(comm, lambda: MCoreTensorAwareStateDict(extra, sharded))
        state, _ = MCoreTensorAwareStateDict.dealt_out(comm, extra, sharded)
        return state


class LocalReplicatedLoadShardedStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Loads every rank's shards from its node, or from a rank that has a copy.

    Args:
        local: directories; cliques play no part in a load.
        group: all ranks; the world by default.
        options: timeouts; by default what the environment says.
        allow: further classes that objects may be of.
        changes: fields of LocalOptions that are others than in ``local``.
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
        changed = replace(local or LocalOptions(), **changes)
        self._node = _Node(changed, group, _options(options), tuple(allow))

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are part of a rank's state."""
        return True

    def with_strict_dtype(self) -> Self:
        """The same strategy with the option ``strict_dtype`` set."""
        other = copy(self)
        options = self._node.options.with_changes(strict_dtype=True)
        other._node = replace(self._node, options=options)  # noqa: SLF001 - a copy
        return other

    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> StateDict:
        """Load what the state dict asks for, in any parallel layout.

        Collective over the group. Tensors are filled, and converted, as by ``load`` of
        ``("zarr", 1)`` and ``("zarr", 2)``.

        Raises:
            DTypeMismatchError: another dtype is stored, and the option ``strict_dtype`` is set.
            CorruptCheckpointError: ``common.pt``, which Megatron-Core has read already, is not the
                one of this save.
            NoReplicasAvailableError: all copies of some rank's part are lost or damaged.
            CoverageError: no part holds something that is wanted.
        """
        comm = self._node.communicator("load", f"from {checkpoint_dir}")
        _, manager = agree(comm, lambda: self._node.opened(checkpoint_dir, comm, None))
        state, _ = manager.load()
        own: dict[int, torch.Tensor] = {}

        def check() -> Conversions:
            content = state.common_state_dict
            require_common_of_save(checkpoint_dir, content)
            values = sharded_values(sharded_state_dict)
            tensors = [value for value in values if isinstance(value, ShardedTensor)]
            stored = {key: getattr(torch, dtype) for key, _, dtype in content["stored"]["arrays"]}
            converted = conversions(tensors, stored, is_strict=self._node.options.strict_dtype)
            own.update({id(t): destination(t) for t in tensors if t.data is not None})
            return converted

        def deliver(tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
            if tensor.data is None:
                return loaded.to(tensor.dtype)
            own[id(tensor)].detach().copy_(loaded)
            return own[id(tensor)]

        with time_limit(self._node.options.timeout_s):
            converted = agree_and_gather(comm, check)
        found = dict(state.loaded(comm, sharded_state_dict, deliver))
        warn_of_conversions(comm, checkpoint_dir, converted)
        return found

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each array. Rank-local.

        Raises:
            IncompleteCheckpointError: this node has no part; call ``prepare_local_load``.
        """
        arrays, _ = self._stored(checkpoint_dir)
        return {array.key: metadata_tensor(array) for array in arrays}

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        arrays, objects = self._stored(checkpoint_dir)
        found: StateDict = {array.key: metadata_tensor(array) for array in arrays}
        return found | {name.unique_key: metadata_object(name) for name in objects}

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Not offered: a part is one file, and copies of it are on other nodes."""
        raise StrategyError(
            f"{checkpoint_dir}: arrays of {key_prefix!r} cannot be removed from a local "
            "checkpoint; save another without them"
        )

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"local_replicated"``."""
        require_own((BACKEND, VERSION), loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_own((BACKEND, VERSION), BACKEND, loaded_version)

    def _stored(self, checkpoint_dir: str | Path) -> tuple[list[ArraySpec], list[ObjectId]]:
        comm = self._node.communicator("look at a checkpoint")
        with time_limit(self._node.options.timeout_s):
            return stored_in(PartDirectory(self._node.root(checkpoint_dir, comm)))


@raises_megatron_errors
def prepare_local_load(
    checkpoint_dir: str | Path,
    *,
    local: LocalOptions | None = None,
    group: ProcessGroup | None = None,
    options: Options | None = None,
) -> None:
    """Put ``common.pt`` and ``metadata.json`` on every node that has lost them.

    Collective. Megatron-Core's ``load`` looks for both on every rank before it asks a strategy;
    this package's own ``load`` calls this itself.

    Raises:
        IncompleteCheckpointError: no node has them.
    """
    node = _Node(local or LocalOptions(), group, _options(options), ())
    comm = node.communicator("preparation", f"of {checkpoint_dir}")
    root = agree(comm, lambda: node.root(checkpoint_dir, comm))
    with time_limit(node.options.timeout_s):
        restore_common(comm, root, str(checkpoint_dir))


@dataclass(frozen=True, slots=True)
class _Node:
    """What both strategies know of this rank's node."""

    local: LocalOptions
    group: ProcessGroup | None
    options: Options
    allow: tuple[Any, ...]

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        return open_communicator(
            self.group, timeout_s=self.options.timeout_s, purpose=purpose, detail=detail
        )

    def root(self, checkpoint_dir: str | Path, comm: Communicator) -> Path:
        """Where this rank's node keeps the checkpoint."""
        found = Path(checkpoint_dir).absolute()
        if self.local.node_directory is None:
            return found
        return Path(self.local.node_directory(comm.global_rank(comm.rank))) / found.name

    def opened(
        self,
        checkpoint_dir: str | Path,
        comm: Communicator,
        cliques: LazyCliqueReplicationStrategy | None,
    ) -> tuple[Path, LocalCheckpointManager]:
        """Where this rank's node keeps the checkpoint, and what keeps it there. Rank-local."""
        root = self.root(checkpoint_dir, comm)
        return root, LocalCheckpointManager(
            root,
            repl_strategy=cliques,
            group=self.group,
            timeout_s=self.options.timeout_s,
            max_bucket_bytes=self.local.max_bucket_bytes,
            allow=self.allow,
        )


def lazy_cliques(local: LocalOptions, options: Options) -> LazyCliqueReplicationStrategy:
    """The cliques of the options; their process groups are made at the first save."""
    return LazyCliqueReplicationStrategy(
        local.replication_jump,
        local.replication_factor,
        allow_uneven=local.allow_uneven,
        max_bucket_bytes=local.max_bucket_bytes,
        timeout_s=options.timeout_s,
    )


def _options(options: Options | None) -> Options:
    return options or options_from_environment()


def _iteration_of(checkpoint_dir: str | Path) -> int:
    """The number that the directory's name ends with, or 0."""
    found = _ITERATION.search(Path(checkpoint_dir).name)
    return int(found[1]) if found else 0


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


def _union(described: Sequence[Any]) -> dict[str, Any]:
    arrays = {key: found for some, _ in described for key, found in some.items()}
    objects = sorted(name for _, names in described for name in names)
    return {"arrays": [[key, *arrays[key]] for key in sorted(arrays)], "objects": objects}
