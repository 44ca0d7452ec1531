"""Which ranks keep copies for each other."""

from __future__ import annotations

from dist_ckpt_strategies.errors import PlanError

Clique = tuple[int, ...]
"""Global ranks that keep copies for each other, ascending."""


def build_cliques(
    world_size: int, replication_jump: int, replication_factor: int, *, allow_uneven: bool = False
) -> tuple[Clique, ...]:
    """The cliques of all ranks, in the order of their first ranks.

    With J ranks between a copy and the next, and F copies, a clique is ``n, n+J, ..., n+(F-1)J``
    for ``n = aJF + b``, ``0 <= b < J``. J is the number of ranks that fail together: those of a
    node, or of a rack.

    Args:
        world_size: W, all ranks.
        replication_jump: J.
        replication_factor: F, copies of each part, its owner's among them.
        allow_uneven: where W is not divisible by JF, make some cliques larger; none is smaller
            than F. The ranks left over join, in order, the last cliques, so that two of one node
            are never in one clique if there is a full block of JF ranks.

    Raises:
        PlanError: a number is less than 1; W is not divisible by JF and ``allow_uneven`` is not
            set; or there are fewer than F nodes of J ranks.

    Source: the replication groups of NVIDIA's resiliency extension.
    """
    _require_positive(world_size, replication_jump, replication_factor)
    block = replication_jump * replication_factor
    if world_size % block and not allow_uneven:
        raise PlanError(
            f"world size {world_size} is not divisible by replication_jump * replication_factor = "
            f"{replication_jump} * {replication_factor} = {block}; choose others, or "
            "allow_uneven=True for some larger cliques"
        )
    num_nodes = -(-world_size // replication_jump)
    if num_nodes < replication_factor:
        raise PlanError(
            f"{replication_factor} copies of each part need as many nodes of {replication_jump} "
            f"ranks (replication_jump); world size {world_size} makes {num_nodes}"
        )
    num_blocks = world_size // block
    if num_blocks == 0:  # F nodes, the last one not full
        num_columns = world_size - replication_jump * (replication_factor - 1)
        starts = list(range(num_columns))
    else:
        starts = [a * block + b for a in range(num_blocks) for b in range(replication_jump)]
    cliques = [
        [start + copy * replication_jump for copy in range(replication_factor)] for start in starts
    ]
    taken = {rank for clique in cliques for rank in clique}
    left = [rank for rank in range(world_size) if rank not in taken]
    for place, rank in enumerate(left, start=-len(left) % len(cliques)):
        cliques[place % len(cliques)].append(rank)
    return tuple(tuple(sorted(clique)) for clique in cliques)


def _require_positive(world_size: int, replication_jump: int, replication_factor: int) -> None:
    values = {
        "world_size": world_size,
        "replication_jump": replication_jump,
        "replication_factor": replication_factor,
    }
    for name, value in values.items():
        if value < 1:
            raise PlanError(f"{name}: expected 1 or more, found {value}")
