"""The two-stage loader, under the names of Megatron-Core 0.15: read once, then broadcast."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_alive,
    is_distributed,
    new_gloo_groups,
    payload_device,
    require_member,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.report import BroadcastReport, GroupReport
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.checkpoints import common_digest
from dist_ckpt_strategies.formats.locations import Location, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed, default_allowed
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.megatron.types import (
    LoadShardedStrategy,
    StrategyAction,
    allow_in_common_state,
    handles_objects,
    is_strategy,
    raises_megatron_errors,
)
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.own_load import OwnLoadShardedStrategy
from dist_ckpt_strategies.two_stage.load import load_by_group
from dist_ckpt_strategies.two_stage.sources import OwnSource, Source, StrategySource

logger = logging.getLogger(__name__)

_PURPOSE = "two-stage load"

_NUM_CHANNELS = 2
"""Two gloo groups side by side have twice the throughput of one."""


class TwoStageDataParallelLoadShardedStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Reads every shard once per data-parallel group, and sends it to the ranks that request it.

    Args:
        data_parallel_group: ranks that share the reading; None for the world.
        cpu_transfer: send from host to host, over gloo; ranks of one host read from the page cache
            what one of them has read from a local file system. False sends over the group's own
            backend, with NCCL from GPU to GPU.
        base_strategy: reads the storage; by default a strategy for ("safetensors", 1) and
            ("zarr", 1). With these each rank reads an even share of what several ranks request,
            straight into the tensors. Any other load strategy, such as Megatron-Core's for
            ``torch_dist``, is called once on every rank, with the whole shards that this rank
            reads; what it loads is in memory at once.
        max_inflight_bytes: bound, per rank, on memory for reads and messages in flight; by default
            that of the base strategy, or from the environment.
        timeout_s: longest wait for a peer; by default from the same place.
        allow: further classes that ShardedObjects may be unpickled to.

    Attributes:
        options: timeouts and memory bounds.
    """

    @raises_megatron_errors
    def __init__(
        self,
        data_parallel_group: ProcessGroup | None,
        cpu_transfer: bool = True,  # noqa: FBT001, FBT002 - Megatron's signature
        *,
        base_strategy: Any = None,
        max_inflight_bytes: int | None = None,
        timeout_s: float | None = None,
        allow: Allowed = (),
    ) -> None:
        super().__init__()
        self.cpu_transfer = cpu_transfer
        self.data_parallel_group_orig = data_parallel_group
        self.data_parallel_group = None if cpu_transfer else data_parallel_group
        if base_strategy is None:
            base_strategy = OwnLoadShardedStrategy(allow=allow)
        if not is_strategy(base_strategy, StrategyAction.LOAD_SHARDED):
            raise StrategyError(
                f"base_strategy: expected a sharded load strategy, found {base_strategy!r}"
            )
        self._is_own = isinstance(base_strategy, OwnLoadShardedStrategy)
        own_options = base_strategy.options if self._is_own else options_from_environment()
        self.base_strategy = base_strategy
        self._channels: tuple[ProcessGroup, ...] = ()
        self.options = own_options.with_changes(
            max_inflight_bytes=max_inflight_bytes, timeout_s=timeout_s
        )
        self._allow = tuple(allow)
        allow_in_common_state(default_allowed())
        self._report: BroadcastReport | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the base strategy reads ShardedObjects; they are read once per group too."""
        return handles_objects(self.base_strategy)

    @raises_megatron_errors
    def maybe_init_gloo_group(self) -> None:
        """Make the gloo groups for ``cpu_transfer``, if this strategy has none. ``load`` calls it.

        Collective over the world at the first call, and at the first one after the world was
        destroyed and made again.
        """
        if not self.cpu_transfer or not is_distributed():
            return
        if self._channels and all(map(is_alive, self._channels)):
            return
        self._channels = ()
        timeout_s = self.options.timeout_s
        world = open_communicator(None, timeout_s=timeout_s, purpose="making of gloo groups")
        self._channels = new_gloo_groups(
            world, self.data_parallel_group_orig, _NUM_CHANNELS, timeout_s=timeout_s
        )
        self.data_parallel_group = self._channels[0]

    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Location,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
        *,
        save: OpenedSave | None = None,
    ) -> StateDict:
        """Load what the state dict requests. Collective over the world.

        Peak memory beside the tensors: ``max_inflight_bytes``, or the largest shard.

        Returns:
            A state dict of the same structure; see ``OwnLoadShardedStrategy.load``.

        Raises:
            PlanError: another shape is stored, and ``allow_shape_mismatch`` is not set; or another
                dtype, and the option ``strict_dtype`` is set.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
            StrategyError: a rank is not in the data-parallel group that it was given; or
                ``strict_dtype`` is set, and the base strategy is none of this package.
        """
        self.maybe_init_gloo_group()
        world = open_communicator(
            None,
            timeout_s=self.options.timeout_s,
            purpose=_PURPOSE,
            detail=f"from {checkpoint_dir}",
        )
        if not self.cpu_transfer:
            run_collectively(world, lambda: require_member(self.data_parallel_group))
        allowed = self.base_strategy.allowed if self._is_own else default_allowed()
        loaded, self._report = load_by_group(
            world,
            self._group(checkpoint_dir),
            lambda: self._source(checkpoint_dir, save),
            sharded_state_dict,
            checkpoint_dir,
            self.options,
            (*allowed, *self._allow),
        )
        rank, text = world.global_ranks[world.rank], "rank %s: load from %s: %s"
        logger.log(world.report_level, text, rank, checkpoint_dir, self._report)
        return loaded

    def _source(self, checkpoint_dir: str | Location, save: OpenedSave | None) -> Source:
        """The source of the load. Rank-local."""
        base, options = self.base_strategy, self.options
        root = located(checkpoint_dir, options)
        deadline = Deadline.after(OPENING * options.timeout_s)
        if self._is_own:
            checkpoint = run_within(deadline, root, lambda: base.open_to_load(root, options, save))
            return OwnSource(checkpoint, base.destination_of, options)
        name = type(base).__name__
        if options.strict_dtype:
            raise StrategyError(
                f"strict_dtype: {name} converts by itself; pass strict_dtype=True to "
                "dist_ckpt_strategies.load instead"
            )
        path = require_path(root, name)
        look = lambda: (OpenedSave(path), common_digest(path))  # noqa: E731
        return StrategySource(base, *run_within(deadline, path, look))

    @raises_megatron_errors
    def summarize_load_times(self) -> GroupReport | None:
        """Bytes and seconds of the last load, for each rank of the group.

        Collective over the group; its first rank logs the summary. None before the first load.
        """
        report = self._report
        if report is None:
            return None
        group = self._group("summary of a load")
        answers = run_and_gather(group, lambda: asdict(report))
        summary = GroupReport(tuple(BroadcastReport(**answer) for answer in answers))
        if group.rank == 0:
            logger.info("%s", summary)
        return summary

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        place = located(checkpoint_dir, self.options)
        arrays: StateDict = self.base_strategy.load_tensors_metadata(place)
        return arrays

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        place = located(checkpoint_dir, self.options)
        stored: StateDict = self.base_strategy.load_sharded_metadata(place)
        return stored

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless the base strategy reads this backend.

        Args:
            loaded_version: the backend's name; Megatron-Core called it so in this class.
        """
        self.base_strategy.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the base strategy reads this version."""
        self.base_strategy.check_version_compatibility(loaded_version)

    def _group(self, checkpoint_dir: object) -> Communicator:
        group = self.data_parallel_group
        return open_communicator(
            group,
            timeout_s=self.options.timeout_s,
            purpose=_PURPOSE,
            detail=f"from {checkpoint_dir}",
            channels=self._channels,
            payload_device=None if self.cpu_transfer else payload_device(group),
        )
