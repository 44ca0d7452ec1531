"""The format ("safetensors", 1): one pack per rank. Save and load strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import DuplicateWriterError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable
from dist_ckpt_strategies.formats.pack_checkpoint import place_of
from dist_ckpt_strategies.formats.pack_commit import set_other_format_aside
from dist_ckpt_strategies.formats.pack_remove import remove_keys
from dist_ckpt_strategies.formats.pack_write import PackRecord
from dist_ckpt_strategies.megatron.shards import StateDict, held_by
from dist_ckpt_strategies.megatron.types import (
    AsyncSaveShardedStrategy,
    hash_folders,
    raises_megatron_errors,
    split_common_object,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.pack_async import Background, begin_in_background
from dist_ckpt_strategies.sharded.pack_save import (
    Contents,
    Known,
    Prepared,
    Started,
    finish_save,
    start_save,
    write_packs,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, Deadline, run_within
from dist_ckpt_strategies.strategies.common import packs_to_load
from dist_ckpt_strategies.strategies.registry import Configured, require_own
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy

BACKEND, VERSION = "safetensors", 1


class PackSaveShardedStrategy(Configured, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for ("safetensors", 1); see docs/format.md.

    Args:
        backend: ``"safetensors"``.
        version: 1.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.
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
        self._kept = _Kept()
        self._configure(options, allow, group)

    @raises_megatron_errors
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the main replicas, and make them the content of the directory, durably.

        Collective over the group. Does not write ``metadata.json``: Megatron-Core does.

        Raises:
            PlanError: main replicas overlap, leave a gap, or cannot be stored.
            StorageError: a write failed on this rank.
            PeerError: it failed on another; the message names rank, key and file.
        """
        self._save(sharded_state_dict, checkpoint_dir, is_async=False)

    @raises_megatron_errors
    def async_save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,  # noqa: ARG002 - any queue takes the request
    ) -> LocalSaveRequest:
        """Like ``save``, but only the copy of the tensors to host memory is waited for.

        Collective over the group. A save of this strategy that still writes is waited for first.

        Returns:
            A request for Megatron-Core's queue, persistent or not, or to be waited for. Its
            finalisation is collective, and raises on every rank if the save has failed on any.
        """
        request = self._save(sharded_state_dict, checkpoint_dir, is_async=True)
        assert request is not None  # noqa: S101 - an asynchronous save returns one
        return request

    def _save(
        self, state: StateDict, checkpoint_dir: str | Path, *, is_async: bool
    ) -> LocalSaveRequest | None:
        hash_folders()
        comm = self.communicator("save", f"to {checkpoint_dir}")

        def prepare() -> Prepared:
            location = located(checkpoint_dir, self.options)
            sharded, common = split_common_object(state)
            content = None
            if comm.rank == 0 and common is not None:
                content = dump_loadable(common.data, name=common.key, allow=self.allowed)
            elif comm.rank == 0:
                deadline = Deadline.after(OPENING * self.options.timeout_s)
                content = run_within(deadline, location, lambda: _common_of(location))
            contents = contents_of(sharded, content, self.allowed, copies_common=common is not None)
            return Prepared(place_of(location), contents)

        return self.save_packs(comm, prepare, is_async=is_async)

    def save_packs(
        self,
        comm: Communicator,
        prepare: Callable[[], Prepared],
        *,
        is_async: bool,
        marker: bytes | None = None,
        look_at: Callable[[Started], None] = lambda _: None,
    ) -> LocalSaveRequest | None:
        """Save as packs; begin to, and return the request, if ``is_async``. Collective.

        Args:
            comm: the ranks.
            prepare: see ``start_save``.
            is_async: whether to save in the background.
            marker: content of ``metadata.json``; None where Megatron-Core writes it.
            look_at: called when all ranks have begun; it may be collective.
        """
        kept, options = self._kept, self.options

        def get_ready() -> Prepared:
            if is_async:
                kept.background.get_ready(options)
            return prepare()

        started = start_save(comm, get_ready, kept.known, options)
        look_at(started)

        def finish(save: Started, written: Callable[[], Sequence[PackRecord]]) -> None:
            kept.known = finish_save(save, written, marker=marker, fence=require_own_place)

        if is_async:
            return begin_in_background(started, kept.background, finish)
        deadline = Deadline.after(WORK * options.timeout_s)
        finish(started, lambda: write_packs(started, deadline))
        return None


class _Kept:
    """What a strategy keeps from save to save: what ranks know of each other, and a snapshot."""

    def __init__(self) -> None:
        self.known: Known | None = None
        self.background = Background()


def contents_of(
    state: StateDict, common: bytes | None, allow: Allowed, *, copies_common: bool
) -> Contents:
    """What this rank saves of a sharded state dict.

    Raises:
        UnsafeObjectError: a load would refuse an object.
        DuplicateWriterError: an object occurs twice.
        PlanError: a value cannot be stored.
    """
    held = held_by(state)
    objects = {
        name: dump_loadable(data, name=name.unique_key, allow=allow) for name, data in held.objects
    }
    if len(objects) < len(held.objects):
        names = [name for name, _ in held.objects]
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateWriterError(
            f"{twice.unique_key}: two main replicas on this rank; give one of them another "
            "replica_id",
            key=twice.key,
        )
    return Contents(
        tuple(held.shards),
        tuple(held.tensors),
        tuple(held.copies),
        tuple(objects.items()),
        tuple(held.object_copies),
        common,
        copies_common,
    )


def _common_of(location: Location) -> bytes | None:
    """The common state that Megatron-Core has written, if it has: read back, and flushed.

    A checkpoint that had another one counts no more, unless it is packs, which have their own copy.
    """
    store = place_of(location)
    try:
        content = store.read(COMMON_NAME)
    except IncompleteCheckpointError:
        return None
    if isinstance(store, Directory):
        store.sync(COMMON_NAME)
        set_other_format_aside(store)
    return content


class PackLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Load strategy for ("safetensors", 1)."""

    backend: ClassVar[str] = BACKEND
    versions: ClassVar[tuple[int, ...]] = (VERSION,)

    def open_checkpoint(
        self,
        root: Location,
        options: Options,
        comm: Communicator | None = None,
    ) -> Any:
        """See ``packs_to_load``."""
        return packs_to_load(root, options, comm)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

        Only the index changes: their bytes stay, until ``convert`` leaves them out.
        """
        root = located(checkpoint_dir, self.options)
        deadline = Deadline.after(self.options.timeout_s)
        run_within(deadline, root, lambda: remove_keys(place_of(root), key_prefix))
