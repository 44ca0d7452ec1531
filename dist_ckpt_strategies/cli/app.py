"""The ``dist-ckpt`` command.

``command.py`` has what its sub-commands share. Their arguments and help are in ``commands/``; what
they need is imported when they run, so that help appears at once and ``inspect`` and ``verify``
never load torch.
"""

import platform
import warnings
from importlib.metadata import version
from typing import Annotated

import typer

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.command import epilog
from dist_ckpt_strategies.cli.commands import convert, inspect, prune, run, trials

app = typer.Typer(
    name="dist-ckpt",
    help="Inspect, verify, convert, compare and prune checkpoints of Megatron-Core, and run "
    "training that survives failing ranks.",
    epilog=epilog(
        "dist-ckpt inspect /checkpoints/iter_0000100",
        "0 fine, 1 damaged, incomplete or different, 2 wrong usage, 3 could not read or write.",
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit with its status: the console script ``dist-ckpt``."""
    # Without Transformer Engine, which no command needs, Megatron-Core's import warns of it.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    app(prog_name="dist-ckpt")


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it
    if asked:
        versions = [f"{name} {version(name)}" for name in ("megatron-core", "torch", "tensorstore")]
        versions.append(f"Python {platform.python_version()}")
        typer.echo(f"dist-ckpt {dist_ckpt_strategies.__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            metavar="",
            help="Show the versions.",
        ),
    ] = False,
) -> None:
    pass


for _add_to in (
    *(inspect.inspect, inspect.verify, inspect.rebuild_index, prune.prune, trials.demo),
    *(convert.convert, convert.copy, convert.upgrade, convert.diff, trials.bench, run.run),
):
    _add_to(app)
