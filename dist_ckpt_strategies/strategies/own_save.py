"""What the save strategies of this package's formats share: ``finish_save(start_save(...))``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import DuplicateWriterError
from dist_ckpt_strategies.formats.locations import located, place_of
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable
from dist_ckpt_strategies.megatron.shards import StateDict, held_by
from dist_ckpt_strategies.megatron.types import (
    AsyncSaveShardedStrategy,
    hash_folders,
    raises_megatron_errors,
    split_common_object,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.pack_async import Background, WriteJob, begin_in_background
from dist_ckpt_strategies.sharded.pack_save import Contents, Known, Prepared, Started, start_save
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.io_pool import WORK, Deadline
from dist_ckpt_strategies.strategies.registry import Configured, require_own


class OwnSaveShardedStrategy(Configured, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for a format of this package.

    Args:
        backend: that of the format.
        version: that of the format.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.
    """

    own_format: ClassVar[tuple[str, int]]
    """Backend and version."""

    @raises_megatron_errors
    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        own_backend, own_version = self.own_format
        backend = own_backend if backend is None else backend
        version = own_version if version is None else version
        require_own(own_backend, (own_version,), backend, version)
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
        Takes as much host memory as the main replicas, kept for the next save.

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
            store = self.place(checkpoint_dir)
            sharded, common = split_common_object(state)
            content = None
            if comm.rank == 0 and common is not None:
                content = dump_loadable(common.data, name=common.key, allow=self.allowed)
            elif comm.rank == 0:
                content = self.take_over(store)
            contents = self.contents(sharded, content, copies_common=common is not None)
            return Prepared(store, contents, kind=self.kind)

        return self.save_prepared(comm, prepare, is_async=is_async, marker=None)

    @property
    def kind(self) -> str:
        """What ranks call a save of this format."""
        return f"{self.own_format}"

    def contents(
        self, state: StateDict, common: bytes | None, *, copies_common: bool, allow: Allowed = ()
    ) -> Contents:
        """What this rank saves of a sharded state dict; ``allow`` has further classes. Rank-local.

        Errors are those of ``contents_of``, and a PlanError where the format cannot hold it.
        """
        found = contents_of(state, common, (*self.allowed, *allow), copies_common=copies_common)
        self.require_storable(found)
        return found

    def save_prepared(
        self,
        comm: Communicator,
        prepare: Callable[[], Prepared],
        *,
        is_async: bool,
        marker: bytes | None,
        look_at: Callable[[Started], None] = lambda _: None,
    ) -> LocalSaveRequest | None:
        """Save; begin to, and return the request, if ``is_async``. Collective.

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

        def finish(save: Started, written: Callable[[], Any]) -> None:
            kept.known = self.finish(save, written, marker)
            save.report()

        if is_async:
            return begin_in_background(started, kept.background, self.job, finish)
        deadline = Deadline.after(WORK * options.timeout_s)
        finish(started, lambda: self.write(started, deadline))
        return None

    def place(self, checkpoint_dir: Any) -> Place:
        """Where a caller wants to save; a StrategyError if the format does not go there."""
        return place_of(located(checkpoint_dir, self.options))

    def require_storable(self, contents: Contents) -> None:
        """Raise a PlanError where the format cannot hold what this rank saves."""

    @abstractmethod
    def take_over(self, store: Place) -> bytes | None:
        """Get a directory ready in which Megatron-Core's own save has written ``common.pt``.

        The content of it where the format holds a copy. On the first rank; rank-local.
        """

    @abstractmethod
    def write(self, started: Started, deadline: Deadline) -> Any:
        """Write this rank's share. Rank-local."""

    @abstractmethod
    def job(self, started: Started) -> WriteJob:
        """What writes this rank's share from a copy. Rank-local."""

    @abstractmethod
    def finish(self, started: Started, written: Callable[[], Any], marker: bytes | None) -> Known:
        """Make the save visible; ``written`` waits for what ``write`` or the job returns."""


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
