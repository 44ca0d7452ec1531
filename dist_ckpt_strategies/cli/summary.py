"""Summaries of packs, ("zarr", 1) and local checkpoints, for ``inspect`` and ``verify``."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain, groupby
from typing import Any

from dist_ckpt_strategies.cli.render import bytes_text, counted
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.errors import ArrayNotFoundError, some_of
from dist_ckpt_strategies.formats.issues import Issue, Problem, Scan, Scanned, StaleFile, StaleKind
from dist_ckpt_strategies.formats.pack import UNVERIFIED
from dist_ckpt_strategies.local.scan import LocalScan, StoredCopy

_FORMAT1, _PACKS = ("zarr", 1), ("safetensors", 1)
_STALE = {
    StaleKind.LOCKS: "directories with locks of Megatron-Core <= 0.15 (harmless)",
    StaleKind.PARTIAL: "files that a save did not finish (harmless)",
    StaleKind.WRITING: "files that are being written",
    StaleKind.REMOVED: "directories that were being removed (harmless)",
}
_UNVERIFIED = "contents were read from a checkpoint without comparing digests"
_BY_SIZE = " (arrays by their sizes alone: zarr 1 has no digests of them)"


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of a checkpoint, and its issues.

    ``fields`` are those of the JSON object of both commands, without the issues; ``lists`` further
    ones of ``inspect``, each a table of the text. ``checked`` is what ``verify`` looks at. Arrays
    that another backend wrote are not looked for. Issues of local checkpoints are below their
    files, not below keys.
    """

    fields: Mapping[str, Any]
    lists: Mapping[str, Sequence[Mapping[str, Any]]]
    lines: tuple[tuple[str, str], ...]
    issues: tuple[Issue, ...]
    checked: str
    is_foreign: bool = False
    is_local: bool = False

    @property
    def is_fine(self) -> bool | None:
        """Whether nothing is wrong with it; None where it was not looked into."""
        return None if self.is_foreign else not self.issues

    @property
    def shown_issues(self) -> list[Issue]:
        """Those of the text: what another backend is stands in it already."""
        hidden = {Problem.UNKNOWN_BACKEND} if self.is_foreign else set()
        return [one for one in self.issues if one.problem not in hidden]


def summary_of(
    scanned: Scan | LocalScan, keys: str | None = None, *, with_objects: bool = True
) -> Summary:
    """The summary of a scan, with the keys that match in its lists; ArrayNotFoundError if none."""
    if isinstance(scanned, LocalScan):
        return _local_summary(scanned, keys)
    pattern = "*" if keys is None else keys
    is_packed = scanned.backend == _PACKS
    arrays = [
        _array_fields(one, one.array, is_packed=is_packed)
        for one in scanned.arrays
        if one.array and fnmatchcase(one.key, pattern)
    ]
    objects = [_object_fields(one) for one in scanned.objects if fnmatchcase(one.key, pattern)]
    num_keys = len(scanned.arrays) + len(scanned.objects)
    _require_match(scanned.root, f"{num_keys} keys", keys, arrays or objects)
    objects = objects if with_objects else []
    common = scanned.common_nbytes
    fields = {
        "path": str(scanned.root),
        "marker": asdict(scanned.marker) if scanned.marker else None,
        "common": None if common is None else {"path": "common.pt", "nbytes": common},
        "num_arrays": len(scanned.arrays),
        "num_objects": len(scanned.objects),
        "num_files": len(scanned.files),
        "nbytes": scanned.nbytes,
        "stale_files": list(map(asdict, scanned.stale_files)),
        "unfinished": scanned.is_unfinished,
        "others": scanned.others,
        "features": scanned.facts.get("features", ()),
        "base": scanned.facts.get("base"),
    }
    contents = f"{counted(len(scanned.arrays), 'array')}, {counted(len(scanned.objects), 'object')}"
    return Summary(
        fields,
        {"arrays": arrays, "objects": objects},
        tuple(_rows_of(scanned)),
        scanned.issues,
        f"{contents} and common.pt{_BY_SIZE if scanned.backend == _FORMAT1 else ''}",
        is_foreign=scanned.is_foreign,
    )


def _require_match(root: object, what: str, pattern: str | None, matching: object) -> None:
    if pattern is not None and not matching:
        raise ArrayNotFoundError(f"{root}: none of its {what} matches {pattern!r}")


def _object_fields(one: Scanned) -> dict[str, Any]:
    return {
        "key": one.key,
        "shape": one.shape,
        "num_shards": one.num_parts,
        "num_shards_expected": math.prod(one.shape),
        "file_nbytes": one.file_nbytes,
        "writers": one.writers,
    }


def _array_fields(one: Scanned, array: ArraySpec, *, is_packed: bool) -> dict[str, Any]:
    """Those of an array; in packs its blocks are the shards as they were saved."""
    fields: dict[str, Any] = {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "nbytes": array.nbytes,
    }
    if is_packed:
        return fields | {"num_blocks": one.num_parts, "writers": one.writers}
    return fields | {
        "chunk_shape": array.chunk_shape,
        "num_chunks": one.num_parts,
        "num_chunks_expected": array.num_chunks,
        "file_nbytes": one.file_nbytes,
        "separator": array.separator,
        "raw": array.is_raw,
    }


