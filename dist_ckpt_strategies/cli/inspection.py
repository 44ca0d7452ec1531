"""``dist-ckpt inspect``: what a checkpoint holds, as lists or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.columns import Row, print_list, print_wrapped
from dist_ckpt_strategies.cli.format2 import inspect_format2
from dist_ckpt_strategies.cli.json_form import (
    array_fields,
    finding_fields,
    object_fields,
    print_json,
    summary_fields,
)
from dist_ckpt_strategies.cli.locations import location_of, survey_of
from dist_ckpt_strategies.cli.parts import inspect_parts
from dist_ckpt_strategies.cli.text import bytes_text, counted, extent_text, is_wanted, printable
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.storage.contents import LeftoverKind
from dist_ckpt_strategies.storage.format2_survey import survey_format2
from dist_ckpt_strategies.storage.part_survey import survey_parts
from dist_ckpt_strategies.storage.stored_arrays import StoredArray
from dist_ckpt_strategies.storage.stored_objects import StoredObject
from dist_ckpt_strategies.storage.survey import Survey, survey_checkpoint

_MAX_FINDINGS = 3
_LABEL_WIDTH = 12
_LEFTOVERS = {
    LeftoverKind.LOCKS: "directories with locks of Megatron-Core <= 0.15",
    LeftoverKind.PARTIAL: "files that a save did not finish",
    LeftoverKind.WRITING: "files that are being written",
    LeftoverKind.REMOVED: "directories that were being removed",
}


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> None:
    """Show the arrays and objects of a checkpoint, or the parts of local ones, and if it is whole.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        keys: show only keys, or ids of parts, that match this glob.
        with_objects: show objects too.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ArrayNotFoundError: no key matches.
    """
    directory = location_of(address)
    if not isinstance(directory, Path):
        survey_in_store = survey_of(directory)
        inspect_format2(survey_in_store, keys, with_objects=with_objects, as_json=as_json)
        return
    local = survey_parts(directory)
    if local is not None:
        inspect_parts(local, keys, as_json=as_json)
        return
    recorded = survey_format2(directory)
    if recorded is not None:
        inspect_format2(recorded, keys, with_objects=with_objects, as_json=as_json)
        return
    survey = survey_checkpoint(directory)
    arrays = [stored for stored in survey.arrays if is_wanted(stored.array.key, keys)]
    objects = [stored for stored in survey.objects if is_wanted(stored.key, keys)]
    if keys is not None and not arrays and not objects:
        num_keys = len(survey.arrays) + len(survey.objects)
        raise ArrayNotFoundError(f"{survey.root}: none of its {num_keys} keys matches {keys!r}")
    shown_objects = objects if with_objects else []
    if as_json:
        fields = {
            "complete": _is_complete(survey),
            "arrays": list(map(array_fields, arrays)),
            "objects": list(map(object_fields, shown_objects)),
            "findings": list(map(finding_fields, survey.findings)),
        }
        print_json("inspect", survey.root, summary_fields(survey) | fields)
        return
    console = Console(highlight=False)
    _print_arrays(console, arrays)
    _print_objects(console, shown_objects)
    _print_summary(console, survey)


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
    _print_rows(console, titles, rows)


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
    _print_rows(console, Row("object", ("grid", "files", "size")), rows)


def _print_rows(console: Console, titles: Row, rows: Sequence[Row]) -> None:
    if rows:
        print_list(console, titles, rows, right=("files", "size"))
        console.print()


def _present(found: int, expected: int) -> str:
    return f"{found:,}" if found == expected else f"{found:,} of {expected:,}"


def _print_summary(console: Console, survey: Survey) -> None:
    for label, text in _summary(survey):
        style = "red" if text.startswith("NO") else ""
        console.print(Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(text, style), soft_wrap=True)
    for finding in () if survey.is_foreign else survey.findings[:_MAX_FINDINGS]:
        print_wrapped(console, printable(str(finding)), " " * _LABEL_WIDTH, " " * _LABEL_WIDTH)


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
    count = counted(len(survey.findings), "finding")
    return f"NO, {count}; `dist-ckpt verify` lists them all"
