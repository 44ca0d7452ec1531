"""Local checkpoints in ``dist-ckpt inspect`` and ``verify``: saves, parts, and what is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console

from dist_ckpt_strategies.cli.columns import Row, print_section
from dist_ckpt_strategies.cli.findings import (
    not_complete,
    not_whole,
    print_below,
    print_fact,
    print_first,
    print_verdict,
)
from dist_ckpt_strategies.cli.json_form import finding_fields, leftover_fields, print_json
from dist_ckpt_strategies.cli.text import (
    bytes_text,
    counted,
    is_wanted,
    printable,
    require_match,
)
from dist_ckpt_strategies.spec.part import PartId, SaveId
from dist_ckpt_strategies.storage.findings import Finding, LeftoverKind
from dist_ckpt_strategies.storage.parts.survey import PartSurvey, StoredCopy

_UNKNOWN = "?"
_LEFTOVERS = {
    LeftoverKind.PARTIAL: "unfinished files of a killed save (harmless, gone with the next)",
    LeftoverKind.WRITING: "files that are being written",
}
_SAVE_TITLES = Row("iteration", ("ranks here", "copies", "session", "size", "save"))
_PART_TITLES = Row("part", ("owner", "ranks", "kept by", "kind", "tensors", "size"))


@dataclass(frozen=True, slots=True)
class _ShownPart:
    """A part and its copies; the facts are None where no copy has a good header."""

    part_id: PartId
    world_size: int | None
    session: str | None
    kind: str | None
    num_tensors: int | None
    copies: tuple[StoredCopy, ...]

    @classmethod
    def of(cls, copies: Sequence[StoredCopy]) -> _ShownPart:
        part = next((copy.part for copy in copies if copy.part is not None), None)
        if part is None:
            return cls(copies[0].part_id, None, None, None, None, tuple(copies))
        num_tensors = sum(1 for buffer in part.buffers if buffer.device)
        facts = (part.world_size, part.session_id, part.kind, num_tensors)
        return cls(part.part_id, *facts, tuple(copies))

    @property
    def save(self) -> SaveId:
        return self.part_id.save

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    @property
    def is_damaged(self) -> bool:
        return any(copy.part is None for copy in self.copies)


def inspect_parts(survey: PartSurvey, keys: str | None, *, as_json: bool) -> None:
    """Show the saves and parts of local checkpoints.

    Args:
        survey: what there is.
        keys: show only parts whose id matches this glob.
        as_json: print one JSON object.

    Raises:
        ArrayNotFoundError: no part matches.
    """
    parts = [_ShownPart.of(list(some)) for _, some in groupby(survey.copies, lambda c: c.part_id)]
    shown = [part for part in parts if is_wanted(str(part.part_id), keys)]
    require_match(survey.root, "parts", len(parts), keys, shown)
    if as_json:
        fields = {
            "iterations": list(map(_save_fields, _by_save(shown))),
            "parts": list(map(_part_fields, shown)),
        }
        print_json("inspect", survey.root, _summary_fields(survey, survey.findings) | fields)
        return
    console = Console(highlight=False)
    saves, rows = list(map(_save_row, _by_save(shown))), list(map(_part_row, shown))
    print_section(console, _SAVE_TITLES, saves, right=("copies", "size"))
    print_section(console, _PART_TITLES, rows, right=("owner", "ranks", "tensors", "size"))
    _print_summary(console, survey, parts)


def show_verdict(
    survey: PartSurvey, findings: Sequence[Finding], seconds: float, *, as_json: bool
) -> None:
    """Show what comparing every digest has found.

    Args:
        survey: what there is.
        findings: sorted by file.
        seconds: that it took.
        as_json: print one JSON object.
    """
    if as_json:
        print_json(
            "verify", survey.root, _summary_fields(survey, findings) | {"whole": not findings}
        )
        return
    console = Console(highlight=False)
    for path, some in groupby(findings, lambda finding: finding.path):
        print_below(console, path, list(some), _text_of)
    _print_leftovers(console, survey)
    num_tensors = sum(len(c.part.buffers) for c in survey.copies if c.part is not None)
    checked = (
        f"checked: {counted(num_tensors, 'tensor')} in {counted(len(survey.copies), 'file')} of "
        f"local parts; {bytes_text(survey.nbytes)} in all, {seconds:.1f} s"
    )
    print_verdict(console, str(survey.root), not_whole(findings), checked)


def _text_of(finding: Finding) -> str:
    name = f"{finding.key}: " if finding.key else ""
    return f"{name}expected {finding.expected}, found {finding.found}"


def _by_save(parts: Sequence[_ShownPart]) -> list[tuple[_ShownPart, ...]]:
    return [tuple(some) for _, some in groupby(parts, lambda part: part.save)]


def _save_row(parts: Sequence[_ShownPart]) -> Row:
    copies = [copy for part in parts for copy in part.copies]
    size = _world_size(parts)
    return Row(
        str(parts[0].save.iteration),
        (
            f"{len(parts):,} of {_UNKNOWN if size is None else format(size, ',')}",
            f"{len(copies):,}",
            printable(next((p.session for p in parts if p.session is not None), _UNKNOWN)) or "-",
            bytes_text(sum(copy.nbytes for copy in copies)),
            parts[0].save.token,
        ),
        is_marked=any(part.is_damaged for part in parts),
    )


def _part_row(part: _ShownPart) -> Row:
    return Row(
        str(part.part_id),
        (
            str(part.part_id.global_rank),
            _UNKNOWN if part.world_size is None else str(part.world_size),
            ", ".join(str(copy.holder) for copy in part.copies),
            _UNKNOWN if part.kind is None else printable(part.kind),
            _UNKNOWN if part.num_tensors is None else f"{part.num_tensors:,}",
            bytes_text(part.nbytes),
        ),
        is_marked=part.is_damaged,
    )


def _world_size(parts: Sequence[_ShownPart]) -> int | None:
    return next((part.world_size for part in parts if part.world_size is not None), None)


def _print_summary(console: Console, survey: PartSurvey, parts: Sequence[_ShownPart]) -> None:
    print_fact(console, "directory", printable(str(survey.root)))
    files = f"{counted(len(survey.copies), 'file')}, {bytes_text(survey.nbytes)}"
    saves = counted(len(_by_save(parts)), "save")
    print_fact(console, "local", f"{saves}, {counted(len(parts), 'part')} in {files}")
    _print_leftovers(console, survey)
    verdict = "yes, by headers and sizes; `dist-ckpt verify` compares every tensor"
    if survey.findings:
        verdict = not_complete(survey.findings)
    print_fact(console, "whole", verdict)
    print_first(console, survey.findings)


def _print_leftovers(console: Console, survey: PartSurvey) -> None:
    for kind, text in _LEFTOVERS.items():
        some = [one for one in survey.leftovers if one.kind is kind]
        if some:
            size = bytes_text(sum(one.nbytes for one in some))
            print_fact(console, "left over", f"{text}: {len(some):,}, {size}")


def _summary_fields(survey: PartSurvey, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "tier": "local",
        "num_files": len(survey.copies),
        "nbytes": survey.nbytes,
        "leftovers": list(map(leftover_fields, survey.leftovers)),
        "findings": list(map(finding_fields, findings)),
    }


def _save_fields(parts: Sequence[_ShownPart]) -> dict[str, Any]:
    return {
        "iteration": parts[0].save.iteration,
        "token": parts[0].save.token,
        "world_size": _world_size(parts),
        "session": next((part.session for part in parts if part.session is not None), None),
        "owners": [part.part_id.global_rank for part in parts],
        "num_copies": sum(len(part.copies) for part in parts),
        "nbytes": sum(part.nbytes for part in parts),
    }


def _part_fields(part: _ShownPart) -> dict[str, Any]:
    return {
        "id": str(part.part_id),
        "iteration": part.save.iteration,
        "owner": part.part_id.global_rank,
        "world_size": part.world_size,
        "session": part.session,
        "kind": part.kind,
        "num_tensors": part.num_tensors,
        "copies": [
            {"path": copy.path, "holder": copy.holder, "nbytes": copy.nbytes,
             "readable": copy.part is not None}
            for copy in part.copies
        ],
    }  # fmt: skip
