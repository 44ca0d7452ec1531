"""The JSON of the commands, described in docs/cli.md; a change of meaning raises SCHEMA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from dist_ckpt_strategies.storage.findings import Finding, Leftover

SCHEMA = 1


def print_json(command: str, root: Path | str, fields: Mapping[str, Any]) -> None:
    """Print one object: which command looked at what, and further fields."""
    head = {"schema": SCHEMA, "command": command, "path": str(root)}
    typer.echo(json.dumps(head | dict(fields), indent=2))


def leftover_fields(leftover: Leftover) -> dict[str, Any]:
    """Something that is no part of the checkpoint."""
    return asdict(leftover)


def finding_fields(finding: Finding) -> dict[str, Any]:
    """One thing that is wrong."""
    return asdict(finding)
