"""Loading in two stages, under the names that Megatron-Core 0.15 gave it: read once, send on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, report_level
from dist_ckpt_strategies.comm.new_groups import new_gloo_groups
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_alive,
    is_distributed,
    payload_device,
    require_member,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.report import BroadcastReport, GroupReport
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.checkpoints import Share
from dist_ckpt_strategies.formats.locations import located, require_path
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.bases import LoadShardedStrategy
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    destination,
    warn_of_conversions,
)
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_limit
from dist_ckpt_strategies.strategies.sharded_strategies import BaseLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr_format2 import EitherFormatLoadShardedStrategy
from dist_ckpt_strategies.two_stage.load import GroupLoad, prepare_group_load, run_group_load
from dist_ckpt_strategies.two_stage.sources import CheckpointSource, StrategySource

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_PURPOSE = "two-stage load"

_NUM_CHANNELS = 2
"""Gloo moves twice as much over two groups side by side."""


@dataclass(frozen=True, slots=True)
class _ShardedTensorMetadata:
    """What ``deduplicate_chunks`` and ``load_tensor_from_storage`` take, as Megatron-Core had it.

    Attributes:
        global_rank: the rank that wants the tensor.
        sharded_tensor_no_data: which one.
        dist_group_rank: that rank, within its data-parallel group.
        dist_group_ranks: the ranks of the group.
        data_size: in bytes.
    """

    global_rank: int
    sharded_tensor_no_data: Any
    dist_group_rank: int
    dist_group_ranks: tuple[int, ...]
    data_size: int | None = None


def sharded_tensor_chunk_id(sharded_tensor: Any) -> tuple[str, tuple[int, ...]]:
    """What tells the shards of a checkpoint apart: key, and offset in elements."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset)


