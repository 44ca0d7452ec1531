"""Checkpoints that can be read, of either format."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.plan.chunking import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.manifest import ArrayRecord
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.base import ArrayReader
from dist_ckpt_strategies.storage.buckets.arrays import BucketReader, check_chunk, num_requests
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.buckets.publication import require_something
from dist_ckpt_strategies.storage.disk.file_access import file_access, permitted_access
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, file_errors, require_directory
from dist_ckpt_strategies.storage.disk.page_cache import begin_readahead
from dist_ckpt_strategies.storage.file_store import Directory, FileStore
from dist_ckpt_strategies.storage.format1.engines import open_array_store
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.arrays import Zarr3Reader
from dist_ckpt_strategies.storage.format2.checks import (
    FileCheck,
    check_buffers,
    chunk_checks,
    common_check,
    metadata_check,
    object_check,
    pack_ends,
)
from dist_ckpt_strategies.storage.format2.chunk_files import ChunkFile
from dist_ckpt_strategies.storage.format2.layout import chunk_name
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME, digest_of
from dist_ckpt_strategies.storage.format2.manifest_reader import Manifest
from dist_ckpt_strategies.storage.locations import Location
from dist_ckpt_strategies.storage.objects.pickled import object_path, plain_content, read_content
from dist_ckpt_strategies.storage.transfers import Job, run_pooled


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a task that ranks share out is whose.

    Attributes:
        rank: this one, within its group.
        num_ranks: in the group.
    """

    rank: int = 0
    num_ranks: int = 1


def has_manifest(root: Path) -> bool:
    """Whether a directory holds a checkpoint of format ("zarr", 2), whatever else it says."""
    return (root / INDEX_NAME).exists()


class Format1Checkpoint:
    """A checkpoint of format ("zarr", 1); see StoredCheckpoint.

    Args:
        root: its directory.
        options: engine and timeout.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self._layout = Zarr2Layout(root)
        self._options = options

    @cached_property
    def array_reader(self) -> ArrayReader:
        """See StoredCheckpoint."""
        return open_array_store(self._layout.root, self._options)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See StoredCheckpoint. One metadata file is read for each."""
        layout = self._layout
        found: dict[str, ArraySpec] = {}

        def find(key: str) -> None:
            try:
                found[key] = layout.find(key)
            except ArrayNotFoundError as error:
                raise self._not_found(key) from error

        paths = {key: layout.metadata_path(key) for key in sorted(keys)}
        jobs = [Job(key, path, partial(find, key)) for key, path in paths.items()]
        num_threads = file_access(layout.root).num_metadata_threads
        if num_threads == 1:
            announce = partial(begin_readahead, list(paths.values()))
            jobs.insert(0, Job("", layout.root, announce))
        run_pooled(jobs, num_threads).wait(self._options.timeout_s)
        return found

    def object_path(self, object_id: ObjectId) -> str:
        """See StoredCheckpoint."""
        return str(object_path(self._layout.root, object_id))

    def object_content(self, object_id: ObjectId) -> bytes:
        """See StoredCheckpoint."""
        return read_content(self._layout.root, object_id)

    def _not_found(self, key: str) -> ArrayNotFoundError:
        root = self._layout.root
        require_directory(root)
        if has_manifest(root):
            return ArrayNotFoundError(
                f"{key}: {root} is a checkpoint of format ('zarr', 2), by its {INDEX_NAME}; its "
                "metadata.json says, or the caller, that it is one of ('zarr', 1)",
                key=key,
                path=str(root),
            )
        keys = list(self._layout.keys())
        near = difflib.get_close_matches(key, keys, n=3)
        hint = f"; similar keys: {', '.join(near)}" if near else ""
        return ArrayNotFoundError(
            f"{key}: no such array among the {len(keys)} in {root}{hint}",
            key=key,
            path=str(self._layout.directory(key)),
        )


