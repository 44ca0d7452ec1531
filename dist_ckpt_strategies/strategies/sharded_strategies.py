"""What the strategy classes of both Zarr formats have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.checkpoints import Share
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import AsyncSaveShardedStrategy, LoadShardedStrategy
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    LoadInputs,
    conversions,
    destination,
    dtypes_of,
    load_sharded,
)
from dist_ckpt_strategies.sharded.requests import LocalSaveRequest
from dist_ckpt_strategies.sharded.save import (
    SaveInputs,
    ShardedSave,
    begin_in_background,
    begun_save,
)
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.storage.base import StoredCheckpoint
from dist_ckpt_strategies.storage.time_limit import time_limit

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
        cache: what is kept from one save to the next.

    Args:
        backend: name of the format.
        version: version of the format.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default what the environment says.
        allow: further classes that ShardedObjects may be of; a load has to allow them too.
    """

    takes_urls = False

    def __init__(
        self,
        backend: str,
        version: int,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__(backend, version)
        self.cache = SaveCache()
        self._group = group
        self._allow = tuple(allow)
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
        comm = self.communicator(checkpoint_dir)
        self.save_with(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

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
        comm = self.communicator(checkpoint_dir)
        return self.begin_with(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    def inputs(
        self,
        comm: Communicator,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        *,
        overwrite: bool | None = None,
    ) -> SaveInputs:
        """What this rank brings to a save. Rank-local.

        Args:
            comm: ranks that save together.
            sharded_state_dict: as in ``save``.
            checkpoint_dir: as in ``save``.
            overwrite: None where Megatron-Core's own save has replaced the common state already;
                else an earlier checkpoint stays loadable until this one is durable, and this
                tells whether arrays that belong to no finished checkpoint are replaced.
        """
        writer = self.open_writer(
            located(checkpoint_dir, self._options),
            comm.global_rank(comm.rank),
            keeps_old=overwrite is not None,
            overwrite=bool(overwrite),
        )
        allow = [*default_allowed(), *self._allow]
        return SaveInputs(sharded_state_dict, writer, self._options, self.cache, allow)

    def save_with(self, comm: Communicator, open_inputs: Callable[[], SaveInputs]) -> None:
        """Save what each rank brings. Collective."""
        with time_limit(self._options.timeout_s):
            _begun(comm, open_inputs).run()

    def begin_with(
        self, comm: Communicator, open_inputs: Callable[[], SaveInputs]
    ) -> LocalSaveRequest:
        """Begin to save what each rank brings, in the background. Collective."""

        def open_when_ready() -> SaveInputs:
            self.cache.get_ready(self._options)
            return open_inputs()

        with time_limit(self._options.timeout_s):
            begun = _begun(comm, open_when_ready)
        return begin_in_background(begun)

    @abstractmethod
    def open_writer(
        self, root: Location, global_rank: int, *, keeps_old: bool, overwrite: bool
    ) -> CheckpointWriter:
        """What writes the checkpoint.

        Args:
            root: the checkpoint directory, or its place in an object store.
            global_rank: this rank.
            keeps_old: see DirectoryPlace.
            overwrite: see DirectoryPlace.
        """

    @property
    def has_group(self) -> bool:
        """Whether other ranks than the world save together."""
        return self._group is not None

    def communicator(self, checkpoint_dir: str | Location) -> Communicator:
        """The ranks that save together."""
        return open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="save",
            detail=f"to {checkpoint_dir}",
        )


def _begun(comm: Communicator, open_inputs: Callable[[], SaveInputs]) -> ShardedSave:
    begun = begun_save(comm, open_inputs)
    assert begun is not None  # noqa: S101 - every rank brings something
    return begun


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

    def with_strict_dtype(self) -> Self:
        """The same strategy with the option ``strict_dtype`` set."""
        return self._with_changes(strict_dtype=True)

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
            A state dict of the same structure. The data of a ShardedTensor is filled in place,
            and is what stands there; without data it is a new CPU tensor of the ShardedTensor's
            dtype. What is stored in another dtype is converted as ``Tensor.copy_`` does, with one
            warning per load, on the group's first rank.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            DTypeMismatchError: another dtype is stored, and the option ``strict_dtype`` is set.
                No tensor has been filled.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        comm = open_communicator(
            self._group,
            timeout_s=self._options.timeout_s,
            purpose="load",
            detail=f"from {checkpoint_dir}",
        )
        with time_limit(self._options.timeout_s):
            return load_sharded(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    def inputs(
        self, comm: Communicator, sharded_state_dict: StateDict, checkpoint_dir: str | Location
    ) -> LoadInputs:
        """What this rank brings to a load by the ranks of ``comm``. Rank-local."""
        share = Share(comm.rank, comm.size)
        root = located(checkpoint_dir, self._options)
        return LoadInputs(
            sharded_state_dict,
            self.open_checkpoint(root, self._options, share),
            checkpoint_dir,
            self._options,
            self.allowed,
            self._destination,
        )

    @property
    def has_group(self) -> bool:
        """Whether other ranks than the world load together."""
        return self._group is not None

    def tensors_to_fill(
        self, tensors: Sequence[Any], stored: Mapping[str, ArraySpec], options: Options
    ) -> tuple[list[torch.Tensor], Conversions]:
        """For ShardedTensors, the tensors that a load fills and what it converts. Rank-local.

        Errors as in ``load``.
        """
        converted = conversions(tensors, dtypes_of(stored), is_strict=options.strict_dtype)
        return [self._destination(tensor) for tensor in tensors], converted

    def load_alone(self, sharded_state_dict: StateDict, checkpoint_dir: Location) -> StateDict:
        """Like ``load``, by this rank without any other. Rank-local."""
        comm = SoloCommunicator()
        with time_limit(self._options.timeout_s):
            return load_sharded(comm, lambda: self.inputs(comm, sharded_state_dict, checkpoint_dir))

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        root = located(checkpoint_dir, self._options)
        with time_limit(self._options.timeout_s):
            return self.stored_metadata(root, with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        root = located(checkpoint_dir, self._options)
        with time_limit(self._options.timeout_s):
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

    def _destination(self, tensor: Any) -> torch.Tensor:
        """The tensor that is filled for a ShardedTensor."""
        return destination(tensor)

    def allowed(self) -> Allowed:
        """The classes that ShardedObjects may be unpickled to."""
        return [*default_allowed(), *self._allow]
