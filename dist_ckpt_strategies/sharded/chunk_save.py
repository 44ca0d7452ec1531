"""Format ("zarr", 1) in a save: each shard is a file.

All are written to a staging directory; the first rank moves them into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.core.blocks import OBJECT_SUFFIX, BlockTable
from dist_ckpt_strategies.errors import CheckpointError, StorageTimeoutError
from dist_ckpt_strategies.formats.commit import commit_staged, give_up, staging_of
from dist_ckpt_strategies.formats.pack_commit import NOT_COMMITTED, require_files
from dist_ckpt_strategies.formats.pack_write import PackRecord, Write
from dist_ckpt_strategies.formats.zarr2 import (
    chunk_name,
    expected_files,
    metadata_files,
    object_name,
    require_grids,
    write_chunks,
)
from dist_ckpt_strategies.sharded.ledger import Ledger
from dist_ckpt_strategies.sharded.save import SaveFormat, Started
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import WORK


def _writer(started: Started) -> Write:
    contents, options, packs = started.contents, started.options, started.cache.layout.packs
    names = [(s.key, chunk_name(s.key, *s.region)) for s in contents.shards]
    names += [(name.key, object_name(name)) for name, _ in contents.objects]
    names.append(("common state", COMMON_NAME))
    chunks = [
        names[source]
        for pack in packs
        for source, size in zip(pack.sources, pack.sizes, strict=True)
        if source >= 0 and size
    ]
    # Its own: ranks that hold the same shard write to different directories.
    store, timeout_s = Directory(_staging(started) / str(started.rank)), WORK * options.timeout_s
    others = tuple(metadata_files(contents.shards))
    return partial(write_chunks, store, chunks, others, options.io_threads, timeout_s)


def _commit(
    started: Started,
    ledger: Ledger,
    _: Sequence[Message],
    marker: bytes | None,
    overwrite: bool,  # noqa: FBT001
) -> None:
    """Move the files into place; a PlanError where shards are on no regular grid."""
    ranks = started.comm.global_ranks
    tables = [BlockTable.from_bytes(main) for _, main, _ in ledger.told]
    require_grids(tables, ranks)
    written = [
        (Directory(_staging(started) / str(rank)), *file, rank)
        for rank, table in zip(ranks, tables, strict=True)
        for file in expected_files(table)
    ]
    require_files(written, NOT_COMMITTED)
    keys = {key.removesuffix(OBJECT_SUFFIX) for table in tables for key in table.keys}
    parts = [str(rank) for rank in ranks]
    commit_staged(_staging(started), marker, overwrite=overwrite, keys=keys, parts=parts)


def _discard(started: Started, _: Sequence[PackRecord], error: CheckpointError) -> None:
    """Remove what was written, unless files of the old checkpoint have been moved beside it."""
    if started.comm.rank == 0 and not isinstance(error, StorageTimeoutError):
        give_up(_staging(started))


CHUNKS = SaveFormat("('zarr', 1)", _writer, _commit, _discard)


def _staging(started: Started) -> Path:
    assert isinstance(started.store, Directory)  # noqa: S101 - the strategy takes no URL
    return staging_of(started.store.root, started.save_id).root
