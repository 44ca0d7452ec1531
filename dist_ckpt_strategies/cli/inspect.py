"""``dist-ckpt inspect`` and ``verify``: of format 1, of format 2, and of local checkpoints."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.ranks import is_reporting, tool_ranks
from dist_ckpt_strategies.cli.render import (
    bytes_text,
    counted,
    open_bars,
    print_dim,
    print_json,
    print_table,
    printable,
    shape_text,
)
from dist_ckpt_strategies.cli.status import Status, status_of_issues
from dist_ckpt_strategies.comm.shared_work import Ranks, Watch
from dist_ckpt_strategies.errors import ArrayNotFoundError, some_of
from dist_ckpt_strategies.formats.commit import complete_commit
from dist_ckpt_strategies.formats.issues import (
    Issue,
    Problem,
    SaveBegun,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
)
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import LocalScan, StoredCopy, scan_local, verify_local

_FORMAT1, _FORMAT2, _PACKS = ("zarr", 1), ("zarr", 2), ("safetensors", 1)
_NUM_FIRST = 3
_MAX_PER_SECTION = 20
_LABEL_WIDTH = 12
_PROBLEM_WIDTH = 19
_LACKING = " of "
_UNKNOWN = "?"
_RIGHT = ("files", "blocks", "shards", "copies", "owner", "ranks", "tensors", "size")
_STALE = {
    StaleKind.LOCKS: "directories with locks of Megatron-Core <= 0.15 (harmless)",
    StaleKind.PARTIAL: "files that a save did not finish (harmless)",
    StaleKind.WRITING: "files that are being written",
    StaleKind.REMOVED: "directories that were being removed (harmless)",
}
_NOT_LOOKED_INTO = (
    "dist-ckpt looks into zarr 1 and zarr 2 only; `dist-ckpt diff` and `convert` read torch_dist"
)
_BY_SIZE = " (arrays by their sizes alone: zarr 1 has no digests of them)"
_UNFINISHED = "the save{} has not ended, or was killed: `dist-ckpt prune` removes what it left"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds, and what is wrong with it.

    ``fields`` are those of the JSON object of both commands, without the issues; ``lists`` further
    ones of ``inspect``, each a table of the text. ``checked`` is what ``verify`` looks at, and
    ``unfinished`` what is said of a save that has not ended. Arrays that another backend wrote are
    not looked for. Issues of local checkpoints are below their files, not below keys.
    """

    fields: Mapping[str, Any]
    lists: Mapping[str, Sequence[Mapping[str, Any]]]
    lines: tuple[tuple[str, str], ...]
    issues: tuple[Issue, ...]
    checked: str
    unfinished: str = ""
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


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> Status:
    """Show the arrays and objects of a checkpoint, or local shards; returns the exit status."""
    found = _scanned(located(address, None, what="DIR"), None)
    summary = summary_of(found, keys, with_objects=with_objects)
    if as_json:
        _print_json("inspect", summary, {"complete": summary.is_fine, **summary.lists})
    else:
        _print_inspection(summary)
    return status_of_issues(summary.issues)


def verify_checkpoint(address: str, *, nproc: int | None, as_json: bool) -> Status:
    """Check a checkpoint and show what is wrong with it; returns the exit status."""
    began = time.monotonic()
    place = located(address, None, what="DIR")
    with open_bars() as open_bar, tool_ranks(nproc) as comm:
        ranks = Ranks(comm)
        if isinstance(place, Path):
            ranks.run_on_first(lambda: place.is_dir() and complete_commit(place))
        found = ranks.run(lambda: _scanned(place, open_bar("reading directories")))
        check: Callable[..., tuple[Issue, ...]] = (
            verify_local if isinstance(found, LocalScan) else verify
        )
        issues = check(found, open_bar("reading files"), comm=comm)
    summary = replace(summary_of(found), issues=issues)
    seconds = time.monotonic() - began
    if is_reporting(nproc) and as_json:
        speed = summary.fields["nbytes"] / max(seconds, 1e-9)
        measured = {"seconds": seconds, "bytes_per_second": speed}
        _print_json("verify", summary, {"whole": summary.is_fine, **measured})
    elif is_reporting(nproc):
        _print_verification(summary, seconds)
    return status_of_issues(summary.issues)


def _scanned(place: Location, watch: Watch | None) -> Scan | LocalScan:
    return (isinstance(place, Path) and scan_local(place)) or scan(place, watch)


def _print_json(command: str, summary: Summary, fields: Mapping[str, Any]) -> None:
    issues = {"issues": list(map(asdict, summary.issues))}
    print_json(command, {**summary.fields, **fields, **issues})


