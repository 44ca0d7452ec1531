"""Which of the ranks that hold a shard keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.core.array import ShardId, shard_from_wire, shard_to_wire
from dist_ckpt_strategies.core.balance import build_spread
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor


@dataclass(frozen=True, slots=True)
class ShardDistribution:
    """Which rank of a group keeps each shard; valid as long as the sharding is the same.

    Attributes:
        keepers: rank within the group, by shard.
    """

    keepers: Mapping[ShardId, int]


def deal_out(comm: Communicator, sharded: StateDict) -> ShardDistribution:
    """Deal the shards out among the ranks of a group. Collective over it."""

    def describe() -> list[Any]:
        values = (v for v in sharded_values(sharded) if isinstance(v, ShardedTensor))
        return [shard_to_wire(shard_spec(value)) for value in values]

    everyone = agree_and_gather(comm, describe)

    def deal() -> ShardDistribution:
        holders: dict[ShardId, list[int]] = {}
        nbytes: dict[ShardId, int] = {}
        for rank, wires in enumerate(everyone):
            for spec in map(shard_from_wire, wires):
                nbytes[spec.id] = spec.nbytes
                having = holders.setdefault(spec.id, [])
                if not having or having[-1] != rank:  # ranks come in order, each once
                    having.append(rank)
        return ShardDistribution(build_spread(holders, nbytes))

    return agree(comm, deal)


def only_kept(sharded: StateDict, distribution: ShardDistribution, rank: int) -> StateDict:
    """The state dict without the data of tensors that other ranks keep."""

    def keep(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        keeper = distribution.keepers.get(shard_spec(value).id)
        if keeper is None:
            raise PlanError(
                f"{value.key}: cached_metadata does not know this shard; leave it out after the "
                "sharding has changed",
                key=value.key,
            )
        return value if keeper == rank else value.without_data()

    return mapped_values(keep, sharded)
