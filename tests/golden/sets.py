"""The golden checkpoints, the ways to load them, and how that is compared with what was saved."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.formats.objects import default_allowed, load_content
from tests.support.sharding import Cut, Part, same_bits

_HERE = Path(__file__).parent / "data"

TP4 = "m0123_tp4_modelonly"
RESHARDABLE = "m0153_tp2pp1dp2_fullyreshardable"
FLAT = "m0153_tp2pp2dp2_flat"
NAMES = (TP4, RESHARDABLE, FLAT)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GoldenSet:
    """An unpacked set: a checkpoint that Megatron-Core wrote, and what it held in memory."""

    folder: Path

    @classmethod
    def unpack(cls, name: str, target: Path) -> GoldenSet:
        """The set of that name, unpacked below ``target``."""
        with tarfile.open(_HERE / f"{name}.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
            archive.extractall(target)  # noqa: S202 - our own
        return cls(target / name)

    @property
    def checkpoint(self) -> str:
        """The checkpoint directory, as Megatron-Core takes it."""
        return str(self.folder / "ckpt")

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "expected.pt", weights_only=True)
        return found

    def part_of(self, cut: Cut, part: Part) -> torch.Tensor:
        """The content of a part of an array."""
        return self.tensors[cut.key][part.slices()].reshape(part.shape[cut.num_prepended :])

    @cached_property
    def objects(self) -> dict[str, Any]:
        path = self.folder / "expected_objects.pt"
        found: dict[str, Any] = load_content(path.read_bytes(), path, path.name, default_allowed())
        return found


def register() -> None:
    """Register the strategies in this process, with a limit for tests."""
    dist_ckpt_strategies.register(options=Options(timeout_s=30), replace=True)


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Keys that only one side has, or whose tensors differ in a bit."""
    keys = sorted(found.keys() | expected.keys())
    return [
        key
        for key in keys
        if key not in found or key not in expected or not same_bits(found[key], expected[key])
    ]


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