class Format2Checkpoint:
    """A checkpoint of format ("zarr", 2); see StoredCheckpoint.

    Args:
        root: its directory, or its place in an object store.
        options: what to verify, and how to read.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no manifest.
        CorruptCheckpointError: the manifest's index is damaged.
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, root: Location, options: Options) -> None:
        self._root = root
        self._options = options
        self.file_store: FileStore = root if isinstance(root, Bucket) else _directory(root)
        self.manifest = self._manifest()

    def _manifest(self) -> Manifest:
        """Asked for by its name: lists of an object store may not know of it yet."""
        try:
            return Manifest(self.file_store)
        except IncompleteCheckpointError:
            if isinstance(self._root, Bucket):
                require_something(self._root)
            raise

    @cached_property
    def array_reader(self) -> ArrayReader:
        """See StoredCheckpoint."""
        find = None if self._options.verify is Verify.OFF else self.manifest.find
        if isinstance(self._root, Bucket):
            return BucketReader(self._root, self._options, find)
        return Zarr3Reader(self._root, permitted_access(self._root, self._options), find)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See StoredCheckpoint. The parts of the manifest that list them are read, once each."""
        return {key: self.manifest.find(key).array for key in sorted(keys)}

    def object_path(self, object_id: ObjectId) -> str:
        """See StoredCheckpoint."""
        span = self.manifest.find_object(object_id).span
        return self.file_store.path(INDEX_NAME if span is None else span.name)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See StoredCheckpoint. Its digest is compared, whatever the options say."""
        record = self.manifest.find_object(object_id)
        span = record.span
        if span is None:
            return plain_content(record.value)
        content = self.file_store.read_span(span.name, span.byte_offset, span.nbytes)
        if digest_of(content) != span.digest:
            name, path = object_id.unique_key, self.file_store.path(span.name)
            raise CorruptCheckpointError(
                f"{name}: {path}, written by rank {record.writer}, is damaged: "
                f"{len(content)} bytes from byte {span.byte_offset} have digest "
                f"{digest_of(content)}, expected {span.nbytes} and {span.digest}",
                key=name,
                path=path,
            )
        return content

    def checks(self) -> Iterator[Job]:
        """A look at every file that the manifest lists, one job to each; it raises what is wrong.

        A file of objects is looked at once for each object.
        """
        buffers = check_buffers()
        for record in self.manifest.arrays():
            yield self._job(metadata_check(self.file_store, record.array))
            if isinstance(self._root, Bucket):
                yield from self._bucket_jobs(self._root, record)
            else:
                yield from map(self._job, chunk_checks(self.file_store, record, buffers))
        found = map(partial(object_check, self.file_store), self.manifest.objects())
        yield from map(self._job, filter(None, found))
        for name, nbytes in pack_ends(self.manifest.objects()).items():
            run = partial(self._require_nbytes, name, nbytes)
            yield Job("", self.file_store.path(name), run)
        yield Job("", self.file_store.path(COMMON_NAME), self.require_common)

    def require_whole(self, share: Share) -> None:
        """Raise unless this rank's share of all files is as it was written.

        Raises:
            IncompleteCheckpointError, CorruptCheckpointError: what is wrong with the first that
                is not.
        """
        if isinstance(self._root, Bucket):
            num_threads = num_requests(self._options, MAX_OBJECT_NBYTES)
        else:
            num_threads = permitted_access(self._root, self._options).num_read_threads
        jobs = islice(self.checks(), share.rank, None, share.num_ranks)
        run_pooled(jobs, num_threads).wait(self._options.timeout_s)

    def _job(self, check: FileCheck) -> Job:
        path = self.file_store.path(check.name)
        return Job(check.key or "", path, partial(_require_clean, check, path))

    def _bucket_jobs(self, bucket: Bucket, record: ArrayRecord) -> Iterator[Job]:
        array = record.array
        for index, chunk in record.chunks.items():
            file = ChunkFile.of(array, index, self.file_store.path(chunk_name(array, index)))
            yield Job(array.key, file.path, partial(check_chunk, bucket, file, chunk))

    def _require_nbytes(self, name: str, nbytes: int) -> None:
        """Raise unless a file ends where the last object in it does."""
        path = self.file_store.path(name)
        if isinstance(self._root, Bucket):
            is_right = self._root.has_nbytes(name, nbytes)
        else:
            with file_errors(None, path):
                is_right = (self._root / name).stat().st_size == nbytes
        if not is_right:
            raise CorruptCheckpointError(
                f"{path} is damaged: it does not end after {nbytes} bytes of objects", path=path
            )

    def require_common(self) -> None:
        """Raise unless the common state's file is the one that was there at the save.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it is another.
        """
        listed = self.manifest.index.common
        if listed is None:
            return
        self._job(common_check(self.file_store, listed)).run()


def _require_clean(check: FileCheck, path: str) -> None:
    """Raise what a look at a file finds first."""
    for finding in check.run():
        lead = f"{check.key}: " if check.key else ""
        raise CorruptCheckpointError(
            f"{lead}{path} is damaged: expected {finding.expected}, found {finding.found}",
            key=check.key,
            path=path,
        )


def _directory(root: Path) -> Directory:
    require_directory(root)
    return Directory(root)
