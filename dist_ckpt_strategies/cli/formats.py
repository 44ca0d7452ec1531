"""Checkpoints of formats ("zarr", 1) and ("zarr", 2) as ``inspect`` and ``verify`` show them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dist_ckpt_strategies.cli.render import (
    Row,
    Summary,
    Table,
    bytes_text,
    counted,
    matching,
    printable,
    require_match,
    sections_of,
    shape_text,
)
from dist_ckpt_strategies.formats.issues import (
    Issue,
    SaveBegun,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleKind,
)

NUM_FIRST = 3
"""Issues that ``inspect`` shows."""
_MANIFEST_VERSION = 2
_MAX_NAMED = 5
_RIGHT = ("files", "shards", "size")
_STALE = {
    StaleKind.LOCKS: "directories with locks of Megatron-Core <= 0.15",
    StaleKind.PARTIAL: "files that a save did not finish",
    StaleKind.WRITING: "files that are being written",
    StaleKind.REMOVED: "directories that were being removed",
}


def inspection_of(scan: Scan, keys: str | None, *, with_objects: bool) -> Summary:
    """What ``inspect`` shows.

    Args:
        scan: of the checkpoint.
        keys: show only keys that match this glob.
        with_objects: show objects too.

    Raises:
        ArrayNotFoundError: no key matches.
    """
    arrays = matching(scan.arrays, lambda scanned: scanned.array.key, keys)
    objects = matching(scan.objects, lambda scanned: scanned.key, keys)
    num_keys = len(scan.arrays) + len(scan.objects)
    require_match(scan.root, "keys", num_keys, keys, arrays or objects)
    shown = objects if with_objects else []
    fields = {
        "complete": None if scan.is_foreign else not scan.issues,
        "arrays": [_array_fields(scan, one) for one in arrays],
        "objects": [_object_fields(scan, one) for one in shown],
    }
    return Summary(
        str(scan.root),
        _common_fields(scan) | fields,
        scan.issues,
        tables=_tables(scan, arrays, shown),
        facts=tuple(_facts(scan)),
        num_first=0 if scan.is_foreign else NUM_FIRST,
    )


def verification_of(scan: Scan, issues: tuple[Issue, ...], seconds: float) -> Summary:
    """What ``verify`` shows.

    Args:
        scan: of the checkpoint.
        issues: all of them, sorted by key.
        seconds: that it took.
    """
    fields = _common_fields(scan) | {"whole": None if scan.is_foreign else not issues}
    if _has_manifest(scan):
        fields |= {"seconds": seconds, "bytes_per_second": scan.nbytes / max(seconds, 1e-9)}
    return Summary(
        str(scan.root),
        fields,
        issues,
        sections=sections_of(
            issues,
            lambda issue: issue.key or "the checkpoint",
            str if _has_manifest(scan) else _text_below_key,
        ),
        verdict=_verdict(scan, issues),
        checked="" if scan.is_foreign else _checked(scan, seconds),
    )


def incomplete(issues: Sequence[Issue]) -> str:
    """What ``inspect`` says of a checkpoint with issues."""
    return f"NO, {counted(len(issues), 'issue')}; `dist-ckpt verify` lists them all"


def verdict_by_file(issues: Sequence[Issue]) -> str:
    """What ``verify`` says of a checkpoint whose every file has digests."""
    if not issues:
        return "is whole"
    num_files = len({issue.path for issue in issues})
    return f"is NOT whole: {counted(len(issues), 'issue')} in {counted(num_files, 'file')}"


def _has_manifest(scan: Scan) -> bool:
    return scan.version == _MANIFEST_VERSION


def _verdict(scan: Scan, issues: Sequence[Issue]) -> str:
    if scan.is_foreign:
        return "cannot be verified: another backend wrote it"
    if _has_manifest(scan):
        unfinished = f"is NOT finished: {_unfinished(scan.begun)}"
        return unfinished if scan.is_unfinished else verdict_by_file(issues)
    if not issues:
        return "is whole"
    num_keys = len({issue.key for issue in issues})
    return f"is NOT whole: {counted(len(issues), 'issue')} in {counted(num_keys, 'place')}"


def _text_below_key(issue: Issue) -> str:
    file = issue.path.removeprefix(f"{issue.key}/")
    return f"{file}: expected {issue.expected}, found {issue.found}"


def _checked(scan: Scan, seconds: float) -> str:
    num_shards, size = _num_shards(scan), bytes_text(scan.nbytes)
    arrays = counted(len(scan.arrays), "array")
    if _has_manifest(scan):
        speed = bytes_text(int(scan.nbytes / max(seconds, 1e-9)))
        files = counted(scan.num_files, "file")
        return (
            f"compared with the manifest: {arrays}, {counted(num_shards, 'object')} and common.pt "
            f"in {files}; {size} in {seconds:.1f} s, {speed}/s"
        )
    num_chunks = sum(one.num_chunks for one in scan.arrays)
    files = counted(num_shards + (scan.common_nbytes is not None), "file")
    return (
        f"checked: {arrays} in {counted(num_chunks, 'chunk file')}, "
        f"{counted(len(scan.objects), 'object')} and common.pt in {files}; {size} in all, "
        f"{seconds:.1f} s"
    )


def _facts(scan: Scan) -> Iterator[tuple[str, str]]:
    yield "checkpoint", printable(str(scan.root))
    yield "backend", _backend(scan)
    if scan.begun is not None:
        yield "saved", f"began {_when(scan.begun)}"
    if scan.index is not None:
        layout, versions = scan.index.layout.items(), scan.index.versions.items()
        yield "layout", printable(", ".join(f"{name} {size}" for name, size in layout))
        yield "written by", printable(", ".join(f"{name} {number}" for name, number in versions))
    if not scan.is_foreign:
        num_chunks = sum(one.num_chunks for one in scan.arrays)
        nbytes = sum(one.file_nbytes for one in scan.arrays)
        yield "arrays", _count(len(scan.arrays), num_chunks, nbytes)
        nbytes = sum(one.file_nbytes for one in scan.objects)
        if _has_manifest(scan):
            yield "objects", f"{_num_shards(scan):,} shards, {bytes_text(nbytes)}"
        else:
            yield "objects", _count(len(scan.objects), _num_shards(scan), nbytes)
    common = scan.common_nbytes
    yield "common.pt", "missing" if common is None else bytes_text(common)
    yield from _stale_facts(scan)
    if scan.others:
        shown = ", ".join(scan.others[:_MAX_NAMED])
        yield "beside it", printable(shown + (", ..." if scan.others[_MAX_NAMED:] else ""))
    yield "in all", _files_text(scan.num_files, scan.nbytes)
    yield "complete", _completeness(scan)


def _backend(scan: Scan) -> str:
    marker = scan.marker
    if marker is None:
        return "zarr 2, by its files" if _has_manifest(scan) else "unknown"
    common = f"common state: {marker.common_backend} {marker.common_backend_version}"
    return printable(f"{marker.sharded_backend} {marker.sharded_backend_version}; {common}")


def _stale_facts(scan: Scan) -> Iterator[tuple[str, str]]:
    if _has_manifest(scan):
        if scan.stale_files:
            files = counted(len(scan.stale_files), "file")
            yield "left over", f"{files} of killed processes (harmless)"
        return
    for kind, count in sorted(Counter(stale.kind for stale in scan.stale_files).items()):
        yield "left over", f"{_STALE[kind]}: {count:,} (harmless)"


def _completeness(scan: Scan) -> str:
    if scan.is_foreign:
        return "not known; dist-ckpt looks into zarr 1 and zarr 2 only"
    if _has_manifest(scan) and scan.is_unfinished:
        return f"NO, {_unfinished(scan.begun)}"
    if scan.issues:
        return incomplete(scan.issues)
    if not _has_manifest(scan):
        return "yes, by names and sizes; `dist-ckpt verify` also reads the objects"
    if scan.has_sizes:
        return "yes, by names and sizes; `dist-ckpt verify` compares every digest"
    return "yes, by names; `dist-ckpt verify` compares sizes and every digest"


def _unfinished(begun: SaveBegun | None) -> str:
    when = "" if begun is None else f", which began {_when(begun)},"
    return f"the save{when} has not ended, or was killed: `dist-ckpt prune` removes what it left"


def _when(begun: SaveBegun) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun.seconds))
    return f"{moment} on {printable(begun.host)}"


def _num_shards(scan: Scan) -> int:
    return sum(one.num_shards for one in scan.objects)


def _count(count: int, num_files: int, nbytes: int) -> str:
    return f"{count:,} in {_files_text(num_files, nbytes)}" if count else "none"


def _files_text(num_files: int, nbytes: int) -> str:
    return f"{counted(num_files, 'file')}, {bytes_text(nbytes)}"


def _present(found: int, expected: int) -> str:
    return f"{found:,}" if found == expected else f"{found:,} of {expected:,}"


def _tables(
    scan: Scan, arrays: Sequence[ScannedArray], objects: Sequence[ScannedObject]
) -> tuple[Table, Table]:
    array_titles: tuple[str, ...] = ("shape", "dtype", "chunk", "files", "size")
    object_titles: tuple[str, ...] = ("grid", "files", "size")
    if _has_manifest(scan):
        array_titles = ("shape", "dtype", "chunk", "inner", "files", "size", "writers")
        object_titles = ("grid", "shards", "size", "writers")
    return (
        Table(Row("array", array_titles), tuple(_array_row(scan, a) for a in arrays), _RIGHT),
        Table(Row("object", object_titles), tuple(_object_row(scan, o) for o in objects), _RIGHT),
    )


def _array_row(scan: Scan, scanned: ScannedArray) -> Row:
    array = scanned.array
    inner: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    if _has_manifest(scan):
        inner = (shape_text(array.inner_shape or ()),)
        writers = (_ranks(scanned.writers),)
    facts = (
        shape_text(array.shape),
        array.dtype.value,
        shape_text(array.chunk_shape),
        *inner,
        _present(scanned.num_chunks, array.num_chunks),
        bytes_text(scanned.file_nbytes),
        *writers,
    )
    return Row(printable(array.key), facts, is_marked=scanned.num_chunks < array.num_chunks)


def _object_row(scan: Scan, scanned: ScannedObject) -> Row:
    shape, size = shape_text(scanned.shape), bytes_text(scanned.file_nbytes)
    if _has_manifest(scan):
        size = size if scanned.file_nbytes else "in manifest"
        facts = (shape, f"{scanned.num_shards:,}", size, _ranks(scanned.writers))
        return Row(printable(scanned.key), facts)
    present = _present(scanned.num_shards, scanned.num_expected)
    is_marked = scanned.num_shards < scanned.num_expected
    return Row(printable(scanned.key), (shape, present, size), is_marked=is_marked)


def _ranks(ranks: Sequence[int]) -> str:
    """Such as ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:_MAX_NAMED])
    return shown + (", ..." if runs[_MAX_NAMED:] else "")


