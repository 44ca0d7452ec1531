"""Loading in two stages, under the names that Megatron-Core 0.15 gave it: read once, send on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.torch_group import (
    ProcessGroup,
    new_gloo_groups,
    open_communicator,
)
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import LoadShardedStrategy
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.run.report import BroadcastReport, GroupReport
from dist_ckpt_strategies.storage.objects import Allowed
from dist_ckpt_strategies.strategies.format1 import load_format1, stored_metadata
from dist_ckpt_strategies.strategies.group_load import load_format1_in_group
from dist_ckpt_strategies.strategies.zarr import BACKEND, VERSION, require_format1

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_NUM_CHANNELS = 2
"""Gloo moves twice as much over two groups side by side."""


timers: dict[str, list[float]] = {}
"""Seconds of each call of a function under ``timed``, by the function's name."""


def sharded_tensor_chunk_id(sharded_tensor: Any) -> tuple[str, tuple[int, ...]]:
    """What tells the shards of a checkpoint apart: key, and offset in elements."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset)


def timed(verbose: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:  # noqa: FBT001, FBT002 - Megatron's signature
    """Decorate a function so that the seconds of each call go to ``timers``, and to the log."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.monotonic() - started
                timers.setdefault(function.__name__, []).append(seconds)
                if verbose:
                    logger.debug("%s took %.3f s", function.__name__, seconds)

        return call

    return decorate


class TwoStageDataParallelLoadShardedStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Reads every shard once within a data-parallel group, and sends it to whom it is missing.

    Args:
        data_parallel_group: ranks that share the reading.
        cpu_transfer: send over gloo, on the host; False sends over the group's own backend.
        options: timeout and memory bound; by default what the environment says.
        allow: further classes that ShardedObjects may be unpickled to.
    """

    @raises_megatron_errors
    def __init__(
        self,
        data_parallel_group: ProcessGroup,
        cpu_transfer: bool = True,  # noqa: FBT001, FBT002 - Megatron's signature
        *,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        self.cpu_transfer = cpu_transfer
        self.data_parallel_group_orig = data_parallel_group
        self.data_parallel_group = None if cpu_transfer else data_parallel_group
        self._channels: tuple[ProcessGroup, ...] = ()
        self._options = options or options_from_environment()
        self._allow = tuple(allow)
        self._report: BroadcastReport | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are read once per group too."""
        return True

    @raises_megatron_errors
    def maybe_init_gloo_group(self) -> None:
        """Make the gloo groups that ``cpu_transfer`` needs, once for this strategy.

        Collective over the world the first time; ``load`` calls it.
        """
        if not self.cpu_transfer or self._channels:
            return
        self._channels = new_gloo_groups(
            self.data_parallel_group_orig, _NUM_CHANNELS, timeout_s=self._options.timeout_s
        )
        self.data_parallel_group = self._channels[0]

    @raises_megatron_errors
    def load(self, sharded_state_dict: StateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read what the state dict asks for. Collective over the world.

        Peak memory beside the tensors: ``max_inflight_bytes``, or the largest shard.

        Returns:
            A state dict of the same structure; see ``ZarrLoadShardedStrategy.load``.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
        """
        root = Path(checkpoint_dir).absolute()
        self.maybe_init_gloo_group()
        purpose = f"load from {root}"
        world = open_communicator(None, timeout_s=self._options.timeout_s, purpose=purpose)
        group = self._group(purpose)
        loaded, report = agree(
            world,
            lambda: load_format1_in_group(
                sharded_state_dict, root, group, self._options, self._allowed
            ),
        )
        self._report = report
        logger.info("rank %s: load from %s: %s", world.global_rank(world.rank), root, report)
        return loaded

    @raises_megatron_errors
    def summarize_load_times(self) -> GroupReport | None:
        """What each rank of the group read, received and waited for in the last load.

        Collective over the group; its first rank logs the summary. None before the first load.
        """
        report = self._report
        if report is None:
            return None
        group = self._group("summary of a load")
        answers = agree_and_gather(group, lambda: asdict(report))
        summary = GroupReport(tuple(BroadcastReport(**answer) for answer in answers))
        if group.rank == 0:
            logger.info("%s", summary)
        return summary

    @raises_megatron_errors
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        return stored_metadata(Path(checkpoint_dir).absolute(), with_objects=False)

    @raises_megatron_errors
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        return stored_metadata(Path(checkpoint_dir).absolute(), with_objects=True)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise IncompatibleVersionError unless the backend is ``"zarr"``."""
        require_format1(loaded_backend, VERSION)

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless the version is 1."""
        require_format1(BACKEND, loaded_version)

    @raises_megatron_errors
    def load_tensor_from_storage(self, checkpoint_dir: str | Path, ten_meta: Any) -> torch.Tensor:
        """One tensor, read by this rank alone: a new CPU tensor of the stored dtype. Rank-local.

        Args:
            checkpoint_dir: the checkpoint.
            ten_meta: has the wanted ShardedTensor as ``sharded_tensor_no_data``.
        """
        root = Path(checkpoint_dir).absolute()
        wanted = {"tensor": ten_meta.sharded_tensor_no_data.without_data()}
        loaded, _ = load_format1(
            wanted, root, SoloCommunicator(), self._options, self._allowed, lambda _, found: found
        )
        tensor: torch.Tensor = loaded["tensor"]
        return tensor

    def deduplicate_chunks(self, ten_metas: Iterable[Any]) -> list[Any]:
        """For each shard the entry of the lowest rank, sorted by shard. Rank-local.

        Kept for its name: ``load`` itself spreads the reading evenly (``plan.broadcast``).

        Args:
            ten_metas: entries with ``sharded_tensor_no_data`` and ``dist_group_rank``.
        """
        lowest: dict[Any, Any] = {}
        for meta in ten_metas:
            chunk = sharded_tensor_chunk_id(meta.sharded_tensor_no_data)
            if chunk not in lowest or meta.dist_group_rank < lowest[chunk].dist_group_rank:
                lowest[chunk] = meta
        return [meta for _, meta in sorted(lowest.items(), key=itemgetter(0))]

    def _group(self, purpose: str) -> Communicator:
        return open_communicator(
            self.data_parallel_group,
            timeout_s=self._options.timeout_s,
            purpose=purpose,
            channels=self._channels,
        )

    def _allowed(self) -> list[Any]:
        return [*default_allowed(), *self._allow]
