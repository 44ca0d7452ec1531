"""Process groups for ranks that share their work."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_of_size(size: int) -> Any:
    """This rank's group, of the world cut into groups of a size. Collective: world."""
    made = [
        dist.new_group(list(range(first, first + size)))
        for first in range(0, dist.get_world_size(), size)
    ]
    return made[dist.get_rank() // size]
