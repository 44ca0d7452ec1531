"""Bring what the ranks know of a checkpoint's files together in its manifest, and write that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    ManifestIndex,
    SegmentEntry,
    index_content,
    merged_segment,
    write_segment,
)
from dist_ckpt_strategies.sharded.plan_manifest import ManifestPlan
from dist_ckpt_strategies.storage.store import Store


def run_manifest(
    plan: ManifestPlan,
    describe: Callable[[], Mapping[int, bytes]],
    file_store: Store,
    comm: Communicator,
    complete: Callable[[tuple[SegmentEntry, ...]], ManifestIndex],
) -> None:
    """Write every part, then the index, durably.

    Collective: four meetings and an exchange. Each rank holds its own description and the parts
    that it owns; of the sizes it tells only those of parts that it knows something of.

    Args:
        plan: who writes what.
        describe: gives what this rank knows of each part, as ``segment_content`` writes it.
        file_store: the checkpoint.
        comm: the ranks that the plan was made for.
        complete: makes the index out of its parts; called on the first rank.

    Raises:
        IncompleteCheckpointError: some chunk was written by nobody.
        StorageError: writing failed on this rank.
        PeerError: it failed on another.
    """
    known: dict[int, bytes] = {}

    def describe_own() -> list[list[int]]:
        known.update(describe())
        return [[n, len(known[n])] for n in sorted(known)]

    sizes = agree_and_gather(comm, describe_own)
    mine = [n for n, owner in enumerate(plan.owners) if owner == comm.rank]
    sends, incoming = agree(comm, lambda: _made_room(plan, known, sizes, comm.rank))
    comm.exchange(sends, [Receive(rank, memory) for (rank, _), memory in incoming.items()])

    def write_parts() -> list[list[Any]]:
        entries = []
        for n in mine:
            contents = [known[n]] if n in known else []
            contents += [m.tobytes() for (_, part), m in incoming.items() if part == n]
            entries.append(_written(plan, n, contents, file_store))
        return entries

    answers = agree_and_gather(comm, write_parts)

    agree_on_first(
        comm, lambda: file_store.write(INDEX_NAME, index_content(complete(_entries(answers))))
    )


def _made_room(
    plan: ManifestPlan,
    known: Mapping[int, bytes],
    sizes: Sequence[Sequence[Sequence[int]]],
    me: int,
) -> tuple[list[Send], dict[tuple[int, int], Bytes]]:
    """What this rank tells others, and memory for what they tell it, by rank and part."""
    incoming: dict[tuple[int, int], Bytes] = {
        (rank, n): np.empty(nbytes, np.uint8)
        for rank, of_rank in enumerate(sizes)
        for n, nbytes in of_rank
        if rank != me and plan.owners[n] == me
    }
    sends = [
        Send(plan.owners[n], np.frombuffer(bytearray(known[n]), np.uint8))
        for n in sorted(known)
        if plan.owners[n] != me
    ]
    return sends, incoming


def _entries(answers: Sequence[Sequence[Any]]) -> tuple[SegmentEntry, ...]:
    """The parts that all ranks have written, in their order."""
    found = [SegmentEntry(*entry) for of_rank in answers for entry in of_rank]
    return tuple(sorted(found, key=_by_first))


def _by_first(entry: SegmentEntry) -> str:
    return entry.first


def _written(
    plan: ManifestPlan, number: int, contents: list[bytes], file_store: Store
) -> list[Any]:
    """Write a part; its entry in the index, of JSON types."""
    try:
        arrays, objects = merged_segment(contents)
    except ValueError as error:
        raise IncompleteCheckpointError(
            f"{file_store}: what the ranks have written makes no checkpoint: {error}"
        ) from error
    entry = write_segment(file_store, number, plan.firsts[number], arrays, objects)
    return list(astuple(entry))
