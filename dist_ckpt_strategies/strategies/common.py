"""Common state and objects in Megatron-Core's own files, read with an allow-list."""

from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, run_on_first_rank
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import require_storable_keys
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint
from dist_ckpt_strategies.formats.commit import set_marker_aside
from dist_ckpt_strategies.formats.locations import (
    Location,
    OpenedSave,
    holds_packs,
    located,
    require_path,
    store_at,
)
from dist_ckpt_strategies.formats.objects import (
    OBJECT_SUFFIX,
    Allowed,
    dump_loadable,
    load_content,
    object_ids,
)
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint, place_of
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
    raises_megatron_errors,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import Deadline, run_with_limit, run_within, time_limit
from dist_ckpt_strategies.storage.store import Store
from dist_ckpt_strategies.strategies.registry import Configured, require_own
from dist_ckpt_strategies.tools.opened import open_at

BACKEND = "torch"
VERSION = 1

COMMON_STATE = "common state"
"""What messages call it."""


OPENED: ContextVar[OpenedSave | None] = ContextVar("dist_ckpt_opened_save", default=None)
"""Of the load under way: Megatron-Core's calls a common and then a sharded strategy, and has no
argument for the save that both of them read."""


def save_to_load(root: Location) -> OpenedSave:
    """The save that the load under way has opened there; where none has, the one that is there.

    Raises:
        StorageError: another save has replaced it. The next call opens that one.
    """
    save = OPENED.get()
    if save is None or save.root != root:
        return OpenedSave(root)
    try:
        save.require_current()
    except StorageError:
        OPENED.set(None)
        raise
    return save


def opened_packs(root: Location, options: Options, save: OpenedSave | None) -> PackCheckpoint:
    """The packs at a place, of the save that was opened before if there is one.

    Raises:
        CheckpointChangedError: another save has replaced it.
    """
    found = PackCheckpoint(root, options)
    if save is not None and save.root == root and save.identity != found.identity:
        raise CheckpointChangedError(
            f"{root}: another save replaced this checkpoint while it was opened; load it again",
            path=str(root),
        )
    return found


def packs_to_load(root: Location, options: Options, comm: Communicator | None) -> PackCheckpoint:
    """The packs at a place, for ranks that load together; None: for this rank alone. Rank-local.

    Where Megatron-Core's own ``load`` calls, it has read ``common.pt`` itself, which is compared
    with the common state in the packs.
    """
    save = OPENED.get()
    packs = opened_packs(root, options, save)
    if comm is None or (save is not None and save.root == root) or packs.index.common is None:
        return packs
    store = place_of(root)
    if store.read(COMMON_NAME) != packs.read(packs.common_content):
        path = store.path(COMMON_NAME)
        raise CorruptCheckpointError(
            f"{path} is of another save than the index, which was interrupted, or it is damaged; "
            "dist_ckpt_strategies.load reads the common state from the packs",
            path=path,
        )
    return packs


def _opened_common(root: Location, options: Options, store: Store) -> bytes:
    """The common state of the save that is there, which then is the opened one.

    It is opened again where another save replaces it meanwhile: in Megatron-Core's own load the
    other ranks would wait for this one.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        save = OpenedSave(root)
        OPENED.set(save)
        if not save.has_packs:
            break
        try:
            read = partial(_common_in, root, options, save)
            return run_within(Deadline.after(options.timeout_s), root, read)
        except CheckpointChangedError:
            if not attempts_left:
                raise
    return store.read(COMMON_NAME)


_ATTEMPTS = 3


def _common_in(root: Location, options: Options, save: OpenedSave) -> bytes:
    packs = opened_packs(root, options, save)
    if packs.index.common is None:
        return place_of(root).read(COMMON_NAME)
    return packs.read(packs.common_content)


_OBJECT_FILES = "one file for each ShardedObject"


class TorchCommonSaveStrategy(Configured, SaveCommonStrategy):  # type: ignore[misc]
    """Writes ``common.pt`` atomically, after invalidating an older checkpoint there.

    Args:
        backend: ``"torch"``.
        version: 1.
        group: ranks that save together; the world by default. Its first rank writes.
        options: timeouts; by default from the environment.
        allow: further classes that saved values may be of; a load has to allow them too.
    """

    @raises_megatron_errors
    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        require_own(BACKEND, (VERSION,), backend, version)
        super().__init__(backend, version)
        self._configure(options, allow, group)

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
                set_marker_aside(root)
            store_at(root).write(COMMON_NAME, content)

        with time_limit(self.options.timeout_s):
            run_on_first_rank(comm, write)

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
            file = f"{name.unique_key}{OBJECT_SUFFIX}"
            Directory(root).write(file, content, key=name.key)


class TorchCommonLoadStrategy(Configured, LoadCommonStrategy):  # type: ignore[misc]
    """Reads ``common.pt`` and object files with an allow-list (``weights_only=True``).

    Args:
        options: timeouts, and access to object stores; by default from the environment.
        allow: further classes that may be unpickled.
    """

    @raises_megatron_errors
    def __init__(self, *, options: Options | None = None, allow: Allowed = ()) -> None:
        super().__init__()
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
        options, allow = self.options, self.allowed
        root = located(checkpoint_dir, options)
        store = place_of(root)
        path = store.path(COMMON_NAME)
        with time_limit(options.timeout_s):
            try:
                content = _opened_common(root, options, store)
            except IncompleteCheckpointError as missing:
                try:
                    content = run_with_limit(
                        lambda: open_at(root, options, allow).common_content(), root
                    )
                except (IncompatibleVersionError, IncompleteCheckpointError):
                    raise missing from None
            found = load_content(content, path, COMMON_STATE, allow)
        if not isinstance(found, dict):
            raise CorruptCheckpointError(
                f"common state: {path} holds a {type(found).__name__}, expected a dict",
                path=path,
            )
        return found

    @raises_megatron_errors
    def load_sharded_objects(
        self, sharded_objects_state_dict: StateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """A state dict of the same structure with the stored objects. Rank-local."""
        checkpoint = Format1Checkpoint(self._directory(checkpoint_dir), self.options)
        allow = self.allowed

        def load(value: Any) -> Any:
            name = object_id(value)
            content, path = checkpoint.object_content(name), checkpoint.object_path(name)
            return load_content(content, path, name.unique_key, allow)

        return mapped_values(load, sharded_objects_state_dict)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """ShardedObjects without data, by unique key, for all that is stored. Rank-local."""
        root = self._directory(checkpoint_dir)
        return {found.unique_key: metadata_object(found) for found in object_ids(root)}

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"torch"``."""
        require_own(BACKEND, (VERSION,), loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_own(BACKEND, (VERSION,), BACKEND, loaded_version)

    def _directory(self, checkpoint_dir: str | Path) -> Path:
        return require_path(located(checkpoint_dir, self.options), _OBJECT_FILES)
