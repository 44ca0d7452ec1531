"""Cut a sequence of transfers into batches that fit a memory budget."""

from __future__ import annotations

from collections.abc import Sequence


def build_batches(staged_nbytes: Sequence[int], budget_nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Positions of the transfers, batch by batch, in order.

    What needs no staging memory goes into the first batch, so that it is issued at once.

    Args:
        staged_nbytes: staging memory that each transfer needs, in bytes; 0 for none.
        budget_nbytes: bound on the sum within a batch; a larger transfer goes alone.
    """
    batches: list[list[int]] = [[n for n, size in enumerate(staged_nbytes) if size == 0]]
    used = 0
    for number, size in enumerate(staged_nbytes):
        if size == 0:
            continue
        if used and used + size > budget_nbytes:
            batches.append([])
            used = 0
        batches[-1].append(number)
        used += size
    return tuple(tuple(batch) for batch in batches if batch)