def _print_inspection(summary: Summary) -> None:
    console = Console(highlight=False)
    for name, listed in summary.lists.items():
        if listed:
            _print_rows(console, list(map(_ROWS[name], listed)))
            console.print()
    _print_lines(console, (*summary.lines, ("complete", _completeness(summary))))
    for issue in summary.shown_issues[:_NUM_FIRST]:
        console.print(Text(" " * _LABEL_WIDTH + printable(str(issue))), soft_wrap=True)


def _completeness(summary: Summary) -> str:
    if summary.is_foreign:
        return f"not known; {_NOT_LOOKED_INTO}"
    if summary.unfinished:
        return f"NO, {summary.unfinished}"
    if summary.issues:
        issues = counted(len(summary.issues), "issue")
        return f"NO, {issues}; `dist-ckpt verify` lists them all"
    is_directory = isinstance(located(summary.fields["path"], None), Path)
    looked_at = "names and sizes" if is_directory else "names"  # as an object store lists them
    if summary.is_local:
        text = f"what is here is, by {looked_at}; other nodes are not seen"
    else:
        text = f"yes, by {looked_at}"
    return f"{text}; `dist-ckpt verify` also reads the files"


def _print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    for label, text in lines:
        style = "red" if text.startswith("NO") else ""
        line = Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(printable(text), style)
        console.print(line, soft_wrap=True)


def _print_verification(summary: Summary, seconds: float) -> None:
    console = Console(highlight=False)
    sections: dict[str, list[Issue]] = defaultdict(list)
    for issue in summary.shown_issues:
        title = issue.path if summary.is_local else issue.key or "the checkpoint"
        sections[title].append(issue)
    for title, issues in sections.items():
        console.print(Text(printable(title), "bold"), soft_wrap=True)
        for issue in issues[:_MAX_PER_SECTION]:
            file = issue.path.removeprefix(f"{issue.key}/")
            where = issue.key if summary.is_local and issue.key else file
            text = f"{where}: expected {issue.expected}, found {issue.found}"
            label = issue.problem.value.replace("_", " ")
            line = f"  {label:<{_PROBLEM_WIDTH}}{printable(text)}"
            console.print(Text(line), soft_wrap=True)
        if len(issues) > _MAX_PER_SECTION:
            num_more = len(issues) - _MAX_PER_SECTION
            print_dim(console, f"  ... and {num_more:,} more; --json lists them")
    _print_lines(console, [line for line in summary.lines if line[0] == "left over"])
    outcome = Text(f" {_outcome(summary)}", "bold red" if summary.issues else "bold green")
    console.print(Text(printable(summary.fields["path"])) + outcome, soft_wrap=True)
    if not summary.is_foreign:
        files = counted(summary.fields["num_files"], "file")
        size = f"{files}, {bytes_text(summary.fields['nbytes'])} in all"
        print_dim(console, f"checked: {summary.checked}; {size}, {seconds:.1f} s")


def _outcome(summary: Summary) -> str:
    if summary.is_foreign:
        marker = summary.fields["marker"]
        backend = f"{marker['sharded_backend']} {marker['sharded_backend_version']}"
        return f"cannot be verified: it is {backend}; {_NOT_LOOKED_INTO}"
    if summary.unfinished:
        return f"is NOT finished: {summary.unfinished}"
    if not summary.issues:
        return "is whole, as far as it is on this node" if summary.is_local else "is whole"
    files = counted(len({issue.path for issue in summary.issues}), "file")
    return f"is NOT whole: {counted(len(summary.issues), 'issue')} in {files}"


def summary_of(
    found: Scan | LocalScan, keys: str | None = None, *, with_objects: bool = True
) -> Summary:
    """The summary of a scan, with the keys that match in its lists; ArrayNotFoundError if none."""
    if isinstance(found, LocalScan):
        return _local_summary(found, keys)
    pattern = "*" if keys is None else keys
    fields_of = _packed_fields if found.backend == _PACKS else _array_fields
    arrays = [fields_of(one) for one in found.arrays if fnmatchcase(one.array.key, pattern)]
    objects = [_object_fields(one) for one in found.objects if fnmatchcase(one.key, pattern)]
    num_keys = len(found.arrays) + len(found.objects)
    _require_match(found.root, f"{num_keys} keys", keys, arrays or objects)
    objects = objects if with_objects else []
    common, is_unfinished = found.common_nbytes, found.is_unfinished
    begun = f", which began {_begun(found.begun)}," if found.begun else ""
    fields = {
        "path": str(found.root),
        "marker": asdict(found.marker) if found.marker else None,
        "common": None if common is None else {"path": "common.pt", "nbytes": common},
        "num_arrays": len(found.arrays),
        "num_objects": len(found.objects),
        "num_files": found.num_files,
        "nbytes": found.nbytes,
        "stale_files": list(map(asdict, found.stale_files)),
        "begun": asdict(found.begun) if found.begun else None,
        "unfinished": is_unfinished,
        "layout": dict(found.manifest.layout) if found.manifest else None,
        "versions": dict(found.manifest.versions) if found.manifest else None,
        "others": found.others,
    }
    contents = f"{counted(len(found.arrays), 'array')}, {counted(len(found.objects), 'object')}"
    return Summary(
        fields,
        {"arrays": arrays, "objects": objects},
        tuple(_rows_of(found)),
        found.issues,
        f"{contents} and common.pt{_BY_SIZE if found.backend == _FORMAT1 else ''}",
        _UNFINISHED.format(begun) if is_unfinished and found.backend == _FORMAT2 else "",
        is_foreign=found.is_foreign,
    )


