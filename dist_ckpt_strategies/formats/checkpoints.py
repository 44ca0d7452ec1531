"""Checkpoints that can be read, of either format."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.config import Options, Verify
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.arrays import BucketReader, DirectoryReader, Format1Reader
from dist_ckpt_strategies.formats.locations import (
    Location,
    OpenedSave,
    current_place,
    require_something,
)
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    FileDigest,
    Manifest,
    digest_of,
    similar_text,
)
from dist_ckpt_strategies.formats.objects import object_ids, object_path, plain_content
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, array_keys, parse_metadata
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.file_systems import begin_readahead, file_access
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MAX_JSON_NBYTES,
    Directory,
    file_errors,
    read_file,
    require_directory,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, limited, run_with_limit
from dist_ckpt_strategies.storage.store import ArrayReader, Store


@limited
def has_manifest(root: Path) -> bool:
    """Whether a directory holds a checkpoint of format ("zarr", 2), whatever else it says."""
    return (root / INDEX_NAME).exists()


def common_digest(root: Path) -> str:
    """The digest of the common state's file; empty where there is none."""
    with suppress(IncompleteCheckpointError):
        return digest_of(Directory(root).read(COMMON_NAME))
    return ""


class Format1Checkpoint:
    """A checkpoint of format ("zarr", 1) that can be read. Rank-local.

    Attributes:
        save: what is opened; made now unless it is given.
        identity: tells it from other saves, and from another copy of its common state, the only
            file of which a load reads all on every rank.
    """

    def __init__(self, root: Path, options: Options, save: OpenedSave | None = None) -> None:
        self._root, self._options = root, options
        self.save = save or OpenedSave(root)
        self.identity = f"{self.save.identity} {common_digest(root)}"

    def array_reader(self, *, fills_page_cache: bool = False) -> ArrayReader:
        """Reads the arrays that ``find`` gives.

        Without direct I/O if ``fills_page_cache``: what it reads stays there for others.
        """
        direct_io = False if fills_page_cache else None
        return Format1Reader(self._root, self._options.with_changes(direct_io=direct_io))

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of these keys, sorted by key. One metadata file is read for each.

        Raises:
            ArrayNotFoundError: one is missing; names similar ones.
            CorruptCheckpointError: the description of one is damaged.
        """
        paths = {key: f"{self._root}/{key}/{METADATA_NAME}" for key in sorted(keys)}
        found: dict[str, ArraySpec] = {}

        def find(key: str) -> None:
            path = paths[key]
            try:
                with file_errors(key, path):
                    content = read_file(path, MAX_JSON_NBYTES)
            except IncompleteCheckpointError as error:
                raise self._not_found(key) from error
            found[key] = parse_metadata(key, path, content)

        jobs = [Job(key, path, partial(find, key)) for key, path in paths.items()]
        num_threads = file_access(self._root, self._options).num_metadata_threads
        if num_threads == 1:
            announce = partial(begin_readahead, list(paths.values()))
            jobs.insert(0, Job("", self._root, announce))
        Transfer(jobs, num_threads).wait(self._options.timeout_s)
        return {key: found[key] for key in paths}  # threads finish in any order

    def keys(self) -> Iterator[str]:
        """The keys of all arrays."""
        return array_keys(self._root)

    def object_ids(self) -> Iterator[ObjectId]:
        """All shards of objects."""
        return object_ids(self._root)

    def object_path(self, object_id: ObjectId) -> str:
        """Where one shard of an object is kept, for messages."""
        return str(object_path(self._root, object_id))

    def object_content(self, object_id: ObjectId) -> bytes:
        """What is stored of one shard of an object, for ``load_content``.

        Raises:
            ArrayNotFoundError: there is no such shard.
        """
        path = object_path(self._root, object_id)
        with file_errors(object_id.unique_key, path, not_found=ArrayNotFoundError):
            return run_with_limit(partial(read_file, path), path)

    def _not_found(self, key: str) -> ArrayNotFoundError:
        root = self._root
        require_directory(root)
        keys = list(array_keys(root))
        of_format2 = f"; it is of format ('zarr', 2), by its {INDEX_NAME}"
        hint = of_format2 if has_manifest(root) else similar_text(key, keys)
        return ArrayNotFoundError(
            f"{key}: no such array among the {len(keys)} in {root}{hint}",
            key=key,
            path=str(root / key),
        )


class Format2Checkpoint:
    """A checkpoint of format ("zarr", 2); see Format1Checkpoint.

    Attributes:
        save: see Format1Checkpoint.
        identity: a digest that no other checkpoint has.
        manifest: what was saved.
        file_store: its files.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no manifest.
        CorruptCheckpointError: the manifest's index is damaged.
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, root: Location, options: Options, save: OpenedSave | None = None) -> None:
        self.save = save or OpenedSave(root)
        self.file_store: Store
        if isinstance(root, Bucket):
            root = self.file_store = current_place(root)
        else:
            self.file_store = Directory(root)
        self._options, self._root = options, root
        try:  # asked for by its name: lists of an object store may not know of it yet
            self.manifest = Manifest(self.file_store)
        except StorageError as error:
            if isinstance(root, Path):
                run_with_limit(partial(require_directory, root), root)
            elif isinstance(error, IncompleteCheckpointError):
                require_something(root)
            raise
        self.identity = self.manifest.digest

    def array_reader(self, *, fills_page_cache: bool = False) -> ArrayReader:
        """See Format1Checkpoint."""
        options = self._options.with_changes(direct_io=False if fills_page_cache else None)
        find = None if options.verify is Verify.OFF else self.manifest.find
        if isinstance(self._root, Bucket):
            return BucketReader(self._root, options, find)
        return DirectoryReader(self._root, options, find)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See Format1Checkpoint. Segments of the manifest that list them are read, once each."""
        return {key: self.manifest.find(key).array for key in sorted(keys)}

    def keys(self) -> Iterator[str]:
        """See Format1Checkpoint."""
        return self.manifest.keys()

    def object_ids(self) -> Iterator[ObjectId]:
        """See Format1Checkpoint."""
        return (record.id for record in self.manifest.objects())

    def object_path(self, object_id: ObjectId) -> str:
        """See Format1Checkpoint."""
        span = self.manifest.find_object(object_id).span
        return self.file_store.path(INDEX_NAME if span is None else span.name)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See Format1Checkpoint. Its digest is compared, whatever the options say."""
        record = self.manifest.find_object(object_id)
        span = record.span
        if span is None:
            return plain_content(record.value)
        content = self.file_store.read(span.name, span.byte_offset, span.nbytes)
        found = digest_of(content)
        if found != span.digest:
            name, path = object_id.unique_key, self.file_store.path(span.name)
            text = (
                f"{name}: {path}, written by rank {record.writer}, is damaged: {len(content)} "
                f"bytes from byte {span.byte_offset} have digest {found}, expected {span.nbytes} "
                f"and {span.digest}"
            )
            raise CorruptCheckpointError(text, key=name, path=path)
        return content

    def common_content(self) -> bytes:
        """The common state's file, which is the one that was there at the save, if any was.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it is another.
        """
        content, path = self.file_store.read(COMMON_NAME), self.file_store.path(COMMON_NAME)
        found = FileDigest(len(content), digest_of(content))
        listed = self.manifest.common
        if listed not in {None, found}:
            raise CorruptCheckpointError(
                f"{path} is damaged: expected {listed}, found {found}", path=path
            )
        return content


StoredCheckpoint = Format1Checkpoint | Format2Checkpoint
