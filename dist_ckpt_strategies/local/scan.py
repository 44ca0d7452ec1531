"""Scan a directory of local checkpoints: which shard files there are, and what is wrong with them.

One pass reads names, sizes and headers; a second step compares every range with its digest.
Loads no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import xxhash

from dist_ckpt_strategies.comm.shared_work import Watch
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from dist_ckpt_strategies.formats.issues import (
    NO_FILE,
    FileCheck,
    Issue,
    Problem,
    StaleFile,
    StaleKind,
    checked_marker,
    missing_common,
    unreadable,
)
from dist_ckpt_strategies.formats.pack_header import verify_pack
from dist_ckpt_strategies.formats.scan import run_checks
from dist_ckpt_strategies.local.plan import LocalShardId
from dist_ckpt_strategies.local.shard_files import (
    RANK,
    ShardInfo,
    lock_unless_written,
    open_shard,
    parsed_name,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    PARTIAL_PREFIX,
    Directory,
    read_file,
    reason,
    require_directory,
)
from dist_ckpt_strategies.storage.folders import Folder, read_folder

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

BACKEND = "local_replicated"

SESSION = re.compile(r"[0-9a-f]{32}")
"""The name of a directory with the shards of one save: the digest of its ``common.pt``."""

_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A file that is named like a local shard file.

    ``path`` is relative to the directory that was scanned; ``holder`` is the global rank that keeps
    it. ``shard`` is what it states, or None, and then ``damage`` says why.
    """

    shard_id: LocalShardId
    path: str
    holder: int
    nbytes: int
    shard: ShardInfo | None
    damage: Issue | None = None


@dataclass(frozen=True, slots=True)
class LocalScan:
    """Local checkpoints of a directory.

    The copies of the newest save come first, within it sorted by rank and path. Stale files, which
    a save did not finish, and issues, which names, sizes and descriptions show, are sorted by path.
    """

    root: Path
    copies: tuple[StoredCopy, ...]
    stale_files: tuple[StaleFile, ...]
    issues: tuple[Issue, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self.copies)


def scan_local(root: Path) -> LocalScan | None:
    """The local checkpoints of a directory; None if there are none, nor a stale file.

    ``root`` is what a manager was given, one session's directory in it, one rank's in that, one
    shard's file, the directory of one checkpoint of the backend, or one in which several of these
    are, as of all nodes of a clique. If it does not exist: CheckpointNotFoundError.
    """
    root = root.absolute()
    shard_id = parsed_name(root.name)
    if shard_id is not None and root.is_file():
        nbytes = root.stat().st_size
        copy = _copy(root.parent, root.name, shard_id, shard_id.global_rank, nbytes)
        return LocalScan(root.parent, (copy,), (), (copy.damage,) if copy.damage else ())
    require_directory(root)
    top = read_folder(root, "")
    marker, _ = checked_marker(Directory(root))
    backend = None if marker is None else marker.sharded_backend
    if backend not in {None, BACKEND}:
        return None
    copies: list[StoredCopy] = []
    stale: list[StaleFile] = []
    issues: list[Issue] = []
    for folder in _rank_folders(root, top):
        if folder.failure:
            issues.append(unreadable(None, folder.key or ".", folder.failure))
        stale += _stale_files(root, folder)
        copies += _copies(root, folder)
    if not (backend or copies or (stale and COMMON_NAME not in top.files)):
        return None
    if backend and not copies:
        issues.append(Issue(Problem.MISSING_FILE, None, ".", "a shard of the checkpoint", NO_FILE))
    replaced, found = _compare_common_files(root, copies)
    stale += [StaleFile(StaleKind.PARTIAL, copy.path, copy.nbytes) for copy in replaced]
    copies = [copy for copy in copies if copy not in replaced]
    issues += found
    issues += [copy.damage for copy in copies if copy.damage]
    copies.sort(key=lambda copy: (copy.shard_id.global_rank, copy.path))
    copies.sort(key=lambda copy: copy.shard_id.save, reverse=True)
    stale.sort(key=lambda one: one.path)
    return LocalScan(root, tuple(copies), tuple(stale), _by_path(issues))


