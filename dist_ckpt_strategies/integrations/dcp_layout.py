"""A state that DCP would save, as the sharded state dict of it that our own functions take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dist_ckpt_strategies.comm.base import run_and_gather
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import PlanError, raises_megatron_errors
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.integrations.dcp_storage import plain_state, put_back, with_text_keys
from dist_ckpt_strategies.local.plan import build_distribution
from dist_ckpt_strategies.megatron.shards import message_of, object_from_message, shard_from_message
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.strategies.compare import compare as compare_sharded
from dist_ckpt_strategies.strategies.compare_report import CompareReport
from dist_ckpt_strategies.strategies.save import save_async


@raises_megatron_errors
def async_save(
    state_dict: Mapping[str, Any],
    path: str | Path,
    *,
    allow: Allowed = (),
    overwrite: bool = True,
    timeout_s: float | None = None,
) -> LocalSaveRequest:
    """Save in the background what ``load`` reads; blocks for the copy to host memory.

    Collective over the world, as is ``wait`` of what it returns: that makes the checkpoint visible,
    or raises on every rank where one has failed. A save that still runs is waited for first.

    Raises:
        PlanError, UnsafeObjectError, CheckpointExistsError, StorageError, PeerError: as ``save``.
    """
    whole = dict[str, Any]()

    def state() -> Mapping[str, Any]:
        whole.update(plain_state(state_dict))
        return whole

    shards = _agreed_layout(state, timeout_s).shards(whole)
    return save_async(shards, path, overwrite=overwrite, allow=allow, timeout_s=timeout_s)


@raises_megatron_errors
def compare(
    state_dict: Mapping[str, Any],
    path: str | Path,
    *,
    ignore: Sequence[str] = (),
    allow: Allowed = (),
    options: Options | None = None,
) -> CompareReport:
    """Compare a state, as DCP takes it, with a checkpoint; see ``dist_ckpt_strategies.compare``.

    Collective over the world.
    """

    def state() -> dict[str, Any]:
        return _shards_of(plain_state(state_dict))

    return compare_sharded(state, path, ignore=ignore, allow=allow, options=options)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The shards and values of a training's states that this rank saves; see ``shard_layout``.

    Attributes:
        own: those that this rank saves.
        held: those that this rank holds.
    """

    own: frozenset[Any]
    held: frozenset[Any]

    def shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A sharded state dict for ``TieredCheckpointManager``, ``save`` or ``load``. Rank-local.

        Its tensors share memory with those of the state, which a load fills.

        Raises:
            PlanError: the state has what it had not when the layout was made. On all ranks, if a
                function that calls this is given to the manager's ``save``.
        """
        shards = _shards_of(state)
        for value in shards.values():
            name = _name_of(message_of(value))
            if name not in self.held:
                raise PlanError(
                    f"{value.key}: not in the layout, which was made of a state without this "
                    "shard; make it anew by shard_layout, on all ranks",
                    key=value.key,
                )
            value.replica_id = int(name not in self.own)
        return shards

    def restore(self, state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        """Put values that are no tensors into a state, of what a load has returned. Rank-local.

        One that a load with a ``strict`` that only logs has not returned stays as it is.
        """
        plain = with_text_keys(state)
        planner = _planner_of(plain)
        for key, path in planner.mappings.items():
            if key in loaded and not isinstance(planner.state_dict[key], torch.Tensor):
                parents: Any = reduce(getitem, path[:-1], plain)
                parents[path[-1]] = loaded[key]
        put_back(state, plain)


@raises_megatron_errors
def shard_layout(state: Mapping[str, Any], *, timeout_s: float | None = None) -> ShardLayout:
    """Find out which ranks hold what, and choose who saves it. Collective over the world.

    Raises:
        PeerError, PeerTimeoutError, PeerLostError: another rank has failed.
    """
    return _agreed_layout(lambda: state, timeout_s)


def _agreed_layout(state: Callable[[], Mapping[str, Any]], timeout_s: float | None) -> ShardLayout:
    chosen = options_from_environment().with_changes(timeout_s=timeout_s)
    comm = open_communicator(None, timeout_s=chosen.timeout_s, purpose="shard layout")
    held = run_and_gather(comm, lambda: [message_of(one) for one in _shards_of(state()).values()])
    specs = [[spec for message in one if (spec := shard_from_message(message))] for one in held]
    owners: dict[Any, int] = {**build_distribution(specs)}
    for rank, messages in enumerate(held):
        for name in map(_name_of, messages):
            owners.setdefault(name, rank)
    own = frozenset(name for name, rank in owners.items() if rank == comm.rank)
    return ShardLayout(own, frozenset(map(_name_of, held[comm.rank])))


def _planner_of(state: Mapping[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    return planner


def _shards_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's shards of a state, with DCP's keys; no rank is chosen to save them yet."""
    planner, shards = _planner_of(state), {}
    for item in planner.create_local_plan().items:
        key, data, stored = item.index.fqn, planner.lookup_object(item.index), item.tensor_data
        if stored is None:
            shards[key] = ShardedObject(key, data, (1,), (0,))
            continue
        offset, size = tuple(stored.chunk.offsets), tuple(stored.chunk.sizes)
        if all(size) or not all(stored.size):
            shards[f"{key}@{offset}"] = ShardedTensor(
                key, data.detach(), data.dtype, size, tuple(stored.size), offset, None
            )
    return shards


def _name_of(message: Any) -> Any:
    spec = shard_from_message(message)
    return object_from_message(message) if spec is None else spec.id
