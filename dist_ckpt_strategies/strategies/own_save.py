"""Save strategies of this package's formats: Megatron-Core's methods over ``sharded``'s functions.

What differs between the formats is in ``safetensors`` and ``zarr``.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.core.array import ObjectId, ShardSpec
from dist_ckpt_strategies.errors import CoverageError
from dist_ckpt_strategies.formats.locations import located, place_of
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    allowing,
    dump_loadable,
    dump_object,
    require_loadable,
)
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main_message,
    message_of,
    object_from_message,
    shard_data,
    shard_from_message,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import (
    AsyncSaveShardedStrategy,
    hash_folders,
    raises_megatron_errors,
    split_common_object,
)
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.background import Kept, begin_in_background
from dist_ckpt_strategies.sharded.save import (
    Contents,
    SaveFormat,
    Started,
    finish_save,
    start_save,
    write_share,
)
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.strategies.configured import ConfiguredSaver


class OwnSaveShardedStrategy(ConfiguredSaver, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Save strategy for a format of this package; arguments are those of ConfiguredSaver."""

    save_format: ClassVar[SaveFormat]

    def _configure(self, *args: Any, **changes: Any) -> None:
        super()._configure(*args, **changes)
        self.kept = Kept()

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

        def prepare() -> tuple[Place, Contents, Message]:
            if is_async:
                self.kept.get_ready(self.options)
            store = self.place(checkpoint_dir)
            sharded, common = split_common_object(state)
            content = None
            if comm.rank == 0 and common is not None:
                content = dump_loadable(common.data, name=common.key, allow=self.allowed)
            elif comm.rank == 0:
                content = self.take_over(store)
            return store, self.contents(sharded, content, copies_common=common is not None), None

        with no_garbage_collection():
            started = start_save(comm, self.save_format, prepare, self.kept.cache, self.options)
            return self.finish(started, None, is_async=is_async)

    def finish(
        self,
        started: Started,
        marker: bytes | None,
        *,
        is_async: bool,
        overwrite: bool = False,
    ) -> LocalSaveRequest | None:
        """Write a save and make it visible; begin to, and return the request, if ``is_async``.

        Collective. ``marker`` and ``overwrite`` are as for ``finish_save``.
        """
        if is_async:
            return begin_in_background(started, self.kept, marker, overwrite=overwrite)
        write = partial(write_share, started)
        self.kept.cache = finish_save(started, write, marker=marker, overwrite=overwrite)
        return None

    def place(self, checkpoint_dir: Any) -> Place:
        """The place of a save; a StrategyError if the format does not go there."""
        return place_of(located(checkpoint_dir, self.options))

    def contents(
        self, state: StateDict, common: bytes | None, allow: Allowed = (), *, copies_common: bool
    ) -> Contents:
        """This rank's content of a save; ``allow`` has further classes. Rank-local.

        Raises:
            UnsafeObjectError: a load would refuse an object.
            CoverageError: an object occurs twice.
            PlanError: a value cannot be stored, or not in this format.
        """
        shards: list[ShardSpec] = []
        tensors: list[torch.Tensor] = []
        copies: list[ShardSpec] = []
        objects: dict[ObjectId, bytes] = {}
        object_copies: list[ObjectId] = []
        for value in sharded_values(state):
            if not self.options.saves(value.key):
                continue
            message = message_of(value)
            if (spec := shard_from_message(message)) is not None:
                (shards if spec.is_main else copies).append(spec)
                if spec.is_main:
                    tensors.append(shard_data(value))
                continue
            name = object_from_message(message)
            if not is_main_message(message):
                object_copies.append(name)
                continue
            if name in objects:
                raise CoverageError(
                    f"{name.unique_key}: two main replicas on this rank; give one of them another "
                    "replica_id",
                    key=name.key,
                )
            objects[name] = dump_object(value.data, name=name.unique_key)
        with allowing((*self.allowed, *allow)):  # once, since the list is long
            for name, content in objects.items():
                require_loadable(content, name=name.unique_key, allow=())
        return Contents(
            tuple(shards),
            tuple(tensors),
            tuple(copies),
            tuple(objects.items()),
            tuple(object_copies),
            common,
            copies_common,
        )

    @abstractmethod
    def take_over(self, store: Place) -> bytes | None:
        """Get a directory ready in which Megatron-Core's own save has written ``common.pt``.

        The content of it where the format holds a copy. On the first rank; rank-local.
        """