def _rows_of(scanned: Scan) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(scanned.root)
    backend, marker = "unknown", scanned.marker
    if marker is not None:
        backend = f"{marker.sharded_backend} {marker.sharded_backend_version}"
        backend += f"; common state: {marker.common_backend} {marker.common_backend_version}"
    yield "backend", backend
    if scanned.facts:
        yield "saved", _saved(scanned.facts)
    if base := scanned.facts.get("base"):
        yield "base", f"{base['path']}, digest {base['digest']}: loads take the rest from there"
    if UNVERIFIED in scanned.facts.get("features", ()):
        yield UNVERIFIED, _UNVERIFIED
    if not scanned.is_foreign:
        num_chunks = sum(one.num_parts for one in scanned.arrays)
        size = bytes_text(sum(one.file_nbytes for one in scanned.arrays))
        files = counted(num_chunks, "block" if scanned.backend == _PACKS else "file")
        yield "arrays", f"{len(scanned.arrays):,} in {files}, {size}"
        num_shards = sum(one.num_parts for one in scanned.objects)
        size = bytes_text(sum(one.file_nbytes for one in scanned.objects))
        yield "objects", f"{len(scanned.objects):,} in {counted(num_shards, 'shard')}, {size}"
    common = scanned.common_nbytes
    yield "common.pt", "missing" if common is None else bytes_text(common)
    yield from _stale_rows(scanned.stale_files)
    if scanned.others:
        yield "beside it", some_of(scanned.others)
    yield "in all", f"{counted(len(scanned.files), 'file')}, {bytes_text(scanned.nbytes)}"


def _saved(facts: Mapping[str, Any]) -> str:
    ranks, packs = counted(facts["ranks"], "rank"), counted(facts["num_packs"], "pack")
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["created"]))
    return f"{created} by {ranks} in {packs}"


def _stale_rows(files: Sequence[StaleFile]) -> Iterator[tuple[str, str]]:
    for kind, text in _STALE.items():
        sizes = [stale.nbytes for stale in files if stale.kind is kind]
        if sizes:
            size = f", {bytes_text(sum(sizes))}" if any(sizes) else ""
            yield "left over", f"{text}: {len(sizes):,}{size}"


def _local_summary(scanned: LocalScan, keys: str | None) -> Summary:
    """Of the local checkpoints in a directory."""
    by_shard = [list(copies) for _, copies in groupby(scanned.copies, lambda copy: copy.shard_id)]
    pattern = "*" if keys is None else keys
    selected = [copies for copies in by_shard if fnmatchcase(str(copies[0].shard_id), pattern)]
    _require_match(scanned.root, f"{len(by_shard)} local shards", keys, selected)
    shards = [_shard_fields(copies) for copies in selected]
    by_save = groupby(selected, lambda copies: copies[0].shard_id.save)
    saves = [_save_fields(list(copies)) for _, copies in by_save]
    num_files, num_saves = len(scanned.copies), len({copy.shard_id.save for copy in scanned.copies})
    held = f"{counted(num_saves, 'save')}, {counted(len(by_shard), 'shard')}"
    num_tensors = sum(copy.shard.num_tensors for copy in scanned.copies if copy.shard is not None)
    stale = list(map(asdict, scanned.stale_files))
    root = str(scanned.root)
    totals = {"num_files": num_files, "nbytes": scanned.nbytes}
    return Summary(
        {"path": root, "tier": "local", **totals, "stale_files": stale},
        {"iterations": saves, "parts": shards},
        (
            ("directory", root),
            ("local", f"{held} in {counted(num_files, 'file')}, {bytes_text(scanned.nbytes)}"),
            *_stale_rows(scanned.stale_files),
        ),
        scanned.issues,
        counted(num_tensors, "tensor"),
        is_local=True,
    )


def _shard_fields(copies: Sequence[StoredCopy]) -> dict[str, Any]:
    """One rank's shards of a save, and their copies here; None for facts that no file has."""
    shard_id = copies[0].shard_id
    part = next((copy.shard for copy in copies if copy.shard is not None), None)
    return {
        "id": str(shard_id),
        "iteration": shard_id.save.iteration,
        "owner": shard_id.global_rank,
        "world_size": part and part.world_size,
        "session": part and part.session_id,
        "kind": part and part.kind,
        "num_tensors": part and part.num_tensors,
        "copies": [
            {
                "path": copy.path,
                "holder": copy.holder,
                "nbytes": copy.nbytes,
                "readable": copy.shard is not None,
            }
            for copy in copies
        ],
    }


def _save_fields(shards: Sequence[Sequence[StoredCopy]]) -> dict[str, Any]:
    """The copies of one save that are here."""
    copies = list(chain.from_iterable(shards))
    save = copies[0].shard_id.save
    part = next((copy.shard for copy in copies if copy.shard is not None), None)
    return {
        "iteration": save.iteration,
        "save_id": save.stamp,
        "world_size": part and part.world_size,
        "session": part and part.session_id,
        "owners": [copies_of[0].shard_id.global_rank for copies_of in shards],
        "num_copies": len(copies),
        "nbytes": sum(copy.nbytes for copy in copies),
    }
