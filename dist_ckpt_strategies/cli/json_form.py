"""The JSON of the commands, described in docs/cli.md; a change of meaning raises SCHEMA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from dist_ckpt_strategies.storage.findings import Finding, Leftover
from dist_ckpt_strategies.storage.format1.stored_arrays import StoredArray
from dist_ckpt_strategies.storage.format1.survey import Survey
from dist_ckpt_strategies.storage.objects.stored import StoredObject

SCHEMA = 1


def print_json(command: str, root: Path | str, fields: Mapping[str, Any]) -> None:
    """Print one object: which command looked at what, and further fields."""
    head = {"schema": SCHEMA, "command": command, "path": str(root)}
    typer.echo(json.dumps(head | dict(fields), indent=2))


def summary_fields(survey: Survey) -> dict[str, Any]:
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


def leftover_fields(leftover: Leftover) -> dict[str, Any]:
    """Something that is no part of the checkpoint."""
    return asdict(leftover)


def finding_fields(finding: Finding) -> dict[str, Any]:
    """One thing that is wrong."""
    return asdict(finding)


def array_fields(stored: StoredArray) -> dict[str, Any]:
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


def object_fields(stored: StoredObject) -> dict[str, Any]:
    """One grid of objects."""
    return {
        "key": stored.key,
        "shape": stored.shape,
        "num_shards": stored.num_shards,
        "num_shards_expected": stored.num_expected,
        "file_nbytes": stored.file_nbytes,
    }