def verify_local(
    scan: LocalScan, watch: Watch | None = None, *, comm: Communicator | None = None
) -> tuple[Issue, ...]:
    """The issues of a scan, and those of comparing every tensor with its digest; sorted by path.

    Collective if ``comm`` has several ranks, all of one node, which share the work; see
    ``formats.scan.verify``. ``watch`` is called with bytes.
    """
    checks = (
        FileCheck(None, copy.path, copy.nbytes, "", partial(check_shard, scan.root, copy.path))
        for copy in scan.copies
    )
    num_threads = len(os.sched_getaffinity(0))
    return _by_path(run_checks(scan.issues, checks, num_threads, watch, comm))


def check_shard(root: Path, path: str) -> Iterator[Issue]:
    """Issues of a local shard file: its description, or tensors that are not as stored."""
    place = Directory(root)
    try:
        open_shard(place, path)
        yield from verify_pack(place, path)
    except CheckpointError as error:
        yield _damaged(root, path, error)


def _damaged(root: Path, path: str, error: CheckpointError) -> Issue:
    why = error.message.removeprefix(f"{root / path}: ")
    if not isinstance(error, CorruptCheckpointError | IncompleteCheckpointError):
        return unreadable(None, path, why)
    return Issue(Problem.DAMAGED, None, path, "a shard whose description fits its digest", why)


def _rank_folders(root: Path, folder: Folder, depth: int = _MAX_DEPTH) -> Iterator[Folder]:
    """The directories of ranks: this one, and those below it."""
    if RANK.fullmatch(os.path.basename(folder.key or root)):  # noqa: PTH119 - of a text or a path
        yield folder
    for name in folder.folders if depth else ():
        if depth > 1 or RANK.fullmatch(name) or SESSION.fullmatch(name):
            yield from _rank_folders(root, read_folder(root, folder.path_of(name)), depth - 1)


def _stale_files(root: Path, folder: Folder) -> Iterator[StaleFile]:
    for name, nbytes in folder.files.items():
        if name.startswith(PARTIAL_PREFIX):
            path = folder.path_of(name)
            kind = StaleKind.PARTIAL
            with suppress(OSError), lock_unless_written(root / path) as is_ours:
                kind = kind if is_ours else StaleKind.WRITING
            yield StaleFile(kind, path, nbytes)


def _copies(root: Path, folder: Folder) -> Iterator[StoredCopy]:
    """Every shard file of a rank's directory."""
    holder = int(os.path.basename(folder.key or root))  # noqa: PTH119 - of a text or a path
    for name in (*folder.files, *folder.folders, *folder.links, *folder.others):
        shard_id = parsed_name(name)
        if shard_id is None:
            continue
        yield _copy(root, folder.path_of(name), shard_id, holder, folder.files.get(name, 0))


def _copy(root: Path, path: str, shard_id: LocalShardId, holder: int, nbytes: int) -> StoredCopy:
    try:
        _, shard = open_shard(Directory(root), path)
    except CheckpointError as error:
        return StoredCopy(shard_id, path, holder, nbytes, None, _damaged(root, path, error))
    return StoredCopy(shard_id, path, holder, nbytes, shard)


def _compare_common_files(
    root: Path, copies: Iterable[StoredCopy]
) -> tuple[list[StoredCopy], list[Issue]]:
    """Shard files of other saves than the one that ``common.pt`` is of; what is wrong with that.

    An overwrite that was interrupted has left the others.
    """
    by_common: dict[PurePosixPath, dict[str, list[StoredCopy]]] = {}
    for copy in copies:
        session = PurePosixPath(copy.path).parent.parent
        if SESSION.fullmatch(session.name):
            of_save = by_common.setdefault(session.parent / COMMON_NAME, {})
            of_save.setdefault(session.name, []).append(copy)
    replaced: list[StoredCopy] = []
    issues: list[Issue] = []
    for path, by_session in by_common.items():
        try:
            found = xxhash.xxh3_128_hexdigest(read_file(root / path))
        except FileNotFoundError:
            issues.append(missing_common(str(path)))
        except OSError as error:
            issues.append(unreadable(None, str(path), reason(error)))
        else:
            if found in by_session:
                del by_session[found]
                replaced += [copy for some in by_session.values() for copy in some]
            else:
                text = f"digest {' or '.join(sorted(by_session))}"
                issues.append(Issue(Problem.DAMAGED, None, str(path), text, found))
    return replaced, issues


def _by_path(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    return tuple(sorted(issues, key=lambda issue: issue.path))
