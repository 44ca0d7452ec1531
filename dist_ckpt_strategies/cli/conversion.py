"""``dist-ckpt convert`` and ``dist-ckpt upgrade``."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.json_form import SCHEMA
from dist_ckpt_strategies.cli.locations import place_text
from dist_ckpt_strategies.cli.progress import open_byte_progress, watched
from dist_ckpt_strategies.cli.text import bytes_text, counted, printable
from dist_ckpt_strategies.config import MIB
from dist_ckpt_strategies.run.convert import ConvertReport
from dist_ckpt_strategies.strategies.convert import ConvertOptions, convert, upgrade

_MB = 1_000_000


def convert_checkpoint(  # noqa: PLR0913
    source: str,
    target: str,
    to: str,
    *,
    keys: str | None,
    memory: int,
    max_file: int | None,
    as_json: bool,
) -> None:
    """Convert a checkpoint, and say what was done.

    Args:
        source: directory or URL of the checkpoint.
        target: a new or empty directory, or a URL.
        to: the format.
        keys: a glob, for safetensors.
        memory: bound on elements in memory, in MiB.
        max_file: size of files that hold several arrays, in MB.
        as_json: print one JSON object.
    """
    options = ConvertOptions(memory * MIB, None if max_file is None else max_file * _MB)
    with open_byte_progress() as progress:
        watch = watched(progress, "converting")
        report = convert(source, target, to, keys=keys, options=options, watch=watch)
    _show("convert", source, target, report, as_json=as_json)


def upgrade_checkpoint(
    source: str, target: str, to: str | None, *, memory: int, as_json: bool
) -> None:
    """Upgrade a checkpoint, and say what was done; see convert_checkpoint."""
    options = ConvertOptions(memory * MIB)
    with open_byte_progress() as progress:
        watch = watched(progress, "upgrading")
        report = upgrade(source, target, to, options=options, watch=watch)
    _show("upgrade", source, target, report, as_json=as_json)


def _show(command: str, source: str, target: str, report: ConvertReport, *, as_json: bool) -> None:
    if as_json:
        head = {"schema": SCHEMA, "command": command}
        paths = {"source": place_text(source), "target": place_text(target)}
        typer.echo(json.dumps(head | paths | asdict(report), indent=2))
        return
    console = Console(highlight=False)
    arrays = f"{counted(report.num_arrays, 'array')} with {bytes_text(report.nbytes)}"
    objects = counted(report.num_objects, "object shard")
    resumed = (
        f"; {bytes_text(report.resumed_nbytes)} of it by an earlier run"
        if report.resumed_nbytes
        else ""
    )
    text = f"{arrays}, {objects}; {report.seconds:.1f} s{resumed}"
    console.print(Text(printable(target), "bold green"), soft_wrap=True)
    console.print(Text(text, "dim"), soft_wrap=True)
