"""Checkpoints of format 1 in ``dist-ckpt inspect`` and ``verify``: what the directory says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from dist_ckpt_strategies.cli.columns import Row, print_section
from dist_ckpt_strategies.cli.findings import (
    not_complete,
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
from dist_ckpt_strategies.storage.findings import Finding, LeftoverKind
from dist_ckpt_strategies.storage.format1.stored_arrays import StoredArray
from dist_ckpt_strategies.storage.format1.survey import Survey
from dist_ckpt_strategies.storage.objects.stored import StoredObject

_RIGHT = ("files", "size")
_LEFTOVERS = {
    LeftoverKind.LOCKS: "directories with locks of Megatron-Core <= 0.15",
    LeftoverKind.PARTIAL: "files that a save did not finish",
    LeftoverKind.WRITING: "files that are being written",
    LeftoverKind.REMOVED: "directories that were being removed",
}


def inspect_format1(survey: Survey, keys: str | None, *, with_objects: bool, as_json: bool) -> None:
    """Show the arrays and objects that files were found of, and whether any is missing.

    Args:
        survey: of the checkpoint.
        keys: show only keys that match this glob.
        with_objects: show objects too.
        as_json: print one JSON object.

    Raises:
        ArrayNotFoundError: no key matches.
    """
    arrays = [stored for stored in survey.arrays if is_wanted(stored.array.key, keys)]
    objects = [stored for stored in survey.objects if is_wanted(stored.key, keys)]
    num_keys = len(survey.arrays) + len(survey.objects)
    require_match(survey.root, "keys", num_keys, keys, arrays or objects)
    shown_objects = objects if with_objects else []
    if as_json:
        fields = {
            "complete": _is_complete(survey),
            "arrays": list(map(_array_fields, arrays)),
            "objects": list(map(_object_fields, shown_objects)),
            "findings": list(map(finding_fields, survey.findings)),
        }
        print_json("inspect", survey.root, _summary_fields(survey) | fields)
        return
    console = Console(highlight=False)
    _print_arrays(console, arrays)
    _print_objects(console, shown_objects)
    _print_summary(console, survey)


def show_verdict(
    survey: Survey, findings: Sequence[Finding], seconds: float, *, as_json: bool
) -> None:
    """Show what looking at every file has found.

    Args:
        survey: of the checkpoint.
        findings: sorted by key.
        seconds: that it took.
        as_json: print one JSON object.
    """
    if as_json:
        whole = None if survey.is_foreign else not findings
        fields = {"whole": whole, "findings": list(map(finding_fields, findings))}
        print_json("verify", survey.root, _summary_fields(survey) | fields)
        return
    console = Console(highlight=False)
    print_by_key(console, findings, _text_of)
    checked = "" if survey.is_foreign else _checked(survey, seconds)
    print_verdict(console, str(survey.root), _wrong(survey, findings), checked)


def _text_of(finding: Finding) -> str:
    file = finding.path.removeprefix(f"{finding.key}/")
    return f"{file}: expected {finding.expected}, found {finding.found}"


def _wrong(survey: Survey, findings: Sequence[Finding]) -> str | None:
    if survey.is_foreign:
        return "cannot be verified: another backend wrote it"
    if not findings:
        return None
    num_keys = len({finding.key for finding in findings})
    return f"is NOT whole: {counted(len(findings), 'finding')} in {counted(num_keys, 'place')}"


def _checked(survey: Survey, seconds: float) -> str:
    chunks = sum(stored.num_chunks for stored in survey.arrays)
    arrays = f"{counted(len(survey.arrays), 'array')} in {counted(chunks, 'chunk file')}"
    num_archives = counted(len(survey.archives), "file")
    objects = f"{counted(len(survey.objects), 'object')} and common.pt in {num_archives}"
    return f"checked: {arrays}, {objects}; {bytes_text(survey.nbytes)} in all, {seconds:.1f} s"


def _is_complete(survey: Survey) -> bool | None:
    """By names and sizes; None where they say nothing, in a checkpoint of another backend."""
    return None if survey.is_foreign else not survey.findings


def _print_arrays(console: Console, arrays: Sequence[StoredArray]) -> None:
    rows = [
        Row(
            printable(stored.array.key),
            (
                extent_text(stored.array.shape),
                stored.array.dtype.value,
                extent_text(stored.array.chunk_shape),
                _present(stored.num_chunks, stored.array.num_chunks),
                bytes_text(stored.file_nbytes),
            ),
            is_marked=stored.num_chunks < stored.array.num_chunks,
        )
        for stored in arrays
    ]
    titles = Row("array", ("shape", "dtype", "chunk", "files", "size"))
    print_section(console, titles, rows, _RIGHT)


def _print_objects(console: Console, objects: Sequence[StoredObject]) -> None:
    rows = [
        Row(
            printable(stored.key),
            (
                extent_text(stored.shape),
                _present(stored.num_shards, stored.num_expected),
                bytes_text(stored.file_nbytes),
            ),
            is_marked=stored.num_shards < stored.num_expected,
        )
        for stored in objects
    ]
    print_section(console, Row("object", ("grid", "files", "size")), rows, _RIGHT)


def _present(found: int, expected: int) -> str:
    return f"{found:,}" if found == expected else f"{found:,} of {expected:,}"


def _print_summary(console: Console, survey: Survey) -> None:
    for label, text in _summary(survey):
        print_fact(console, label, text)
    print_first(console, () if survey.is_foreign else survey.findings)


def _summary(survey: Survey) -> Iterator[tuple[str, str]]:
    yield "checkpoint", printable(str(survey.root))
    yield "backend", _backend(survey)
    if not survey.is_foreign:
        chunks = sum(stored.num_chunks for stored in survey.arrays)
        nbytes = sum(stored.file_nbytes for stored in survey.arrays)
        yield "arrays", _count(len(survey.arrays), chunks, nbytes)
        shards = sum(len(stored.shards) for stored in survey.objects)
        nbytes = sum(stored.file_nbytes for stored in survey.objects)
        yield "objects", _count(len(survey.objects), shards, nbytes)
    yield "common.pt", bytes_text(survey.common.nbytes) if survey.common else "missing"
    kinds = Counter(leftover.kind for leftover in survey.leftovers)
    for kind, count in sorted(kinds.items()):
        yield "left over", f"{_LEFTOVERS[kind]}: {count:,} (harmless)"
    yield "in all", _count_files(survey.num_files, survey.nbytes)
    yield "complete", _completeness(survey)


def _backend(survey: Survey) -> str:
    marker = survey.marker
    if marker is None:
        return "unknown"
    common = f"common state: {marker.common_backend} {marker.common_backend_version}"
    return printable(f"{marker.sharded_backend} {marker.sharded_backend_version}; {common}")


def _count(count: int, num_files: int, nbytes: int) -> str:
    return f"{count:,} in {_count_files(num_files, nbytes)}" if count else "none"


def _count_files(num_files: int, nbytes: int) -> str:
    return f"{counted(num_files, 'file')}, {bytes_text(nbytes)}"


def _completeness(survey: Survey) -> str:
    if survey.is_foreign:
        return "not known; dist-ckpt looks into zarr 1 and zarr 2 only"
    if not survey.findings:
        return "yes, by names and sizes; `dist-ckpt verify` also reads the objects"
    return not_complete(survey.findings)


def _summary_fields(survey: Survey) -> dict[str, Any]:
    """Counts and sizes of the whole checkpoint, its marker and its common state."""
    common = survey.common
    return {
        "marker": asdict(survey.marker) if survey.marker else None,
        "common": {"path": common.path, "nbytes": common.nbytes} if common else None,
        "num_arrays": len(survey.arrays),
        "num_objects": len(survey.objects),
        "num_files": survey.num_files,
        "nbytes": survey.nbytes,
        "leftovers": list(map(leftover_fields, survey.leftovers)),
    }


def _array_fields(stored: StoredArray) -> dict[str, Any]:
    """One array."""
    array = stored.array
    return {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "chunk_shape": array.chunk_shape,
        "separator": array.separator,
        "raw": array.is_raw,
        "nbytes": array.nbytes,
        "num_chunks": stored.num_chunks,
        "num_chunks_expected": array.num_chunks,
        "file_nbytes": stored.file_nbytes,
    }


def _object_fields(stored: StoredObject) -> dict[str, Any]:
    """One grid of objects."""
    return {
        "key": stored.key,
        "shape": stored.shape,
        "num_shards": stored.num_shards,
        "num_shards_expected": stored.num_expected,
        "file_nbytes": stored.file_nbytes,
    }
