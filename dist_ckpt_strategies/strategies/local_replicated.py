"""The backend ("local_replicated", 1): one checkpoint on the nodes' own disks, kept in copies.

Each rank writes its shards as a local shard file, with copies on the nodes of its clique. Every
node also gets ``common.pt`` and ``metadata.json``, which Megatron-Core looks for on every rank. The
shards of a save are below a directory that is named by the digest of its ``common.pt``: those of an
earlier save stay until the common state of the new one is in place.
"""

import logging
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_128_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import LocalOptions, Options
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.formats.checkpoints import common_digest
from dist_ckpt_strategies.formats.locations import CheckpointMarker, is_finished
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.packs import default_local_allowed, read_common
from dist_ckpt_strategies.local.replication import LazyCliqueReplicationStrategy
from dist_ckpt_strategies.local.reshard import resharded
from dist_ckpt_strategies.local.scan import BACKEND, SESSION
from dist_ckpt_strategies.local.shard_files import ShardDirectory
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
    split_common_object,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    Directory,
    file_errors,
    make_directories,
    set_aside,
)
from dist_ckpt_strategies.storage.io_pool import (
    ALL,
    OPENING,
    WORK,
    Deadline,
    raise_if_cancelled,
    run_within,
)
from dist_ckpt_strategies.strategies.configured import Configured, ConfiguredSaver

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ITERATION = re.compile(r"(\d+)\D*$")  # the last number of the directory's name


class _OnNodes(Configured):
    """Common parts of both strategies: the directory and the manager of this rank's node."""

    formats = ((BACKEND, 1),)

    _local: LocalOptions

    def root(self, checkpoint_dir: str | Path, comm: Communicator) -> Path:
        """The checkpoint's directory on this rank's node."""
        shared = Path(checkpoint_dir).absolute()
        if self._local.node_directory is None:
            return shared
        return Path(self._local.node_directory(comm.global_ranks[comm.rank])) / shared.name

    def _manager(
        self, root: Path, digest: str, cliques: LazyCliqueReplicationStrategy | None = None
    ) -> LocalCheckpointManager:
        return LocalCheckpointManager(
            root,
            session_id=digest,
            repl_strategy=cliques,
            group=self.group,
            timeout_s=self.options.timeout_s,
            max_bucket_bytes=self._local.max_bucket_bytes,
            allow=self._allow,
        )


