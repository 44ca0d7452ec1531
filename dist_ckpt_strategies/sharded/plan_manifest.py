"""Decide which segment of the manifest lists each array, and which rank writes the segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.inner_grid import num_inner_chunks

MAX_SEGMENT_NBYTES = 4 << 20
"""About the size of a segment: what a rank holds of the manifest while it is written."""

_ENTRY_NBYTES = 160
_CHUNK_NBYTES = 48
_DIGEST_NBYTES = 16


@dataclass(frozen=True, slots=True)
class ManifestPlan:
    """The manifest's segments, by their first keys.

    Attributes:
        firsts: the first key that each segment may hold; the empty one first.
        owners: the rank, within the group, that writes each segment.
    """

    firsts: tuple[str, ...]
    owners: tuple[int, ...]

    def segment_of(self, key: str) -> int:
        """The number of the segment that lists this key."""
        return bisect_right(self.firsts, key) - 1


def build_manifest_plan(
    arrays: Sequence[ArraySpec],
    object_keys: Iterable[str],
    num_ranks: int,
    max_segment_nbytes: int = MAX_SEGMENT_NBYTES,
) -> ManifestPlan:
    """Cut the keys into ranges of about equal description, one to a segment; at most one to a rank.

    Args:
        arrays: all arrays of the checkpoint.
        object_keys: of its objects, once for each shard.
        num_ranks: in the group that writes it.
        max_segment_nbytes: wanted size of a segment.
    """
    sizes: dict[str, int] = {}
    for array in arrays:
        sizes[array.key] = sizes.get(array.key, 0) + _described_nbytes(array)
    for key in object_keys:
        sizes[key] = sizes.get(key, 0) + _ENTRY_NBYTES + len(key)
    total = sum(sizes.values())
    num_segments = max(1, min(num_ranks, -(-total // max_segment_nbytes)))
    firsts = [""]
    seen = 0
    for key in sorted(sizes):
        if len(firsts) < num_segments and seen >= len(firsts) * total / num_segments:
            firsts.append(key)
        seen += sizes[key]
    owners = tuple(number * num_ranks // len(firsts) for number in range(len(firsts)))
    return ManifestPlan(tuple(firsts), owners)


def _described_nbytes(array: ArraySpec) -> int:
    """About the bytes that the manifest has about an array."""
    if not array.num_chunks:
        return _ENTRY_NBYTES + len(array.key)
    digests = num_inner_chunks(array, (0,) * len(array.shape)) + 1
    of_chunks = array.num_chunks * (_CHUNK_NBYTES + digests * _DIGEST_NBYTES)
    return _ENTRY_NBYTES + len(array.key) + of_chunks
