"""The whole state of all ranks, as one digest per global tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    apply_factories,
    is_main_replica,
)

from dist_ckpt_strategies.cli.demo.digest import digest_tensor
from dist_ckpt_strategies.cli.demo.task import DemoError


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a global tensor and its elements."""

    global_shape: tuple[int, ...]
    index: tuple[int | slice, ...]
    data: torch.Tensor


def gather_global_digests(sharded_state: Mapping[str, Any]) -> dict[str, str]:
    """On global rank 0 the digest of every whole tensor, by key; elsewhere nothing.

    Rank 0 receives the whole state at once; the demonstration's is small.

    Collective: world, with the same keys' shards anywhere among the ranks.

    Args:
        sharded_state: a Megatron sharded state dict; it is not changed.

    Raises:
        DemoError: the shards of a tensor do not cover it exactly once.
    """
    pieces = _gather_pieces(_local_pieces(sharded_state))
    return {key: digest_tensor(_whole(key, parts)) for key, parts in sorted(pieces.items())}


def _local_pieces(sharded_state: Mapping[str, Any]) -> dict[str, list[_Piece]]:
    """This rank's main replicas, by key."""
    # apply_factories replaces entries of the dicts it walks through.
    state = _copied_dicts(sharded_state)
    apply_factories(state)
    pieces: dict[str, list[_Piece]] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            # A clone, because pickling a view would send the whole buffer that it looks into.
            data = shard.data.detach().clone()
            piece = _Piece(tuple(shard.global_shape), shard.global_slice(), data)
            pieces.setdefault(shard.key, []).append(piece)
    return pieces


def _copied_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied_dicts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied_dicts(item) for item in value]
    return value


def _gather_pieces(local: dict[str, list[_Piece]]) -> dict[str, list[_Piece]]:
    """All ranks' pieces on global rank 0, none elsewhere. Collective: world."""
    if dist.get_rank() != 0:
        dist.gather_object(local)
        return {}
    gathered: list[dict[str, list[_Piece]]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(local, gathered)
    whole: dict[str, list[_Piece]] = {}
    for pieces in gathered:
        for key, parts in pieces.items():
            whole.setdefault(key, []).extend(parts)
    return whole


def _whole(key: str, pieces: list[_Piece]) -> torch.Tensor:
    whole = torch.zeros(pieces[0].global_shape, dtype=pieces[0].data.dtype)
    times_written = torch.zeros(pieces[0].global_shape, dtype=torch.uint8)
    for piece in pieces:
        whole[piece.index] = piece.data
        times_written[piece.index] += 1
    if not bool((times_written == 1).all()):
        covered = int((times_written == 1).sum())
        total = math.prod(pieces[0].global_shape)
        raise DemoError(f"{key}: {covered} of {total} elements are held exactly once", key=key)
    return whole
