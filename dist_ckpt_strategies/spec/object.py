"""The name of one shard of a sharded object."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from dist_ckpt_strategies.spec.region import Extent

_NAME = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)", re.ASCII)
UNKNOWN = -1


@dataclass(frozen=True, slots=True, order=True)
class ObjectId:
    """One shard of a grid of objects.

    Attributes:
        key: name of the object; ``/`` separates directories.
        offset: position in the grid, in shards.
        shape: of the grid, in shards; its last number is UNKNOWN (-1) in a name of the older form.
    """

    key: str
    offset: Extent
    shape: Extent

    @property
    def unique_key(self) -> str:
        """The name under which Megatron-Core stores the shard, without ``.pt``."""
        return f"{self.key}/shard_{_joined(self.offset)}_{_joined(self.shape)}"

    @property
    def older_key(self) -> str:
        """The name that early releases used: the last number of the shape is missing."""
        return f"{self.key}/shard_{_joined(self.offset)}_{_joined(self.shape[:-1])}"

    @property
    def num_shards(self) -> int:
        """Shards of the whole grid."""
        return math.prod(self.shape)

    @classmethod
    def parse(cls, unique_key: str) -> Self | None:
        """The shard of that name, in the present or the older form; None for another name."""
        key, _, name = unique_key.rpartition("/")
        match = _NAME.fullmatch(name)
        if not key or match is None:
            return None
        offset, shape = (tuple(map(int, part.split("."))) for part in match.groups())
        if len(shape) + 1 == len(offset):
            shape = (*shape, UNKNOWN)
        return cls(key, offset, shape) if len(shape) == len(offset) else None


def _joined(numbers: Extent) -> str:
    return ".".join(map(str, numbers))
