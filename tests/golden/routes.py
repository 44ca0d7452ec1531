"""The ways in which ranks load a checkpoint, under one signature."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.config import Engine
from tests.golden.sets import register_engine


class Route(StrEnum):
    """Who is asked to load."""

    MEGATRON = "dist_checkpointing.load"
    OURS = "dist_ckpt_strategies.load"
    WRAPPED = "FullyParallelLoadStrategyWrapper"
    OURS_WRAPPED = "dist_ckpt_strategies.load, wrapped"


def load_along(route: Route, state_dict: Any, checkpoint: str, **options: Any) -> Any:
    """What the route gives. Collective over the world, ``("zarr", 1)`` registered."""
    load: Any = dist_checkpointing.load
    if route in (Route.OURS, Route.OURS_WRAPPED):
        load = dist_ckpt_strategies.load
    if route in (Route.MEGATRON, Route.OURS):
        return load(state_dict, checkpoint, **options)
    base = serialization.get_default_load_sharded_strategy(checkpoint)
    wrapper = FullyParallelLoadStrategyWrapper(base)
    with cpu_stand_ins():
        return load(state_dict, checkpoint, wrapper, **options)


def begin_rank(engine: Engine) -> tuple[int, int]:
    """Register an engine in a rank's process; the rank and the size of its world."""
    register_engine(engine)
    return dist.get_rank(), dist.get_world_size()


def require_done(results: Iterable[Any]) -> list[Any]:
    """The results of ``run_processes``, once none of them is an exception."""
    found = list(results)
    errors = [result for result in found if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return found
