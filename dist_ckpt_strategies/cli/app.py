"""The ``dist-ckpt`` command: its arguments, its help and its exit status.

What a command needs is imported when it runs, so that help appears at once and ``inspect`` and
``verify`` never load torch.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.failures import reported_failures

_STATUS = "[bold]Exit status:[/] 0 fine, 1 damage found or failed, 2 wrong usage."
_INSPECT = """List the arrays and objects of a checkpoint, and say whether it is complete. \
Of a directory of local checkpoints, the iterations and parts.

Reads names, sizes and metadata only. Ends with status 0 where the checkpoint could be shown, \
complete or not."""
_VERIFY = """Check that a checkpoint is whole, and list what is not.

Looks for every chunk file, of the right size, every shard of every object, common.pt and \
metadata.json, and compares objects and common.pt with their own checksums. Format 1 keeps no \
checksums of arrays: a byte that has changed inside a chunk does not show. Of local checkpoints \
every tensor is compared with its digest."""
_DEMO = """Train a small GPT on four CPU ranks, save it as Zarr, resume it in other layouts.

Shows that weights and optimizer state come back bit for bit, and that the loss goes on from \
where it was. Takes a few minutes on two cores."""
_FLAG = ""
"""No placeholder for a value after the name of a flag."""

app = typer.Typer(
    name="dist-ckpt",
    help="Look at, check and try out Zarr checkpoints of Megatron-Core.",
    epilog=f"Example: [bold]dist-ckpt inspect /checkpoints/iter_0000100[/]\n\n{_STATUS}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Directory of one checkpoint, or of local ones.", show_default=False
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", metavar=_FLAG, help="Print one JSON object instead.")
]
_Debug = Annotated[
    bool,
    typer.Option(
        "--debug", metavar=_FLAG, help="Show a traceback on failure, as DIST_CKPT_DEBUG=1 does."
    ),
]


def main() -> None:
    """Run the command line and exit with its status: the console script ``dist-ckpt``."""
    app(prog_name="dist-ckpt")


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it
    if asked:
        parts = [f"{name} {_version(name)}" for name in ("megatron-core", "torch", "tensorstore")]
        parts.append(f"Python {platform.python_version()}")
        typer.echo(f"dist-ckpt {dist_ckpt_strategies.__version__} ({', '.join(parts)})")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            metavar=_FLAG,
            help="Show the versions.",
        ),
    ] = False,
) -> None:
    pass


@app.command(
    help=_INSPECT, epilog=f"Example: [bold]dist-ckpt inspect DIR --keys 'decoder.*'[/]\n\n{_STATUS}"
)
def inspect(
    directory: _Directory,
    *,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Show only keys, or parts, that match; * stands for any characters, / and . too.",
            show_default=False,
        ),
    ] = None,
    objects: Annotated[
        bool, typer.Option(metavar=_FLAG, help="Show the objects below the arrays.")
    ] = True,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Show what a checkpoint holds."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.inspection import inspect_checkpoint  # noqa: PLC0415

        inspect_checkpoint(directory, keys, with_objects=objects, as_json=as_json)


@app.command(
    help=_VERIFY,
    epilog=f"Example: [bold]dist-ckpt verify DIR && rsync -a DIR backup:[/]\n\n{_STATUS}",
)
def verify(directory: _Directory, *, as_json: _Json = False, debug: _Debug = False) -> None:
    """Check a checkpoint."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.verification import verify_checkpoint  # noqa: PLC0415

        status = verify_checkpoint(directory, as_json=as_json)
    raise typer.Exit(status)


@app.command(
    help=_DEMO, epilog=f"Example: [bold]dist-ckpt demo --keep /tmp/demo-checkpoint[/]\n\n{_STATUS}"
)
def demo(
    *,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Leave the checkpoint in this directory, which must be new or empty.",
            show_default=False,
        ),
    ] = None,
    debug: _Debug = False,
) -> None:
    """Run the demonstration."""
    with reported_failures(debug=debug):
        from rich.console import Console  # noqa: PLC0415

        from dist_ckpt_strategies.cli.demo.main import run_demo  # noqa: PLC0415

        status = run_demo(keep, Console())
    raise typer.Exit(status)