class LocalReplicatedSaveShardedStrategy(_OnNodes, ConfiguredSaver, SaveShardedStrategy):  # type: ignore[misc]
    """Saves every rank's shards to its node, and copies of them within its clique.

    The common state of Megatron-Core, which rank 0 has written by then, or writes from the state
    dict, is copied to every node.

    Args:
        backend, version, group, options, allow: as for ConfiguredSaver.
        local: cliques and directories.
        cliques: shared with other strategies, so that process groups are made once.
        changes: fields of LocalOptions that differ from ``local``: ``replication_factor=3``.
    """

    @raises_megatron_errors
    def __init__(  # noqa: PLR0913 - Megatron's two, and options by name
        self,
        backend: str = BACKEND,
        version: int = 1,
        *,
        local: LocalOptions | None = None,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
        cliques: LazyCliqueReplicationStrategy | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(backend, version, group=group, options=options, allow=allow)
        self._local = replace(local or LocalOptions(), **changes)
        self._cliques = cliques or LazyCliqueReplicationStrategy(
            self._local.replication_jump,
            self._local.replication_factor,
            allow_uneven=self._local.allow_uneven,
            max_bucket_bytes=self._local.max_bucket_bytes,
            timeout_s=self.options.timeout_s,
        )

    @raises_megatron_errors
    def save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        *,
        common_dir: Path | None = None,
        commit: Callable[[], None] | None = None,
    ) -> None:
        """Write this rank's shards, copies of its clique's, and the common state, durably.

        Collective over the group. Does not write ``metadata.json`` on the node of the first rank,
        where Megatron-Core does, but on all others.

        Args:
            sharded_state_dict: this rank's.
            checkpoint_dir: its name is that of the checkpoint on every node.
            common_dir: where the first rank finds ``common.pt``; an earlier checkpoint stays as it
                is until all else is written. None: it is in ``checkpoint_dir`` already.
            commit: moves it from there to ``checkpoint_dir``, and the marker; called on the first
                rank. What the save replaces is removed after it.

        Raises:
            PlanError: a tensor cannot be stored.
            UnsafeObjectError: an object is of a class that is not allowed.
            StorageError: a file cannot be written; a PeerError of that class elsewhere.
        """
        comm = self.communicator("save", f"to {checkpoint_dir}")
        root = run_collectively(comm, lambda: self.root(checkpoint_dir, comm))
        place = Directory(Path(common_dir or checkpoint_dir).absolute())
        sharded, common_object = sharded_state_dict, None
        if common_dir is None:
            sharded, common_object = split_common_object(sharded_state_dict)

        def prepare() -> bytes:
            with file_errors(None, root):
                make_directories(root)
            if common_dir is None:
                set_aside(root, MARKER_NAME)
            return b"" if comm.rank else self._common_content(place, common_object)

        name = partial(self.within, WORK, root, ShardDirectory(root).name)
        common, *_ = run_and_gather_bytes(comm, lambda: self.within(OPENING, root, prepare))
        described = run_and_gather(comm, lambda: [name(), *_described(sharded)])
        state = self._state(comm, sharded, described)
        digest, iteration = xxh3_128_hexdigest(common), _ITERATION.search(root.name)
        manager = run_collectively(comm, lambda: self._manager(root, digest, self._cliques))
        manager.save(state, int(iteration[1]) if iteration else 0)
        nodes = [node for node, *_ in described]
        is_with_first = nodes[comm.rank] == nodes[0] and self._local.node_directory is None
        is_first = nodes.index(nodes[comm.rank]) == comm.rank  # of its node
        write = partial(self.within, ALL, root, partial(_write_common, root, common))
        run_collectively(comm, lambda: None if is_with_first else write())
        if commit is not None:
            run_on_first_rank(comm, commit)
        run_collectively(comm, lambda: self._remove_others(root, digest) if is_first else None)

    def _common_content(self, place: Directory, common_object: Any | None) -> bytes:
        """The content of ``common.pt``, which is written first where it is an object."""
        if common_object is not None:
            name, value = common_object.key, common_object.data
            content = dump_loadable(value, name=name, allow=self.allowed)
            place.write(COMMON_NAME, content, key="common state")
        return place.read(COMMON_NAME)

    def _remove_others(self, root: Path, digest: str) -> None:
        """Remove the local shards of other saves on this node; a failure is logged."""

        def remove() -> None:
            for name in set(_sessions(root)).difference({digest}):
                raise_if_cancelled()
                shutil.rmtree(root / name)

        try:
            self.within(ALL, root, remove)
        except (OSError, StorageError) as error:
            logger.warning("%s: local shards of an earlier save are still there: %s", root, error)

    def _state(
        self, comm: Communicator, sharded: StateDict, described: Sequence[Message]
    ) -> MCoreTensorAwareStateDict:
        """This rank's shards, with a list of all that the checkpoint holds. Collective."""
        arrays = {key: facts for _, by_key, _ in described for key, facts in by_key.items()}
        objects = sorted(name for *_, names in described for name in names)
        listed = [[key, *arrays[key]] for key in sorted(arrays)]
        common = {"stored": {"arrays": listed, "objects": objects}}
        if self._local.algo == "atomic":
            return run_collectively(comm, lambda: MCoreTensorAwareStateDict(common, sharded))
        return MCoreTensorAwareStateDict.distributed(comm, common, sharded)[0]