def _common_fields(scan: Scan) -> dict[str, Any]:
    """JSON of the whole checkpoint."""
    nbytes = scan.common_nbytes
    fields: dict[str, Any] = {
        "marker": asdict(scan.marker) if scan.marker else None,
        "common": None if nbytes is None else {"path": "common.pt", "nbytes": nbytes},
        "num_arrays": len(scan.arrays),
        "num_objects": len(scan.objects),
        "num_files": scan.num_files,
        "nbytes": scan.nbytes,
        "leftovers": list(map(asdict, scan.stale_files)),
    }
    if _has_manifest(scan):
        fields |= {
            "begun": asdict(scan.begun) if scan.begun else None,
            "unfinished": scan.is_unfinished,
            "layout": dict(scan.index.layout) if scan.index else None,
            "versions": dict(scan.index.versions) if scan.index else None,
            "others": scan.others,
        }
    return fields


def _array_fields(scan: Scan, scanned: ScannedArray) -> dict[str, Any]:
    array = scanned.array
    fields = {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "chunk_shape": array.chunk_shape,
        "nbytes": array.nbytes,
        "num_chunks": scanned.num_chunks,
        "num_chunks_expected": array.num_chunks,
        "file_nbytes": scanned.file_nbytes,
    }
    if _has_manifest(scan):
        return fields | {"inner_shape": array.inner_shape, "writers": scanned.writers}
    return fields | {"separator": array.separator, "raw": array.is_raw}


def _object_fields(scan: Scan, scanned: ScannedObject) -> dict[str, Any]:
    fields = {
        "key": scanned.key,
        "shape": scanned.shape,
        "num_shards": scanned.num_shards,
        "file_nbytes": scanned.file_nbytes,
    }
    if _has_manifest(scan):
        return fields | {"writers": scanned.writers}
    return fields | {"num_shards_expected": scanned.num_expected}
