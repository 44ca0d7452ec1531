"""Checkpoints of format 2 in ``dist-ckpt inspect`` and ``verify``: what the manifest says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from dist_ckpt_strategies.cli.columns import Row, print_section
from dist_ckpt_strategies.cli.findings import (
    not_complete,
    not_whole,
    print_by_key,
    print_fact,
    print_first,
    print_verdict,
)
from dist_ckpt_strategies.cli.json_form import finding_fields, leftover_fields, print_json
from dist_ckpt_strategies.cli.text import (
    bytes_text,
    counted,
    extent_text,
    is_wanted,
    printable,
    require_match,
)
from dist_ckpt_strategies.spec.manifest import ObjectRecord
from dist_ckpt_strategies.storage.findings import Finding
from dist_ckpt_strategies.storage.format2.files import SaveBegun
from dist_ckpt_strategies.storage.format2.survey import Format2Survey, RecordedArray

_MAX_NAMED = 5
_RIGHT = ("files", "shards", "size")
_ARRAY_TITLES = Row("array", ("shape", "dtype", "chunk", "inner", "files", "size", "writers"))
_OBJECT_TITLES = Row("object", ("grid", "shards", "size", "writers"))


def inspect_format2(
    survey: Format2Survey, keys: str | None, *, with_objects: bool, as_json: bool
) -> None:
    """Show what the manifest says, and whether its files are there.

    Args:
        survey: of the checkpoint.
        keys: show only keys that match this glob.
        with_objects: show objects too.
        as_json: print one JSON object.

    Raises:
        ArrayNotFoundError: no key matches.
    """
    arrays = [one for one in survey.arrays if is_wanted(one.record.array.key, keys)]
    objects = [one for one in _grids(survey.objects) if is_wanted(one[0].id.key, keys)]
    num_keys = len(survey.arrays) + len(_grids(survey.objects))
    require_match(survey.root, "keys", num_keys, keys, arrays or objects)
    shown_objects = objects if with_objects else []
    if as_json:
        fields = {
            "complete": not survey.findings,
            "arrays": list(map(_array_fields, arrays)),
            "objects": list(map(_object_fields, shown_objects)),
            "findings": list(map(finding_fields, survey.findings)),
        }
        print_json("inspect", str(survey.root), _summary_fields(survey) | fields)
        return
    console = Console(highlight=False)
    print_section(console, _ARRAY_TITLES, list(map(_array_row, arrays)), _RIGHT)
    print_section(console, _OBJECT_TITLES, list(map(_object_row, shown_objects)), _RIGHT)
    for label, text in _summary(survey):
        print_fact(console, label, text)
    print_first(console, survey.findings)


def show_verdict(
    survey: Format2Survey, findings: Sequence[Finding], seconds: float, *, as_json: bool
) -> None:
    """Show what comparing every digest has found.

    Args:
        survey: of the checkpoint.
        findings: sorted by key.
        seconds: that it took.
        as_json: print one JSON object.
    """
    if as_json:
        fields = {
            "whole": not findings,
            "seconds": seconds,
            "bytes_per_second": survey.nbytes / max(seconds, 1e-9),
            "findings": list(map(finding_fields, findings)),
        }
        print_json("verify", str(survey.root), _summary_fields(survey) | fields)
        return
    console = Console(highlight=False)
    print_by_key(console, findings, str)
    speed = bytes_text(int(survey.nbytes / max(seconds, 1e-9)))
    checked = (
        f"compared with the manifest: {counted(len(survey.arrays), 'array')}, "
        f"{counted(len(survey.objects), 'object')} and common.pt in "
        f"{counted(survey.num_files, 'file')}; {bytes_text(survey.nbytes)} in {seconds:.1f} s, "
        f"{speed}/s"
    )
    print_verdict(console, str(survey.root), _wrong(survey, findings), checked)


def _wrong(survey: Format2Survey, findings: Sequence[Finding]) -> str | None:
    if survey.is_unfinished:
        return f"is NOT finished: {_unfinished(survey.begun)}"
    return not_whole(findings)


def _array_row(stored: RecordedArray) -> Row:
    array, expected = stored.record.array, len(stored.record.chunks)
    files = f"{stored.num_files:,}"
    if stored.num_files != expected:
        files += f" of {expected:,}"
    return Row(
        printable(array.key),
        (
            extent_text(array.shape),
            array.dtype.value,
            extent_text(array.chunk_shape),
            extent_text(array.inner_shape or ()) + (" +crc32c" if array.has_crc32c else ""),
            files,
            bytes_text(stored.file_nbytes),
            _ranks(stored.writers),
        ),
        is_marked=stored.num_files != expected,
    )


def _object_row(records: Sequence[ObjectRecord]) -> Row:
    grid = records[0].id.shape
    return Row(
        printable(records[0].id.key),
        (
            extent_text(grid),
            f"{len(records):,}",
            bytes_text(_nbytes(records)) if _nbytes(records) else "in manifest",
            _ranks(_writers(records)),
        ),
    )


def _summary(survey: Format2Survey) -> Iterator[tuple[str, str]]:
    yield "checkpoint", printable(str(survey.root))
    marker, index = survey.marker, survey.index
    if marker is None:
        yield "backend", "zarr 2, by its files"
    else:
        common = f"common state: {marker.common_backend} {marker.common_backend_version}"
        own = f"{marker.sharded_backend} {marker.sharded_backend_version}"
        yield "backend", printable(f"{own}; {common}")
    if survey.begun is not None:
        yield "saved", f"began {_when(survey.begun)}"
    if index is not None:
        yield "layout", printable(", ".join(f"{k} {v}" for k, v in index.layout.items()))
        yield "written by", printable(", ".join(f"{k} {v}" for k, v in index.versions.items()))
    files = sum(one.num_files for one in survey.arrays)
    nbytes = sum(one.file_nbytes for one in survey.arrays)
    yield "arrays", f"{len(survey.arrays):,} in {counted(files, 'file')}, {bytes_text(nbytes)}"
    yield "objects", f"{len(survey.objects):,} shards, {bytes_text(_nbytes(survey.objects))}"
    common_nbytes = survey.common_nbytes
    yield "common.pt", "missing" if common_nbytes is None else bytes_text(common_nbytes)
    if survey.leftovers:
        count = counted(len(survey.leftovers), "file")
        yield "left over", f"{count} of killed processes (harmless)"
    if survey.others:
        shown = ", ".join(survey.others[:_MAX_NAMED])
        yield "beside it", printable(shown + (", ..." if survey.others[_MAX_NAMED:] else ""))
    yield "in all", f"{counted(survey.num_files, 'file')}, {bytes_text(survey.nbytes)}"
    yield "complete", _completeness(survey)


def _completeness(survey: Format2Survey) -> str:
    if survey.is_unfinished:
        return f"NO, {_unfinished(survey.begun)}"
    if survey.findings:
        return not_complete(survey.findings)
    if survey.has_sizes:
        return "yes, by names and sizes; `dist-ckpt verify` compares every digest"
    return "yes, by names; `dist-ckpt verify` compares sizes and every digest"


def _unfinished(begun: SaveBegun | None) -> str:
    when = "" if begun is None else f", which began {_when(begun)},"
    return f"the save{when} has not ended, or was killed: `dist-ckpt prune` removes what it left"


def _when(begun: SaveBegun) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun.seconds))
    return f"{moment} on {printable(begun.host)}"


def _summary_fields(survey: Format2Survey) -> dict[str, Any]:
    index = survey.index
    common = survey.common_nbytes
    return {
        "marker": asdict(survey.marker) if survey.marker else None,
        "begun": asdict(survey.begun) if survey.begun else None,
        "unfinished": survey.is_unfinished,
        "layout": dict(index.layout) if index else None,
        "versions": dict(index.versions) if index else None,
        "common": None if common is None else {"path": "common.pt", "nbytes": common},
        "num_arrays": len(survey.arrays),
        "num_objects": len(_grids(survey.objects)),
        "num_files": survey.num_files,
        "nbytes": survey.nbytes,
        "leftovers": list(map(leftover_fields, survey.leftovers)),
        "others": survey.others,
    }


def _array_fields(stored: RecordedArray) -> dict[str, Any]:
    array = stored.record.array
    return {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "chunk_shape": array.chunk_shape,
        "inner_shape": array.inner_shape,
        "crc32c": array.has_crc32c,
        "nbytes": array.nbytes,
        "num_chunks": stored.num_files,
        "num_chunks_expected": len(stored.record.chunks),
        "file_nbytes": stored.file_nbytes,
        "writers": stored.writers,
    }


def _object_fields(records: Sequence[ObjectRecord]) -> dict[str, Any]:
    return {
        "key": records[0].id.key,
        "shape": records[0].id.shape,
        "num_shards": len(records),
        "file_nbytes": _nbytes(records),
        "writers": _writers(records),
    }


def _grids(objects: Sequence[ObjectRecord]) -> list[list[ObjectRecord]]:
    """The shards of each object."""
    by_key: dict[str, list[ObjectRecord]] = {}
    for record in objects:
        by_key.setdefault(record.id.key, []).append(record)
    return list(by_key.values())


def _nbytes(records: Sequence[ObjectRecord]) -> int:
    return sum(record.span.nbytes for record in records if record.span is not None)


def _writers(records: Sequence[ObjectRecord]) -> list[int]:
    return sorted({record.writer for record in records})


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