class LocalReplicatedLoadShardedStrategy(_OnNodes, LoadShardedStrategy):  # type: ignore[misc]
    """Loads every rank's shards from its node, or from a rank that has a copy.

    Arguments are as for a save; cliques play no role.
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
        ``("safetensors", 1)`` and ``("zarr", 1)``.

        Raises:
            PlanError: another dtype is stored, and the option ``strict_dtype`` is set.
            CorruptCheckpointError: ``common.pt``, which Megatron-Core has read already, belongs to
                no local shards, or to others than that of the first rank.
            NoReplicasAvailableError: all copies of some rank's shards are lost or damaged.
            CoverageError: a requested region or object is in no file.
        """
        comm = self.communicator("load", f"from {checkpoint_dir}")
        common_path = Path(checkpoint_dir).absolute() / COMMON_NAME
        root = run_collectively(comm, lambda: self.root(checkpoint_dir, comm))

        def look() -> list[Any]:
            return [common_digest(common_path.parent), _sessions(root)]

        seen = run_and_gather(comm, lambda: self.within(ALL, root, look))
        digest = seen[0][0]

        def require_common() -> LocalCheckpointManager:
            sessions = {name for _, names in seen for name in names}
            _require_common_of(sessions, common_path, seen[comm.rank][0], digest)
            return self._manager(root, digest)

        state, _ = run_collectively(comm, require_common).load(on_host=True)
        held, wanted = state.sharded_state_dict, sharded_state_dict
        return resharded(comm, held, wanted, self.options, fills=True, name=checkpoint_dir)

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each array. Rank-local.

        Raises:
            IncompleteCheckpointError: this node has no file of it; call ``prepare_local_load``.
        """
        stored = self.load_sharded_metadata(checkpoint_dir)
        return {key: stored[key] for key in stored if isinstance(stored[key], ShardedTensor)}

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        root = self.root(checkpoint_dir, self.communicator("look at a checkpoint"))
        common_path = Path(checkpoint_dir).absolute() / COMMON_NAME
        allowed = default_local_allowed(self._allow)

        def read() -> Any:
            digest = common_digest(common_path.parent)
            _require_common_of(_sessions(root), common_path, digest, digest)
            return read_common(ShardDirectory(root / digest), allowed)

        common = self.within(ALL, root, read)
        if common is None:
            raise IncompleteCheckpointError(
                f"{root}: this node has no local shard file of the checkpoint; call "
                "prepare_local_load on every rank first",
                path=str(root),
            )
        stored = common["stored"]
        arrays = {key: metadata_tensor(key, tuple(shape), t) for key, shape, t in stored["arrays"]}
        objects = [ObjectId(key, tuple(at), tuple(shape)) for key, at, shape in stored["objects"]]
        return arrays | {name.unique_key: metadata_object(name) for name in objects}

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Not offered: all shards of a rank are one file, with copies on other nodes."""
        raise StrategyError(
            f"{checkpoint_dir}: arrays of {key_prefix!r} cannot be removed from a local "
            "checkpoint; save another without them"
        )


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
    restore_common(comm, root, str(checkpoint_dir), loader.options.timeout_s)


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


def restore_common(comm: Communicator, root: Path, name: str, timeout_s: float) -> None:
    """Write the common state and the marker on every node that has lost them. Collective."""

    def common_here() -> bytes:
        sessions = _sessions(root)
        with suppress(IncompleteCheckpointError):
            content = Directory(root).read(COMMON_NAME) if is_finished(root) else b""
            return content if not sessions or xxh3_128_hexdigest(content) in sessions else b""
        return b""

    opening = Deadline.after(OPENING * timeout_s)
    everyone = run_and_gather_bytes(comm, lambda: run_within(opening, root, common_here))
    common = next(filter(None, everyone), None)

    def restore() -> None:
        if common is None:
            raise IncompleteCheckpointError(
                f"{name}: no node has an undamaged {COMMON_NAME} and metadata.json; load an older "
                "checkpoint",
                path=name,
            )
        if everyone[comm.rank] != common:
            work = Deadline.after(WORK * timeout_s)
            run_within(work, root, partial(_write_common, root, common))

    run_collectively(comm, restore)


def _write_common(root: Path, common: bytes) -> None:
    """Write ``common.pt`` and the marker. All ranks of a node may: they write equal files."""
    Directory(root).write(COMMON_NAME, common, key="common state")
    Directory(root).write(MARKER_NAME, CheckpointMarker(BACKEND).to_json())


def _sessions(root: Path) -> list[str]:
    """Digests of the common states of which local shards are on this node."""
    return sorted(filter(SESSION.fullmatch, Directory(root).names()))


def _require_common_of(
    sessions: Collection[str], common_path: Path, digest: str, expected: str
) -> None:
    """Raise unless ``common.pt``, which Megatron-Core has read, belongs to the shards to load."""
    if digest == expected and (digest in sessions or not sessions):
        return
    wanted = " or ".join(sessions) if digest == expected else f"{expected}, as on the first rank"
    raise CorruptCheckpointError(
        f"common state: {common_path} has digest {digest or '(no such file)'}, expected {wanted}; "
        "it is damaged, or of another save; prepare_local_load restores it from another node",
        path=str(common_path),
    )
