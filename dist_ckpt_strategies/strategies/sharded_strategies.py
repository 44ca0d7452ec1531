"""What the strategy classes of both Zarr formats have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Self

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.local.requests import LocalSaveRequest
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import AsyncSaveShardedStrategy, LoadShardedStrategy
from dist_ckpt_strategies.megatron.callers import is_exchanged, num_expected_meetings
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.run.report import BroadcastReport
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.checkpoints import Share
from dist_ckpt_strategies.storage.locations import Location, located
from dist_ckpt_strategies.storage.objects.pickled import Allowed
from dist_ckpt_strategies.strategies.group_load import load_sharded_in_group
from dist_ckpt_strategies.strategies.save_planning import SaveMemory
from dist_ckpt_strategies.strategies.sharded_load import load_sharded
from dist_ckpt_strategies.strategies.sharded_save import SaveTarget, begin_save, save_sharded

logger = logging.getLogger(__name__)


class _WithOptions(ABC):
    """What a strategy of this package goes by, and how it comes to go by something else."""

    _options: Options

    @property
    def options(self) -> Options:
        """How saves or loads are carried out."""
        return self._options

    def limited(self, timeout_s: float) -> Self:
        """The same strategy with another time limit, in seconds; it shares all that is kept.

        Raises:
            StrategyError: the limit is out of range.
        """
        return self._with_changes(timeout_s=timeout_s)

    def _with_changes(self, **changes: Any) -> Self:
        """The same strategy with some options that are others."""
        other = copy(self)
        other._options = self._options.with_changes(**changes)  # noqa: SLF001 - a copy
        return other


class BaseSaveShardedStrategy(_WithOptions, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """What the save strategies of both formats have in common; abstract.

    Attributes:
        takes_urls: whether a checkpoint may be in an object store.
        memory: what is kept from one save to the next.

    Args:
        backend: name of the format.
        version: version of the format.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        memory: shared with other strategies that save the same state. It keeps the last plan, taken
            again where every rank saves the same shards as before, and room for asynchronous saves.
    """

    takes_urls = False

    def __init__(
        self,
        backend: str,
        version: int,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        memory: SaveMemory | None = None,
    ) -> None:
        super().__init__(backend, version)
        self.memory = memory or SaveMemory()
        self._group = group
        self._options = options or options_from_environment()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are written too, where Megatron-Core's common strategy puts them."""
        return True

    @raises_megatron_errors
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the main replicas, durably. Does not write ``metadata.json``.

        Collective over the group. CPU tensors in C order are written from their own memory;
        others take staging memory, ``max_inflight_bytes`` at most or twice the largest tensor.

        Raises:
            PlanError: main replicas overlap, leave a gap, or cannot be stored.
            StorageError: a write failed on this rank.
            PeerError: it failed on another; the message names rank, key and file.
        """
        self._save(sharded_state_dict, checkpoint_dir, None)

    @raises_megatron_errors
    def async_save(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> LocalSaveRequest:
        """Like ``save``, but only the copy of the tensors to host memory is waited for.

        Collective over the group. A save that still runs is waited for first. Takes as much host
        memory as the main replicas, kept for the next save.

        Returns:
            A request for Megatron-Core's queue, persistent or not, or to be waited for. Its
            finalisation is collective, and raises on every rank if the save has failed on any.

        Raises:
            PlanError: main replicas overlap, leave a gap, or cannot be stored.
            StorageError: the directory cannot be prepared.
            PeerError: another rank failed; the message names rank, key and file.
        """
        return self.begin(sharded_state_dict, checkpoint_dir, None, None)

    @raises_megatron_errors
    def replace(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        save_common: Callable[[], None],
    ) -> None:
        """Like ``save``, but an earlier checkpoint stays whole until this one can be saved.

        Collective, and raises, like ``save``.

        Args:
            sharded_state_dict: what to save.
            checkpoint_dir: where.
            save_common: writes ``common.pt``; called on every rank once the rest is durable.
        """
        self._save(sharded_state_dict, checkpoint_dir, save_common)

    @raises_megatron_errors
    def begin(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        save_common: Callable[[], None] | None,
        publish: Callable[[], None] | None,
    ) -> LocalSaveRequest:
        """Like ``async_save``, with more to do at finalisation.

        Collective, and raises, like ``async_save``.

        Args:
            sharded_state_dict: what to save.
            checkpoint_dir: where.
            save_common: writes ``common.pt``, where that has not been done; on every rank.
            publish: makes the checkpoint visible; on the first rank.
        """
        comm = self._communicator(checkpoint_dir)
        return begin_save(
            sharded_state_dict,
            self._opener(checkpoint_dir, comm, keeps_old=save_common is not None),
            comm,
            self._options,
            self.memory,
            save_common,
            publish,
        )

    @abstractmethod
    def open_target(self, root: Location, global_rank: int, *, keeps_old: bool) -> SaveTarget:
        """Where a save goes.

        Args:
            root: the checkpoint directory, or its place in an object store.
            global_rank: this rank.
            keeps_old: see ``replace``.
        """

    def _save(
        self,
        state_dict: StateDict,
        checkpoint_dir: str | Path,
        save_common: Callable[[], None] | None,
    ) -> None:
        comm = self._communicator(checkpoint_dir)
        report = save_sharded(
            state_dict,
            self._opener(checkpoint_dir, comm, keeps_old=save_common is not None),
            comm,
            self._options,
            self.memory,
            save_common,
        )
        logger.info("rank %s: save to %s: %s", comm.global_rank(comm.rank), checkpoint_dir, report)

    def _communicator(self, checkpoint_dir: str | Location) -> Communicator:
        return open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="save",
            detail=f"to {checkpoint_dir}",
        )

    def _opener(
        self, checkpoint_dir: str | Location, comm: Communicator, *, keeps_old: bool
    ) -> Callable[[], SaveTarget]:
        """What opens the place; where one rank cannot, all ranks learn it."""

        def open_target() -> SaveTarget:
            root = located(checkpoint_dir, self._options)
            return self.open_target(root, comm.global_rank(comm.rank), keeps_old=keeps_old)

        return open_target


class BaseLoadShardedStrategy(_WithOptions, LoadShardedStrategy):  # type: ignore[misc]
    """What the load strategies of both formats have in common; abstract.

    Attributes:
        takes_urls: whether a checkpoint may be in an object store.

    Args:
        group: ranks that load together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    takes_urls = False

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        self._group = group
        self._options = options or options_from_environment()
        self._allow = tuple(allow)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are read too."""
        return True

    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> StateDict:
        """Read every ShardedTensor and ShardedObject of the state dict.

        Collective over the group. ``async_strategy`` is what later releases of Megatron-Core pass;
        nothing depends on it.

        Returns:
            A state dict of the same structure. A ShardedTensor whose data has the stored dtype is
            filled in place and gives that tensor; without data it gives a new CPU tensor. Other
            dtypes give a new tensor of the stored dtype on the data's device; of the
            ShardedTensor's dtype where FullyParallelLoadStrategyWrapper calls.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        num_meetings = num_expected_meetings(depth=3)
        deliver = self._deliver_cast if is_exchanged(depth=3) else self._deliver
        comm = open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="load",
            detail=f"from {checkpoint_dir}",
        )
        loaded, report = load_sharded(
            sharded_state_dict,
            lambda: self.open_checkpoint(
                located(checkpoint_dir, self._options),
                self._options,
                Share(comm.rank, comm.size),
            ),
            comm,
            self._options,
            self._allowed,
            deliver,
        )
        me = comm.global_rank(comm.rank)
        logger.info("rank %s: load from %s: %s", me, checkpoint_dir, report)
        for _ in range(num_meetings - 1):
            agree(comm, lambda: None)
        return loaded

    def load_in_group(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        comm: Communicator,
        options: Options,
    ) -> tuple[StateDict, BroadcastReport]:
        """Like ``load``, by a group of ranks: each reads a share, and sends it to the others.

        Collective over the group. Errors as in ``load``.

        Args:
            sharded_state_dict: what this rank wants; the others may want the same, or other parts.
            checkpoint_dir: the checkpoint.
            comm: the group.
            options: in place of the strategy's own.
        """
        return load_sharded_in_group(
            sharded_state_dict,
            lambda: self.open_checkpoint(
                located(checkpoint_dir, options), options, Share(comm.rank, comm.size)
            ),
            comm,
            options,
            self._allowed,
            self._deliver,
        )

    def load_alone(self, sharded_state_dict: StateDict, checkpoint_dir: Location) -> StateDict:
        """Like ``load``, by this rank without any other. Rank-local."""
        loaded, _ = load_sharded(
            sharded_state_dict,
            lambda: self.open_checkpoint(checkpoint_dir, self._options, Share()),
            SoloCommunicator(),
            self._options,
            self._allowed,
            self._deliver,
        )
        return loaded

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        root = located(checkpoint_dir, self._options)
        return self.stored_metadata(root, with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        root = located(checkpoint_dir, self._options)
        return self.stored_metadata(root, with_objects=True)

    @abstractmethod
    def stored_metadata(self, root: Location, *, with_objects: bool) -> StateDict:
        """What ``load_tensors_metadata`` and ``load_sharded_metadata`` return."""

    @abstractmethod
    def open_checkpoint(self, root: Location, options: Options, share: Share) -> StoredCheckpoint:
        """The checkpoint at a place. Rank-local.

        Args:
            root: its directory, or its place in an object store.
            options: how to read it.
            share: which part of what ranks look at together is this one's.
        """

    def _deliver(self, tensor: Any, loaded: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a hook
        return loaded

    def _deliver_cast(self, tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
        return self._deliver(tensor, loaded).to(tensor.dtype)

    def _allowed(self) -> Allowed:
        return [*default_allowed(), *self._allow]