def timed(verbose: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:  # noqa: FBT001, FBT002 - Megatron's signature
    """Decorate a method so that the seconds of each call are noted, and logged.

    They are noted in the object's ``call_times``, where it has such a dict: lists of seconds by
    the method's name.

    Args:
        verbose: also log each call, at level debug.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.monotonic() - began
                noted = getattr(args[0], "call_times", None) if args else None
                if noted is not None:
                    noted.setdefault(function.__name__, []).append(seconds)
                if verbose:
                    logger.debug("%s took %.3f s", function.__name__, seconds)

        return call

    return decorate


class TwoStageDataParallelLoadShardedStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Reads every shard once within a data-parallel group, and passes it on to the other ranks.

    Args:
        data_parallel_group: ranks that share the reading; None for the world.
        cpu_transfer: send from host to host, over gloo; ranks of one host take what one of them
            has read from a local file system out of the page cache. False sends over the group's
            own backend, with NCCL from GPU to GPU.
        base_strategy: reads the storage; by default a strategy for ("zarr", 1) and ("zarr", 2).
            With the strategies for these each rank reads an even share of what several ranks
            request, straight into the tensors. Any other load strategy, such as Megatron-Core's
            for ``torch_dist``, is called once on every rank, with the whole shards that this rank
            reads; what it loads is in memory at once.
        max_inflight_bytes: bound, per rank, on memory for what is on its way; by default that of
            the base strategy, or what the environment says.
        timeout_s: longest wait for a peer, by default the same.
        allow: further classes that ShardedObjects may be unpickled to.

    Attributes:
        call_times: seconds of each call of ``load`` and ``load_tensor_from_storage``.
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
        self.base_strategy = _checked_base(base_strategy, allow)
        self.call_times: dict[str, list[float]] = {}
        self._channels: tuple[ProcessGroup, ...] = ()
        self._options = _options_of(self.base_strategy).with_changes(
            max_inflight_bytes=max_inflight_bytes, timeout_s=timeout_s
        )
        self._allow = tuple(allow)
        self._report: BroadcastReport | None = None

    @property
    def options(self) -> Options:
        """How loads are carried out."""
        return self._options

    @property
    def takes_urls(self) -> bool:
        """Whether a checkpoint may be in an object store, by the base strategy."""
        return bool(getattr(self.base_strategy, "takes_urls", False))

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the base strategy reads ShardedObjects; they are read once per group too."""
        return bool(self.base_strategy.can_handle_sharded_objects)

    @raises_megatron_errors
    def maybe_init_gloo_group(self) -> None:
        """Make the gloo groups that ``cpu_transfer`` needs, once for this strategy.

        Collective over the world the first time, and the first time after the world was destroyed
        and made again; ``load`` calls it.
        """
        if not self.cpu_transfer or not is_distributed():
            return
        if self._channels and all(map(is_alive, self._channels)):
            return
        self._channels = ()
        self._channels = new_gloo_groups(
            self.data_parallel_group_orig, _NUM_CHANNELS, timeout_s=self._options.timeout_s
        )
        self.data_parallel_group = self._channels[0]

    @timed()
    @raises_megatron_errors
    def load(
        self,
        sharded_state_dict: StateDict,
        checkpoint_dir: str | Path,
        async_strategy: object = None,  # noqa: ARG002 - later releases of Megatron-Core pass it
    ) -> StateDict:
        """Read what the state dict asks for. Collective over the world.

        Peak memory beside the tensors: ``max_inflight_bytes``, and the largest shard.

        Returns:
            A state dict of the same structure; see ``ZarrLoadShardedStrategy.load``.

        Raises:
            ShapeMismatchError: another shape is stored, and ``allow_shape_mismatch`` is not set.
            DTypeMismatchError: another dtype is stored, and the option ``strict_dtype`` is set.
            StorageError: an array, chunk or object is missing or damaged.
            PeerError: the same, on another rank; the message names rank, key and file.
            StrategyError: a rank is not in the data-parallel group that it has given; or
                ``strict_dtype`` is set, and the base strategy is none of this package.
        """
        self.maybe_init_gloo_group()
        world = open_communicator(
            None,
            timeout_s=self._options.timeout_s,
            purpose=_PURPOSE,
            detail=f"from {checkpoint_dir}",
        )
        if not self.cpu_transfer:
            agree(world, lambda: require_member(self.data_parallel_group))
        group = self._group(checkpoint_dir)
        with time_limit(self._options.timeout_s):
            if isinstance(self.base_strategy, BaseLoadShardedStrategy):
                loaded = self._load_checkpoint(sharded_state_dict, checkpoint_dir, world, group)
            else:
                loaded = self._load_through(sharded_state_dict, checkpoint_dir, world, group)
        who = world.global_rank(world.rank)
        text = "rank %s: load from %s: %s"
        logger.log(report_level(world), text, who, checkpoint_dir, self._report)
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

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """A ShardedTensor without data, by key, for each stored array. Rank-local."""
        root = located(checkpoint_dir, self._options)
        found: StateDict = self.base_strategy.load_tensors_metadata(root)
        return found

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> StateDict:
        """Like ``load_tensors_metadata``, with ShardedObjects by unique key. Rank-local."""
        root = located(checkpoint_dir, self._options)
        found: StateDict = self.base_strategy.load_sharded_metadata(root)
        return found

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless the base strategy reads this backend.

        Args:
            loaded_version: the backend's name; Megatron-Core called it so in this class.
        """
        self.base_strategy.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the base strategy reads this version."""
        self.base_strategy.check_version_compatibility(loaded_version)

    @timed()
    @raises_megatron_errors
    def load_tensor_from_storage(self, checkpoint_dir: str | Path, ten_meta: Any) -> torch.Tensor:
        """One tensor, read by this rank alone: a new CPU tensor.

        Rank-local over a strategy of this package; otherwise as collective as the base's ``load``.

        Args:
            checkpoint_dir: the checkpoint.
            ten_meta: a _ShardedTensorMetadata, or whatever has the wanted ShardedTensor as
                ``sharded_tensor_no_data``.
        """
        root = located(checkpoint_dir, self._options)
        wanted = {"tensor": ten_meta.sharded_tensor_no_data.without_data()}
        base = self.base_strategy
        read = base.load_alone if isinstance(base, BaseLoadShardedStrategy) else base.load
        tensor: torch.Tensor = read(wanted, root)["tensor"]
        return tensor

    def deduplicate_chunks(self, ten_metas: Iterable[Any]) -> list[Any]:
        """For each shard the entry of the lowest rank, sorted by shard. Rank-local.

        Kept for its name: ``load`` itself spreads the reading evenly (``two_stage.plan``).

        Args:
            ten_metas: entries with ``sharded_tensor_no_data`` and ``dist_group_rank``.
        """
        lowest: dict[Any, Any] = {}
        for meta in ten_metas:
            chunk = sharded_tensor_chunk_id(meta.sharded_tensor_no_data)
            if chunk not in lowest or meta.dist_group_rank < lowest[chunk].dist_group_rank:
                lowest[chunk] = meta
        return [meta for _, meta in sorted(lowest.items(), key=itemgetter(0))]

    def _load_checkpoint(
        self,
        state_dict: StateDict,
        checkpoint_dir: str | Path,
        world: Communicator,
        group: Communicator,
    ) -> StateDict:
        """Load a checkpoint of a format of this package. Collective over the world."""
        base, options = self.base_strategy, self._options
        prepared: list[tuple[CheckpointSource, GroupLoad]] = []

        def prepare() -> Conversions:
            source = CheckpointSource(
                lambda: located(checkpoint_dir, options),
                lambda location: base.open_checkpoint(
                    location, options, Share(group.rank, group.size)
                ),
            )
            load = prepare_group_load(
                state_dict, source, group, options, partial(base.tensors_to_fill, options=options)
            )
            prepared.append((source, load))
            converted: Conversions = load.noted
            return converted

        def run() -> StateDict:
            source, load = prepared[0]
            loaded, self._report = run_group_load(load, source, group, options, base.allowed)
            return loaded

        converted = agree_and_gather(world, prepare)
        restart_limit()
        loaded = agree(world, run)
        warn_of_conversions(world, checkpoint_dir, converted)
        return loaded

    def _load_through(
        self,
        state_dict: StateDict,
        checkpoint_dir: str | Path,
        world: Communicator,
        group: Communicator,
    ) -> StateDict:
        """Load through a base strategy whose ``load`` is collective over the world. Collective."""
        options = self._options

        def place() -> Path:
            if options.strict_dtype:
                raise StrategyError(
                    f"strict_dtype: {type(self.base_strategy).__name__} converts by itself; pass "
                    "strict_dtype=True to dist_ckpt_strategies.load instead"
                )
            location = located(checkpoint_dir, options)
            return require_path(location, f"{type(self.base_strategy).__name__}")

        root = agree(world, place)
        source = StrategySource(root)

        def prepare() -> tuple[GroupLoad, StateDict]:
            load = prepare_group_load(state_dict, source, group, options, _destinations)
            return load, source.own_part(load, group.rank)

        load, own = agree(world, prepare)
        source.loaded = agree(world, lambda: self.base_strategy.load(own, root))
        loaded, self._report = agree(
            world, lambda: run_group_load(load, source, group, options, self._allowed)
        )
        return loaded

    def _group(self, checkpoint_dir: object) -> Communicator:
        group = self.data_parallel_group
        return open_communicator(
            group,
            timeout_s=self._options.timeout_s,
            purpose=_PURPOSE,
            detail=f"from {checkpoint_dir}",
            channels=self._channels,
            payload_device=None if self.cpu_transfer else payload_device(group),
        )

    def _allowed(self) -> list[Any]:
        return [*default_allowed(), *self._allow]


def _destinations(tensors: Iterable[Any], _stored: object) -> tuple[list[torch.Tensor], None]:
    return [destination(tensor) for tensor in tensors], None


def _checked_base(base: Any, allow: Allowed) -> Any:
    if base is None:
        return EitherFormatLoadShardedStrategy(allow=allow)
    if not isinstance(base, LoadShardedStrategy):
        raise StrategyError(f"base_strategy: expected a sharded load strategy, found {base!r}")
    return base


def _options_of(base: Any) -> Options:
    if isinstance(base, BaseLoadShardedStrategy):
        return base.options
    return options_from_environment()
