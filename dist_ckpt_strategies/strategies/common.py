"""Common state and objects in Megatron-Core's own files, read with an allow-list."""

from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import run_on_first_rank
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import require_storable_keys
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint
from dist_ckpt_strategies.formats.locations import (
    Location,
    holds_packs,
    located,
    place_of,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, load_content
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave, PackCheckpoint
from dist_ckpt_strategies.formats.zarr2 import object_ids, object_name
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    mapped_values,
    metadata_object,
    object_id,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    raises_megatron_errors,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, Directory, set_aside
from dist_ckpt_strategies.storage.io_pool import ALL, Deadline, run_within
from dist_ckpt_strategies.strategies.configured import Configured, ConfiguredSaver
from dist_ckpt_strategies.strategies.registry import REGISTERED
from dist_ckpt_strategies.tools.opened import open_at

TORCH = "torch", 1

COMMON_STATE = "common state"
"""The name of it in messages."""


def common_read_last(root: Location) -> OpenedSave | None:
    """The save whose common state Megatron-Core's ``load`` under way has read; None: not known.

    It calls a common strategy and then a sharded one, and has no argument for what both read. So
    the registered common strategy, where it is one of this package, keeps what it has opened.

    Raises:
        CheckpointChangedError: another save has replaced that. The next call opens the new one.
    """
    key: Any = (StrategyAction.LOAD_COMMON, *TORCH)
    _, strategy = REGISTERED.get(key, (None, None))
    if not isinstance(strategy, TorchCommonLoadStrategy):
        return None
    save, strategy.opened = strategy.opened, None
    if save is None or save.root != root:
        return None
    save.require_current()
    return save


def require_own_common(root: Location, checkpoint: Any) -> None:
    """Raise unless ``common.pt``, which Megatron-Core has read, is of the save in the packs."""
    if not isinstance(checkpoint, PackCheckpoint) or checkpoint.index.common is None:
        return
    store = place_of(root)
    if store.read(COMMON_NAME) != checkpoint.common_content():
        path = store.path(COMMON_NAME)
        raise CorruptCheckpointError(
            f"{path} is of another save than the index, which was interrupted, or it is damaged; "
            "dist_ckpt_strategies.load reads the common state from the packs",
            path=path,
        )


def common_content(root: Location, options: Options, allow: Allowed, packs: Any = None) -> bytes:
    """The common state at a place, pickled: that of the packs, a file, or an object.

    Megatron-Core 0.19 and later save it as the object ``common_state``.

    Raises:
        IncompleteCheckpointError: there is none.
        CheckpointChangedError: another save has replaced the packs.
    """
    if packs is not None and packs.index.common is not None:
        content: bytes = packs.common_content()
        return content
    try:
        return place_of(root).read(COMMON_NAME)
    except IncompleteCheckpointError as missing:
        try:
            return open_at(root, options, allow).common_content()
        except (CheckpointNotFoundError, IncompatibleVersionError, IncompleteCheckpointError):
            raise missing from None


_OBJECT_FILES = "one file for each ShardedObject"


class TorchCommonSaveStrategy(ConfiguredSaver, SaveCommonStrategy):  # type: ignore[misc]
    """Writes ``common.pt`` atomically, after invalidating an older checkpoint there.

    Arguments are those of ConfiguredSaver. The first rank writes.
    """

    formats = (TORCH,)

    @raises_megatron_errors
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the state that is equal on all ranks.

        Collective over the group.

        Raises:
            UnsafeObjectError: it needs a class that a load would refuse.
            StorageError: it cannot be pickled or written; a PeerError of that class elsewhere.
        """
        root = located(checkpoint_dir, self.options)
        comm = self.communicator("save of common state", f"to {root}")

        def write() -> None:
            content = dump_loadable(common_state_dict, name=COMMON_STATE, allow=self.allowed)
            if isinstance(root, Path) and not holds_packs(root):  # they hold their own copy
                set_aside(root, MARKER_NAME)
            place_of(root).write(COMMON_NAME, content)

        run_on_first_rank(comm, lambda: self.within(ALL, root, write))

    @raises_megatron_errors
    def save_sharded_objects(
        self, sharded_objects_state_dict: StateDict, checkpoint_dir: str | Path
    ) -> None:
        """Write the main replicas of ShardedObjects. Rank-local.

        Raises:
            PlanError: a key cannot be a directory below the checkpoint.
            StorageError: one cannot be pickled or written.
        """
        root = require_path(located(checkpoint_dir, self.options), _OBJECT_FILES)
        objects = list(filter(is_main, sharded_values(sharded_objects_state_dict)))
        require_storable_keys((), {object_id(value).key for value in objects})
        for value in objects:
            name = object_id(value)
            content = dump_loadable(value.data, name=name.unique_key, allow=self.allowed)
            Directory(root).write(object_name(name), content, key=name.key)


class TorchCommonLoadStrategy(Configured, LoadCommonStrategy):  # type: ignore[misc]
    """Reads ``common.pt`` and object files with an allow-list (``weights_only=True``).

    Args:
        options: timeouts, and access to object stores; by default from the environment.
        allow: further classes that may be unpickled.

    Attributes:
        opened: what the last load has read the common state of; see ``common_read_last``.
    """

    formats = (TORCH,)

    @raises_megatron_errors
    def __init__(self, *, options: Options | None = None, allow: Allowed = ()) -> None:
        super().__init__()
        self.opened: OpenedSave | None = None
        self._configure(options, allow)

    @raises_megatron_errors
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """The common state, its tensors on the CPU. Rank-local.

        A checkpoint without ``common.pt`` has it as the object ``common_state``, as Megatron-Core
        0.19 and later save it.

        Raises:
            IncompleteCheckpointError: ``common.pt`` is missing, and there is no such object.
            UnsafeObjectError: it needs a class that is not allowed; the message names it.
            CorruptCheckpointError: it is damaged.
        """
        root, options = located(checkpoint_dir, self.options), self.options

        def read(attempts_left: int = 2) -> tuple[OpenedSave, bytes]:
            save = OpenedSave(root)
            try:
                packs = PackCheckpoint(root, options, save) if save.has_packs else None
                return save, common_content(root, options, self.allowed, packs)
            except CheckpointChangedError:  # in Megatron-Core's load others wait for this rank
                if not attempts_left:
                    raise
                return read(attempts_left - 1)

        self.opened, content = self.within(ALL, root, read)
        return self.common_state(root, content)

    def common_state(self, root: Location, content: bytes) -> StateDict:
        """The common state in what ``common_content`` has returned."""
        path = f"{root}/{COMMON_NAME}"
        state = load_content(content, path, COMMON_STATE, self.allowed)
        if not isinstance(state, dict):
            raise CorruptCheckpointError(
                f"common state: {path} holds a {type(state).__name__}, expected a dict",
                path=path,
            )
        return state

    @raises_megatron_errors
    def load_sharded_objects(
        self, sharded_objects_state_dict: StateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """A state dict of the same structure with the stored objects. Rank-local."""
        root, deadline = self._directory(checkpoint_dir), Deadline.after(self.options.timeout_s)
        checkpoint = run_within(deadline, root, lambda: Format1Checkpoint(root, self.options))
        allow = self.allowed

        def load(value: Any) -> Any:
            name = object_id(value)
            read = lambda: (checkpoint.object_content(name), checkpoint.object_path(name))  # noqa: E731
            content, path = run_within(deadline, name.unique_key, read)
            return load_content(content, path, name.unique_key, allow)

        return mapped_values(load, sharded_objects_state_dict)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """ShardedObjects without data, by unique key, for all that is stored. Rank-local."""
        root = self._directory(checkpoint_dir)
        return {name.unique_key: metadata_object(name) for name in object_ids(root)}

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"torch"``."""
        super().check_backend_compatibility(loaded_backend)  # Megatron-Core's names differ

    def _directory(self, checkpoint_dir: str | Path) -> Path:
        return require_path(located(checkpoint_dir, self.options), _OBJECT_FILES)
