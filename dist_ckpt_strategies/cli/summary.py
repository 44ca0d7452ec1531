"""What there is to say about a checkpoint: of format 1, of format 2, or local ones of a node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from dist_ckpt_strategies.cli.render import Table, bytes_text, counted, printable, shape_text
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.formats.issues import (
    Issue,
    SaveBegun,
    Scan,
    ScannedArray,
    ScannedObject,
    StaleFile,
    StaleKind,
)
from dist_ckpt_strategies.local.scan import LocalScan, StoredCopy

_FORMAT2 = 2
_MAX_NAMED = 5
_LACKING = " of "
_UNKNOWN = "?"
_RIGHT = ("files", "shards", "copies", "owner", "ranks", "tensors", "size")
_STALE = {
    StaleKind.LOCKS: "directories with locks of Megatron-Core <= 0.15 (harmless)",
    StaleKind.PARTIAL: "files that a save did not finish (harmless)",
    StaleKind.WRITING: "files that are being written",
    StaleKind.REMOVED: "directories that were being removed (harmless)",
}
_UNFINISHED = "the save{} has not ended, or was killed: `dist-ckpt prune` removes what it left"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds, and what is wrong with it.

    Attributes:
        root: the checkpoint.
        fields: of the JSON object of both commands, without the issues.
        lists: further fields of ``inspect``.
        tables: the lists as text.
        facts: labels and texts.
        issues: everything that is wrong.
        checked: what ``verify`` looks at.
        unfinished: what to say of a save that has not ended; else nothing.
        is_foreign: another backend wrote the arrays, which are not looked for then.
        has_sizes: sizes of files were compared; an object store lists names alone.
        by_file: issues are listed below their files, not below their keys.
    """

    root: str
    fields: Mapping[str, Any]
    lists: Mapping[str, Sequence[Mapping[str, Any]]]
    tables: tuple[Table, ...]
    facts: tuple[tuple[str, str], ...]
    issues: tuple[Issue, ...]
    checked: str
    unfinished: str = ""
    is_foreign: bool = False
    has_sizes: bool = True
    by_file: bool = False


def summary_of(
    found: Scan | LocalScan, keys: str | None = None, *, with_objects: bool = True
) -> Summary:
    """The summary of a scan; its lists have the keys that match a glob.

    Raises:
        ArrayNotFoundError: no key matches.
    """
    if isinstance(found, LocalScan):
        return _local_summary(found, keys)
    arrays = [_array_fields(one) for one in found.arrays if _matches(one.array.key, keys)]
    objects = [_object_fields(one) for one in found.objects if _matches(one.key, keys)]
    num_keys = len(found.arrays) + len(found.objects)
    _require_match(found.root, f"{num_keys} keys", keys, arrays or objects)
    objects = objects if with_objects else []
    common, is_unfinished = found.common_nbytes, found.is_unfinished
    begun = f", which began {_begun(found.begun)}," if found.begun else ""
    fields = {
        "marker": asdict(found.marker) if found.marker else None,
        "common": None if common is None else {"path": "common.pt", "nbytes": common},
        "num_arrays": len(found.arrays),
        "num_objects": len(found.objects),
        "num_files": found.num_files,
        "nbytes": found.nbytes,
        "leftovers": list(map(asdict, found.stale_files)),
        "begun": asdict(found.begun) if found.begun else None,
        "unfinished": is_unfinished,
        "layout": dict(found.index.layout) if found.index else None,
        "versions": dict(found.index.versions) if found.index else None,
        "others": found.others,
    }
    contents = f"{counted(len(found.arrays), 'array')}, {counted(len(found.objects), 'object')}"
    return Summary(
        str(found.root),
        fields,
        {"arrays": arrays, "objects": objects},
        (_table(map(_array_row, arrays)), _table(map(_object_row, objects))),
        tuple(_facts(found)),
        found.issues,
        f"{contents} and common.pt",
        _UNFINISHED.format(begun) if is_unfinished and found.version == _FORMAT2 else "",
        is_foreign=found.is_foreign,
        has_sizes=found.has_sizes,
    )


def _matches(key: str, pattern: str | None) -> bool:
    """Whether a key is selected; ``*`` stands for any characters."""
    return pattern is None or fnmatchcase(key, pattern)


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


def _array_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "array": printable(fields["key"]),
        "shape": shape_text(fields["shape"]),
        "dtype": fields["dtype"],
        "chunk": shape_text(fields["chunk_shape"]),
        "inner": shape_text(fields["inner_shape"]) if "inner_shape" in fields else "",
        "files": _present(fields["num_chunks"], fields["num_chunks_expected"]),
        "size": bytes_text(fields["file_nbytes"]),
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


def _table(rows: Iterable[Mapping[str, str]]) -> Table:
    """Rows that lack files are marked; columns without any text are left out."""
    found = list(rows)
    titles = [title for title in (found[0] if found else ()) if any(row[title] for row in found)]
    texts = tuple(tuple(row[title] for title in titles) for row in found)
    marked = {
        n for n, row in enumerate(found) if _LACKING in row.get("files", "") + row.get("shards", "")
    }
    return Table(tuple(titles), texts, _RIGHT, marked)


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
    return _some(["-".join(map(str, run)) for run in runs])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if names[_MAX_NAMED:] else "")


