"""The location of a checkpoint, a directory or URL, and whether the checkpoint is complete.

A location is a Path, absolute, or a Bucket.
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from dist_ckpt_strategies.config import Options, StoreOptions, store_options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.pack_write import FOLDER as PACKS_FOLDER
from dist_ckpt_strategies.formats.zarr2 import array_keys
from dist_ckpt_strategies.storage.bucket import SCHEMES, Bucket, Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    READ_AT_ONCE,
    Directory,
    file_errors,
    require_directory,
)

Location = Path | Bucket

FORMAT2 = ("zarr", 2)
FORMAT2_REFUSED = (
    "is a checkpoint of format ('zarr', 2), which this release does not read; commit 9562efa9 of "
    "this package is the last one that does: its `dist-ckpt convert SRC DST --to pack` makes packs "
    "of it"
)
_FORMAT2_INDEX = "manifest/index.json"


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The four fields of Megatron-Core's ``CheckpointingConfig``; it takes no others."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    @property
    def sharded_format(self) -> tuple[str, int]:
        """Backend and version of the sharded state."""
        return self.sharded_backend, self.sharded_backend_version

    @property
    def common_format(self) -> tuple[str, int]:
        """Backend and version of the common state."""
        return self.common_backend, self.common_backend_version

    def to_json(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """The marker that the file holds.

        Raises:
            ValueError: not JSON, or not exactly fields of a marker with values of their types.
        """
        try:
            marker = json.loads(content)
        except RecursionError as error:
            raise ValueError("nested too deeply for a marker") from error
        kinds = {field.name: int if "version" in field.name else str for field in fields(cls)}
        if not isinstance(marker, dict) or "sharded_backend" not in marker:
            raise ValueError("expected an object with the field sharded_backend")
        for name, value in marker.items():
            if type(value) is not kinds.get(name):
                raise ValueError(f"unexpected field {name} = {value!r}")
        return cls(**marker)


_LACKS_SLASHES = re.compile(rf"({'|'.join(SCHEMES)}|file):(/?)(?!/)")
_FILE_URL = re.compile(r"file://(?:localhost)?/(.*)", re.DOTALL)


def located(
    address: str | Path | Bucket,
    options: Options | StoreOptions | None,
    *,
    what: str = "checkpoint_dir",
) -> Location:
    """The location that a caller means: ``s3://``, ``gs://``, ``file:///`` or a path.

    Without ``options`` a store is reached as the environment says, and no peer waits. Messages
    call the address ``what``.

    Raises:
        StrategyError: it is no address, or a Path made of a URL; or the environment makes no sense.
    """
    if isinstance(address, Bucket):
        return address
    given: Any = address
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:  # None and numbers would name directories
        raise StrategyError(f"{what}: expected a str or a Path without NUL, found {address!r}")
    if not text:
        raise StrategyError(f"{what} is empty; name the checkpoint's directory")
    lacking = _LACKS_SLASHES.match(text)
    if lacking and not isinstance(address, Path):  # a typing error, and no directory
        raise StrategyError(
            f"{text}: a URL begins with {lacking[1]}://; a directory of that name is ./{text}"
        )
    if lacking and lacking[2]:
        raise StrategyError(f"{text}: a Path takes slashes out of a URL; pass it as a str")
    if path := _FILE_URL.fullmatch(text):
        return Path("/", unquote(path[1]))
    if "://" not in text:
        return Path(text).absolute()
    stores = options.reached_stores() if isinstance(options, Options) else options
    return Bucket.parse(text, stores or store_options_from_environment())


def place_of(location: Location) -> Place:
    """The files at a location."""
    return location if isinstance(location, Bucket) else Directory(location)


def require_path(location: Location, what: str) -> Path:
    """The location as a directory.

    Raises:
        StrategyError: it is in an object store, and ``what`` does not go there.
    """
    if isinstance(location, Bucket):
        raise StrategyError(
            f"{location}: {what} needs a directory on a file system, found a URL; "
            "('safetensors', 1) takes URLs"
        )
    return location


def read_marker(location: Location) -> CheckpointMarker:
    """The marker of a finished checkpoint.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: it has no marker, or one that does not parse; or, in a bucket, no
            packs.
        IncompatibleVersionError: it is of format ("zarr", 2).
        StoreAccessError, StorageTimeoutError: the store does not answer.
    """
    if holds_packs(location):
        return PACKS
    store = place_of(location)
    path = store.path(MARKER_NAME)
    try:
        content = _marker_content(store)
    except StorageError:
        require_something(location)
        raise
    if content is None:
        require_something(location)
    refuse_format2(location, content or b"")
    if content is None:
        raise IncompleteCheckpointError(
            f"{location} is not a distributed checkpoint, or is incomplete: {path}, the last file "
            f"of a save, is missing{_what_is_there(location)}",
            path=path,
        )
    if isinstance(location, Bucket):
        path = store.path(PACKS_INDEX)
        raise IncompleteCheckpointError(
            f"{location} is incomplete: {MARKER_NAME} is there, but {path} is missing", path=path
        )
    try:
        marker = CheckpointMarker.from_json(content)
    except (ValueError, TypeError) as error:
        raise IncompleteCheckpointError(
            f"{location} is incomplete: {path} is not whole ({error})", path=path
        ) from error
    # Megatron-Core 0.17 and later have a FullyParallelSaveStrategyWrapper call whatever it saves
    # torch_dist, unless it is given ``backend`` and ``version``.
    is_torch_dist = marker.sharded_backend != "torch_dist" or (location / ".metadata").exists()
    if not is_torch_dist and any(array_keys(location)):
        return replace(marker, sharded_backend="zarr")
    return marker


PACKS = CheckpointMarker("safetensors")


def holds_packs(location: Location) -> bool:
    """Whether packs are the content of a place: its index says so, whatever the marker says.

    A save of torch.distributed.checkpoint that came later has left its own index beside it; then
    the marker says which of the two counts.
    """
    store = place_of(location)
    if isinstance(location, Path) and not store.has(PACKS_INDEX):
        for folder in (*reversed(location.parents), location):
            with suppress(OSError):  # an NFS client, which remembers what was missing, asks again
                os.close(os.open(folder, READ_AT_ONCE))
    if not store.has(PACKS_INDEX):
        return False
    if isinstance(store, Bucket) or not store.has(".metadata"):
        return True
    with suppress(StorageError):
        marker = marker_of(store)
        return marker is not None and marker.sharded_format == PACKS.sharded_format
    return False


def holds_dcp(store: Place) -> bool:
    """Whether a checkpoint of torch.distributed.checkpoint's own files is all that is there.

    Megatron-Core's, which has such files, has ``common.pt`` first.
    """
    others = MARKER_NAME, COMMON_NAME, PACKS_INDEX
    return (
        isinstance(store, Directory) and store.has(".metadata") and not any(map(store.has, others))
    )


def marker_of(store: Place) -> CheckpointMarker | None:
    """The marker; None if there is none, or if it does not parse."""
    with suppress(IncompleteCheckpointError, ValueError, TypeError):
        return CheckpointMarker.from_json(store.read(MARKER_NAME))
    return None


def refuse_format2(location: Location, marker: bytes | None = None) -> Any:
    """The format that the marker names, if it does; IncompatibleVersionError for ("zarr", 2).

    The marker, read unless it is given, may be lost, or not tell; see ``read_marker``.
    """
    marker = (_marker_content(place_of(location)) or b"") if marker is None else marker
    named = None
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        fields = json.loads(marker)
        named = fields["sharded_backend"], fields.get("sharded_backend_version", 1)
    is_format2 = named == FORMAT2
    if named in {None, ("torch_dist", 1)} and isinstance(location, Path):
        has_metadata = (location / ".metadata").exists()
        is_format2 = not has_metadata and (location / _FORMAT2_INDEX).exists()
    if is_format2:
        raise IncompatibleVersionError(f"{location} {FORMAT2_REFUSED}", path=str(location))
    return named


def _marker_content(store: Place) -> bytes | None:
    """The content of the marker; None where there is none."""
    with suppress(IncompleteCheckpointError):  # a bucket reads no more than there is
        return store.read(MARKER_NAME, 0, -1 if isinstance(store, Bucket) else MAX_JSON_NBYTES)
    return None


def _what_is_there(location: Location) -> str:
    """Describes the contents of a place without a marker."""
    if isinstance(location, Bucket):
        return ""
    with file_errors(None, location):
        if (location / PACKS_FOLDER).is_dir():
            return (
                f"; a save began, as packs, and has not come to its end, or {PACKS_INDEX} is lost; "
                "then `dist-ckpt rebuild-index` makes it anew from the packs"
            )
        if holds_dcp(Directory(location)):
            return (
                "; it is torch.distributed.checkpoint's own: load it by that, without a reader of "
                "this package, and save it again"
            )
        if any(location.glob(f"{PARTIAL_PREFIX}*/")):
            return "; a save began and has not come to its end"
        has_common = (location / COMMON_NAME).exists()
        missing = f"{COMMON_NAME} {'is there' if has_common else 'is missing too'}"
        return f"; {other_contents(location) or missing}"


def other_contents(root: Path) -> str:
    """Describes the contents of a directory that has nothing of a checkpoint."""
    names = sorted(path.name for path in root.iterdir())
    if COMMON_NAME in names:
        return ""
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return (
            "it holds files of safetensors, a model's arrays and no checkpoint; the library "
            "safetensors reads them"
        )
    others = (name for name in names if not name.startswith(PARTIAL_PREFIX))
    if inner := [name for name in others if (root / name / MARKER_NAME).exists()]:
        return holds_checkpoints(inner)
    return "" if names else "it is empty"


def holds_checkpoints(inner: Sequence[str]) -> str:
    """Describes a place that has checkpoints of these names below it."""
    count = "1 checkpoint" if len(inner) == 1 else f"{len(inner)} checkpoints"
    return f"it holds {count} ({some_of(inner)}); name one of them"


def is_finished(location: Location) -> bool:
    """Whether there is a checkpoint with a whole marker."""
    files = place_of(location)
    if isinstance(files, Directory) and not (files.has(MARKER_NAME) or files.has(PACKS_INDEX)):
        return False
    if isinstance(files, Bucket) and not files.names():
        return False
    try:
        read_marker(location)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    except IncompatibleVersionError:  # whole, and not to be read by this release
        return True
    return True


def require_something(location: Location) -> None:
    """Raise CheckpointNotFoundError where there is no directory, or nothing at all in a bucket."""
    if isinstance(location, Path):
        require_directory(location)
    elif not location.names():
        what = "there is no checkpoint"
        if not location.reports_missing_buckets:
            what += f", or no bucket {location.bucket!r}: listings do not show it"
        raise CheckpointNotFoundError(f"{location}: {what}", path=str(location))