def _require_match(root: object, what: str, pattern: str | None, found: object) -> None:
    if pattern is not None and not found:
        raise ArrayNotFoundError(f"{root}: none of its {what} matches {pattern!r}")


def _array_fields(one: ScannedArray) -> dict[str, Any]:
    array = one.array
    fields = {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "chunk_shape": array.chunk_shape,
        "nbytes": array.nbytes,
        "num_chunks": one.num_chunks,
        "num_chunks_expected": array.num_chunks,
        "file_nbytes": one.file_nbytes,
    }
    if array.inner_shape is None:
        return fields | {"separator": array.separator, "raw": array.is_raw}
    return fields | {"inner_shape": array.inner_shape, "writers": one.writers}


def _packed_fields(one: ScannedArray) -> dict[str, Any]:
    """Those of an array in packs, whose blocks are the shards as they were saved."""
    array = one.array
    return {
        "key": array.key,
        "shape": array.shape,
        "dtype": array.dtype.value,
        "nbytes": array.nbytes,
        "num_blocks": one.num_chunks,
        "writers": one.writers,
    }


def _array_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "array": printable(fields["key"]),
        "shape": shape_text(fields["shape"]),
        "dtype": fields["dtype"],
        "chunk": shape_text(fields["chunk_shape"]) if "chunk_shape" in fields else "",
        "inner": shape_text(fields["inner_shape"]) if "inner_shape" in fields else "",
        "files": _present(fields["num_chunks"], fields["num_chunks_expected"])
        if "num_chunks" in fields
        else "",
        "blocks": f"{fields['num_blocks']:,}" if "num_blocks" in fields else "",
        "size": bytes_text(fields.get("file_nbytes", fields["nbytes"])),
        "writers": _ranks(fields.get("writers", ())),
    }


def _object_fields(one: ScannedObject) -> dict[str, Any]:
    return {
        "key": one.key,
        "shape": one.shape,
        "num_shards": one.num_shards,
        "num_shards_expected": one.num_expected,
        "file_nbytes": one.file_nbytes,
        "writers": one.writers,
    }


def _object_row(fields: Mapping[str, Any]) -> dict[str, str]:
    in_manifest = fields["num_shards"] and not fields["file_nbytes"]
    return {
        "object": printable(fields["key"]),
        "grid": shape_text(fields["shape"]),
        "shards": _present(fields["num_shards"], fields["num_shards_expected"]),
        "size": "in manifest" if in_manifest else bytes_text(fields["file_nbytes"]),
        "writers": _ranks(fields["writers"]),
    }