def _facts(found: Scan) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(found.root)
    backend, marker = "unknown", found.marker
    if marker is not None:
        backend = f"{marker.sharded_backend} {marker.sharded_backend_version}"
        backend += f"; common state: {marker.common_backend} {marker.common_backend_version}"
    yield "backend", backend
    if found.begun is not None:
        yield "saved", f"began {_begun(found.begun)}"
    if found.index is not None:
        layout, versions = found.index.layout.items(), found.index.versions.items()
        yield "layout", ", ".join(f"{name} {size}" for name, size in layout)
        yield "written by", ", ".join(f"{name} {number}" for name, number in versions)
    if not found.is_foreign:
        num_chunks = sum(one.num_chunks for one in found.arrays)
        size = bytes_text(sum(one.file_nbytes for one in found.arrays))
        yield "arrays", f"{len(found.arrays):,} in {counted(num_chunks, 'file')}, {size}"
        num_shards = sum(one.num_shards for one in found.objects)
        size = bytes_text(sum(one.file_nbytes for one in found.objects))
        yield "objects", f"{len(found.objects):,} in {counted(num_shards, 'shard')}, {size}"
    common = found.common_nbytes
    yield "common.pt", "missing" if common is None else bytes_text(common)
    yield from _stale_facts(found.stale_files)
    if found.others:
        yield "beside it", _some(found.others)
    yield "in all", f"{counted(found.num_files, 'file')}, {bytes_text(found.nbytes)}"


def _begun(begun: SaveBegun) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun.seconds))
    return f"{moment} on {printable(begun.host)}"


def _stale_facts(files: Sequence[StaleFile]) -> Iterator[tuple[str, str]]:
    for kind, text in _STALE.items():
        sizes = [stale.nbytes for stale in files if stale.kind is kind]
        if sizes:
            size = f", {bytes_text(sum(sizes))}" if any(sizes) else ""
            yield "left over", f"{text}: {len(sizes):,}{size}"


def _local_summary(found: LocalScan, keys: str | None) -> Summary:
    """Of the local checkpoints in a directory."""
    by_shard = [list(some) for _, some in groupby(found.copies, lambda copy: copy.part_id)]
    selected = [some for some in by_shard if _matches(str(some[0].part_id), keys)]
    _require_match(found.root, f"{len(by_shard)} local shards", keys, selected)
    shards = [_shard_fields(some) for some in selected]
    saves = [
        _save_fields(save.token, [fields for _, fields in some])
        for save, some in groupby(
            zip(selected, shards, strict=True), lambda pair: pair[0][0].part_id.save
        )
    ]
    num_files, num_saves = len(found.copies), len({copy.part_id.save for copy in found.copies})
    held = f"{counted(num_saves, 'save')}, {counted(len(by_shard), 'shard')}"
    num_tensors = sum(len(copy.part.buffers) for copy in found.copies if copy.part is not None)
    return Summary(
        str(found.root),
        {
            "tier": "local",
            "num_files": num_files,
            "nbytes": found.nbytes,
            "leftovers": list(map(asdict, found.stale_files)),
        },
        {"iterations": saves, "parts": shards},
        (_table(map(_save_row, saves)), _table(map(_shard_row, shards))),
        (
            ("directory", str(found.root)),
            ("local", f"{held} in {counted(num_files, 'file')}, {bytes_text(found.nbytes)}"),
            *_stale_facts(found.stale_files),
        ),
        found.issues,
        counted(num_tensors, "tensor"),
        by_file=True,
    )


def _shard_fields(copies: Sequence[StoredCopy]) -> dict[str, Any]:
    """What one rank has saved, and its copies here; None for what no header says."""
    part_id = copies[0].part_id
    part = next((copy.part for copy in copies if copy.part is not None), None)
    return {
        "id": str(part_id),
        "iteration": part_id.save.iteration,
        "owner": part_id.global_rank,
        "world_size": None if part is None else part.world_size,
        "session": None if part is None else part.session_id,
        "kind": None if part is None else part.kind,
        "num_tensors": None if part is None else sum(1 for one in part.buffers if one.device),
        "copies": [
            {
                "path": copy.path,
                "holder": copy.holder,
                "nbytes": copy.nbytes,
                "readable": copy.part is not None,
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


def _save_fields(token: str, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = [shard for shard in shards if shard["world_size"] is not None] or shards
    copies = [copy for shard in shards for copy in shard["copies"]]
    return {
        "iteration": shards[0]["iteration"],
        "token": token,
        "world_size": known[0]["world_size"],
        "session": known[0]["session"],
        "owners": [shard["owner"] for shard in shards],
        "num_copies": len(copies),
        "nbytes": sum(copy["nbytes"] for copy in copies),
    }


def _save_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "iteration": str(fields["iteration"]),
        "ranks here": f"{len(fields['owners']):,} of {_known(fields['world_size'])}",
        "copies": f"{fields['num_copies']:,}",
        "session": _known(fields["session"]),
        "size": bytes_text(fields["nbytes"]),
        "save": fields["token"],
    }


def _known(value: int | str | None) -> str:
    return _UNKNOWN if value is None else printable(str(value))
