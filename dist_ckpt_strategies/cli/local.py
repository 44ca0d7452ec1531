"""Local checkpoints of a node as ``inspect`` and ``verify`` show them: saves, and ranks' parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from dist_ckpt_strategies.cli.formats import NUM_FIRST, incomplete, verdict_by_file
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
)
from dist_ckpt_strategies.formats.issues import Issue, StaleKind
from dist_ckpt_strategies.local.part_format import PartId
from dist_ckpt_strategies.local.scan import LocalScan, StoredCopy

_UNKNOWN = "?"
_STALE = {
    StaleKind.PARTIAL: "unfinished files of a killed save (harmless, gone with the next)",
    StaleKind.WRITING: "files that are being written",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank saved, and its copies here; the facts are None where no header is good."""

    part_id: PartId
    world_size: int | None
    session: str | None
    kind: str | None
    num_tensors: int | None
    copies: tuple[StoredCopy, ...]

    @classmethod
    def of(cls, copies: Sequence[StoredCopy]) -> _Part:
        part = next((copy.part for copy in copies if copy.part is not None), None)
        if part is None:
            return cls(copies[0].part_id, None, None, None, None, tuple(copies))
        num_tensors = sum(1 for buffer in part.buffers if buffer.device)
        facts = (part.world_size, part.session_id, part.kind, num_tensors)
        return cls(copies[0].part_id, *facts, tuple(copies))

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    @property
    def is_damaged(self) -> bool:
        return any(copy.part is None for copy in self.copies)


def inspection_of(scan: LocalScan, keys: str | None) -> Summary:
    """What ``inspect`` shows.

    Args:
        scan: of the directory.
        keys: show only parts whose id matches this glob.

    Raises:
        ArrayNotFoundError: no part matches.
    """
    parts = _parts(scan)
    shown = matching(parts, lambda part: str(part.part_id), keys)
    require_match(scan.root, "parts", len(parts), keys, shown)
    saves = _by_save(shown)
    save_titles = Row("iteration", ("ranks here", "copies", "session", "size", "save"))
    part_titles = Row("part", ("owner", "ranks", "kept by", "kind", "tensors", "size"))
    numbers = ("owner", "ranks", "tensors", "size")
    return Summary(
        str(scan.root),
        _common_fields(scan)
        | {
            "iterations": list(map(_save_fields, saves)),
            "parts": list(map(_part_fields, shown)),
        },
        scan.issues,
        tables=(
            Table(save_titles, tuple(map(_save_row, saves)), ("copies", "size")),
            Table(part_titles, tuple(map(_part_row, shown)), numbers),
        ),
        facts=tuple(_facts(scan, parts)),
        num_first=NUM_FIRST,
    )


def verification_of(scan: LocalScan, issues: tuple[Issue, ...], seconds: float) -> Summary:
    """What ``verify`` shows.

    Args:
        scan: of the directory.
        issues: all of them, sorted by file.
        seconds: that it took.
    """
    num_tensors = sum(len(copy.part.buffers) for copy in scan.copies if copy.part is not None)
    return Summary(
        str(scan.root),
        _common_fields(scan) | {"whole": not issues},
        issues,
        facts=tuple(_stale_facts(scan)),
        sections=sections_of(issues, lambda issue: issue.path, _issue_text),
        verdict=verdict_by_file(issues),
        checked=(
            f"checked: {counted(num_tensors, 'tensor')} in {counted(len(scan.copies), 'file')} of "
            f"local parts; {bytes_text(scan.nbytes)} in all, {seconds:.1f} s"
        ),
    )


def _parts(scan: LocalScan) -> list[_Part]:
    by_id = groupby(scan.copies, lambda copy: copy.part_id)
    return [_Part.of(list(copies)) for _, copies in by_id]


def _facts(scan: LocalScan, parts: Sequence[_Part]) -> Iterator[tuple[str, str]]:
    yield "directory", printable(str(scan.root))
    saves = counted(len(_by_save(parts)), "save")
    files = f"{counted(len(scan.copies), 'file')}, {bytes_text(scan.nbytes)}"
    yield "local", f"{saves}, {counted(len(parts), 'part')} in {files}"
    yield from _stale_facts(scan)
    whole = "yes, by headers and sizes; `dist-ckpt verify` compares every tensor"
    yield "whole", incomplete(scan.issues) if scan.issues else whole


def _stale_facts(scan: LocalScan) -> Iterator[tuple[str, str]]:
    for kind, text in _STALE.items():
        some = [stale for stale in scan.stale_files if stale.kind is kind]
        if some:
            size = bytes_text(sum(stale.nbytes for stale in some))
            yield "left over", f"{text}: {len(some):,}, {size}"


def _common_fields(scan: LocalScan) -> dict[str, Any]:
    """JSON of all that was found."""
    return {
        "tier": "local",
        "num_files": len(scan.copies),
        "nbytes": scan.nbytes,
        "leftovers": list(map(asdict, scan.stale_files)),
    }


def _issue_text(issue: Issue) -> str:
    name = f"{issue.key}: " if issue.key else ""
    return f"{name}expected {issue.expected}, found {issue.found}"


def _by_save(parts: Sequence[_Part]) -> list[tuple[_Part, ...]]:
    return [tuple(some) for _, some in groupby(parts, lambda part: part.part_id.save)]


def _world_size(parts: Sequence[_Part]) -> int | None:
    return next((part.world_size for part in parts if part.world_size is not None), None)


def _session(parts: Sequence[_Part]) -> str | None:
    return next((part.session for part in parts if part.session is not None), None)


def _known(value: int | str | None) -> str:
    return _UNKNOWN if value is None else printable(str(value))


def _save_row(parts: Sequence[_Part]) -> Row:
    size, save = _world_size(parts), parts[0].part_id.save
    facts = (
        f"{len(parts):,} of {_UNKNOWN if size is None else format(size, ',')}",
        f"{sum(len(part.copies) for part in parts):,}",
        _known(_session(parts)) or "-",
        bytes_text(sum(part.nbytes for part in parts)),
        save.token,
    )
    return Row(str(save.iteration), facts, is_marked=any(part.is_damaged for part in parts))


def _save_fields(parts: Sequence[_Part]) -> dict[str, Any]:
    save = parts[0].part_id.save
    return {
        "iteration": save.iteration,
        "token": save.token,
        "world_size": _world_size(parts),
        "session": _session(parts),
        "owners": [part.part_id.global_rank for part in parts],
        "num_copies": sum(len(part.copies) for part in parts),
        "nbytes": sum(part.nbytes for part in parts),
    }


def _part_row(part: _Part) -> Row:
    facts = (
        str(part.part_id.global_rank),
        _known(part.world_size),
        ", ".join(str(copy.holder) for copy in part.copies),
        _known(part.kind),
        _UNKNOWN if part.num_tensors is None else f"{part.num_tensors:,}",
        bytes_text(part.nbytes),
    )
    return Row(str(part.part_id), facts, is_marked=part.is_damaged)


def _part_fields(part: _Part) -> dict[str, Any]:
    return {
        "id": str(part.part_id),
        "iteration": part.part_id.save.iteration,
        "owner": part.part_id.global_rank,
        "world_size": part.world_size,
        "session": part.session,
        "kind": part.kind,
        "num_tensors": part.num_tensors,
        "copies": [
            {
                "path": copy.path,
                "holder": copy.holder,
                "nbytes": copy.nbytes,
                "readable": copy.part is not None,
            }
            for copy in part.copies
        ],
    }