def _print_rows(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    """Rows that lack files are marked; columns without any text are left out."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    texts = [[row[title] for title in titles] for row in rows]
    lacking = (_LACKING in row.get("files", row.get("shards", "")) for row in rows)
    print_table(console, titles, texts, _RIGHT, {n for n, lacks in enumerate(lacking) if lacks})


def _present(found: int, expected: int) -> str:
    return f"{found:,}" if found == expected else f"{found:,}{_LACKING}{expected:,}"


def _ranks(ranks: Sequence[int]) -> str:
    """Such as ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return some_of(["-".join(map(str, run)) for run in runs])


def _rows_of(found: Scan) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(found.root)
    backend, marker = "unknown", found.marker
    if marker is not None:
        backend = f"{marker.sharded_backend} {marker.sharded_backend_version}"
        backend += f"; common state: {marker.common_backend} {marker.common_backend_version}"
    yield "backend", backend
    if found.begun is not None:
        yield "saved", f"began {_begun(found.begun)}"
    if found.facts:
        yield "saved", _saved(found.facts)
    if found.manifest is not None:
        layout, versions = found.manifest.layout.items(), found.manifest.versions.items()
        if layout:
            yield "layout", ", ".join(f"{name} {size}" for name, size in layout)
        yield "written by", ", ".join(f"{name} {number}" for name, number in versions)
    if not found.is_foreign:
        num_chunks = sum(one.num_chunks for one in found.arrays)
        size = bytes_text(sum(one.file_nbytes for one in found.arrays))
        files = counted(num_chunks, "block" if found.backend == _PACKS else "file")
        yield "arrays", f"{len(found.arrays):,} in {files}, {size}"
        num_shards = sum(one.num_shards for one in found.objects)
        size = bytes_text(sum(one.file_nbytes for one in found.objects))
        yield "objects", f"{len(found.objects):,} in {counted(num_shards, 'shard')}, {size}"
    common = found.common_nbytes
    yield "common.pt", "missing" if common is None else bytes_text(common)
    yield from _stale_rows(found.stale_files)
    if found.others:
        yield "beside it", some_of(found.others)
    yield "in all", f"{counted(found.num_files, 'file')}, {bytes_text(found.nbytes)}"


def _saved(facts: Mapping[str, Any]) -> str:
    ranks, packs = counted(facts["ranks"], "rank"), counted(facts["num_packs"], "pack")
    return f"{_moment(facts['created'])} by {ranks} in {packs}"


def _begun(begun: SaveBegun) -> str:
    return f"{_moment(begun.seconds)} on {printable(begun.host)}"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _stale_rows(files: Sequence[StaleFile]) -> Iterator[tuple[str, str]]:
    for kind, text in _STALE.items():
        sizes = [stale.nbytes for stale in files if stale.kind is kind]
        if sizes:
            size = f", {bytes_text(sum(sizes))}" if any(sizes) else ""
            yield "left over", f"{text}: {len(sizes):,}{size}"


def _local_summary(found: LocalScan, keys: str | None) -> Summary:
    """Of the local checkpoints in a directory."""
    by_shard = [list(some) for _, some in groupby(found.copies, lambda copy: copy.shard_id)]
    pattern = "*" if keys is None else keys
    selected = [some for some in by_shard if fnmatchcase(str(some[0].shard_id), pattern)]
    _require_match(found.root, f"{len(by_shard)} local shards", keys, selected)
    shards = [_shard_fields(some) for some in selected]
    by_save = groupby(selected, lambda copies: copies[0].shard_id.save)
    saves = [_save_fields(list(some)) for _, some in by_save]
    num_files, num_saves = len(found.copies), len({copy.shard_id.save for copy in found.copies})
    held = f"{counted(num_saves, 'save')}, {counted(len(by_shard), 'shard')}"
    num_tensors = sum(copy.shard.num_tensors for copy in found.copies if copy.shard is not None)
    stale = list(map(asdict, found.stale_files))
    root = str(found.root)
    totals = {"num_files": num_files, "nbytes": found.nbytes}
    return Summary(
        {"path": root, "tier": "local", **totals, "stale_files": stale},
        {"iterations": saves, "parts": shards},
        (
            ("directory", root),
            ("local", f"{held} in {counted(num_files, 'file')}, {bytes_text(found.nbytes)}"),
            *_stale_rows(found.stale_files),
        ),
        found.issues,
        counted(num_tensors, "tensor"),
        is_local=True,
    )


def _shard_fields(copies: Sequence[StoredCopy]) -> dict[str, Any]:
    """What one rank has saved, and its copies here; None for what no description says."""
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


def _shard_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "local shard": fields["id"],
        "owner": str(fields["owner"]),
        "ranks": _known(fields["world_size"]),
        "held by": ", ".join(str(copy["holder"]) for copy in fields["copies"]),
        "kind": _known(fields["kind"]),
        "tensors": _known(fields["num_tensors"]),
        "size": bytes_text(sum(copy["nbytes"] for copy in fields["copies"])),
    }


def _save_fields(shards: Sequence[Sequence[StoredCopy]]) -> dict[str, Any]:
    """What is here of one save."""
    copies = list(chain.from_iterable(shards))
    save = copies[0].shard_id.save
    part = next((copy.shard for copy in copies if copy.shard is not None), None)
    return {
        "iteration": save.iteration,
        "save_id": save.stamp,
        "world_size": part and part.world_size,
        "session": part and part.session_id,
        "owners": [some[0].shard_id.global_rank for some in shards],
        "num_copies": len(copies),
        "nbytes": sum(copy.nbytes for copy in copies),
    }


def _save_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "iteration": str(fields["iteration"]),
        "ranks here": f"{len(fields['owners']):,} of {_known(fields['world_size'])}",
        "copies": f"{fields['num_copies']:,}",
        "session": _known(fields["session"]),
        "size": bytes_text(fields["nbytes"]),
        "save": fields["save_id"],
    }


def _known(value: int | str | None) -> str:
    return _UNKNOWN if value is None else printable(str(value))


_ROWS = {
    "arrays": _array_row,
    "objects": _object_row,
    "iterations": _save_row,
    "parts": _shard_row,
}
