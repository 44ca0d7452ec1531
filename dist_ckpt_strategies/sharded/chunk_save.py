"""Save what each rank holds in format ("zarr", 1): ``start_save`` is that of packs.

Each shard is a file. All are written to a staging directory; the first rank moves them into place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from dist_ckpt_strategies.comm.base import Message, run_and_gather
from dist_ckpt_strategies.core.blocks import OBJECT_SUFFIX, BlockTable
from dist_ckpt_strategies.device import settle
from dist_ckpt_strategies.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.formats.commit import Staged, commit_staged, give_up, staging_of
from dist_ckpt_strategies.formats.pack_write import pack_starts
from dist_ckpt_strategies.formats.zarr_write import (
    ChunkJob,
    NewFile,
    chunk_name,
    expected_files,
    metadata_files,
    object_name,
    require_grids,
    sync_files,
    write_files,
)
from dist_ckpt_strategies.sharded.ledger import Ledger, proved
from dist_ckpt_strategies.sharded.pack_save import Contents, Known, Started, host_batches
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import ENDING, WORK, Deadline, Job, Transfer, run_within

_NUM_THREADS = 16


def write_chunks(started: Started, deadline: Deadline) -> None:
    """Write this rank's chunks and objects to the staging directory, durably. Rank-local.

    CUDA tensors and those that are not in C order are copied first, ``max_inflight_bytes`` at a
    time, or the largest tensor.

    Raises:
        StorageError: one cannot be written, or there is no room for all.
    """
    contents, options = started.contents, started.options
    run_within(deadline, started.store, started.require_space)
    settle(contents.tensors)
    names, store = _names(contents), _staging(started)
    written: list[tuple[str, str]] = []
    for pack in started.known.layout.packs:
        sources = (source for source in pack.sources if source >= 0)
        for batch in host_batches(contents, pack, options.max_inflight_bytes):
            files = [
                NewFile(*names[source], content)
                for content, source in zip(batch, sources, strict=False)
                if content.size
            ]
            write_files(store, files, options.io_threads, deadline)
            written += [file[:2] for file in files]
    files = list(metadata_files(contents.shards))
    write_files(store, files, options.io_threads, deadline)
    written += [file[:2] for file in files]
    sync_files(store, written, options.io_threads, deadline)


def chunk_job(started: Started) -> ChunkJob:
    """What a background save writes from a copy that is laid out as packs."""
    layout, options, names = started.known.layout, started.options, _names(started.contents)
    *starts, _ = pack_starts(layout.packs)
    chunks = []
    for pack, start in zip(layout.packs, starts, strict=True):
        places = accumulate(pack.sizes, initial=start + pack.data_start)
        for source, at, size in zip(pack.sources, places, pack.sizes, strict=False):
            if source >= 0 and size:
                chunks.append((*names[source], at, size))
    described = tuple(metadata_files(started.contents.shards))
    timeout_s = WORK * options.timeout_s
    return ChunkJob(_staging(started), tuple(chunks), described, timeout_s, options.io_threads)


def finish_chunks(
    started: Started,
    written: Callable[[], object],
    *,
    marker: bytes | None,
    fence: Callable[[], None] = lambda: None,
) -> Known:
    """Make the save the content of its directory, once every rank has written. Collective.

    If it fails on any rank, every rank raises, and what was written is removed, unless files of
    the old checkpoint have been moved beside it already. Arguments and errors are those of
    ``finish_save``; besides, a PlanError where shards are on no regular grid.
    """
    comm, known, root = started.comm, started.known, _root(started)
    ledgers: list[Ledger] = []
    tables: list[BlockTable] = []

    def wait() -> Message:
        if known.ledger is not None:
            ledgers.append(proved(known.ledger, comm.global_ranks))
            tables.extend(BlockTable.from_bytes(main) for _, main, _ in known.ledger.told)
            require_grids(tables, comm.global_ranks)
        written()
        return None

    def make_visible() -> Message:
        if comm.rank == 0:
            _require_files(started, tables)
            keys = {key.removesuffix(OBJECT_SUFFIX) for table in tables for key in table.keys}
            parts = [str(rank) for rank in comm.global_ranks]
            staged = Staged(root, started.save_id, keys, parts)
            commit_staged(staged, marker, overwrite=started.overwrite, fence=fence)
        return None

    try:
        run_and_gather(comm, wait, is_sparse=True)  # 2
        deadline = Deadline.after(ENDING * started.options.timeout_s)
        run_and_gather(comm, lambda: run_within(deadline, root, make_visible), is_sparse=True)  # 3
    except CheckpointError as error:
        unsure = (PeerTimeoutError, PeerLostError, StorageTimeoutError)
        if comm.rank == 0 and not isinstance(error, unsure):
            give_up(staging_of(root, started.save_id).root)
        raise
    return replace(known, ledger=next(iter(ledgers), None))


def _root(started: Started) -> Path:
    assert isinstance(started.store, Directory)  # noqa: S101 - the strategy takes no URL
    return started.store.root


def _staging(started: Started, rank: int | None = None) -> Directory:
    """Where a rank writes, by default this one: two that hold the same do not meet there."""
    comm = started.comm
    part = comm.global_ranks[comm.rank if rank is None else rank]
    return Directory(staging_of(_root(started), started.save_id).root / str(part))


def _names(contents: Contents) -> list[tuple[str, str]]:
    """Key and file of each source of a layout."""
    chunks = [(s.key, chunk_name(s.key, *s.region)) for s in contents.shards]
    objects = [(name.key, object_name(name)) for name, _ in contents.objects]
    return [*chunks, *objects, ("common state", COMMON_NAME)]


def _require_files(started: Started, tables: Sequence[BlockTable]) -> None:
    """Raise where the first rank does not see what another has written."""

    def require(store: Directory, rank: int, name: str, nbytes: int | None) -> None:
        if not store.has_bytes(name, nbytes):
            raise IncompleteCheckpointError(
                f"{store.path(name)}, which rank {rank} has written, is gone or has another size; "
                "nothing was committed; save again, from all ranks to one directory on a file "
                "system that they share",
                path=store.path(name),
            )

    jobs = []
    for number, table in enumerate(tables):
        store, rank = _staging(started, number), started.comm.global_ranks[number]
        for name, nbytes in expected_files(table):
            jobs.append(Job("", store.path(name), partial(require, store, rank, name, nbytes)))
    Transfer(jobs, _NUM_THREADS).wait()
