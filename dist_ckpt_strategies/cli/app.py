"""The ``dist-ckpt`` command: its arguments, its help and its exit status.

What a command needs is imported when it runs, so that help appears at once and ``inspect`` and
``verify`` never load torch.
"""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

import dist_ckpt_strategies
from dist_ckpt_strategies.cli import help_texts
from dist_ckpt_strategies.cli.failures import reported_failures

_FLAG = ""
"""No placeholder for a value after the name of a flag."""

app = typer.Typer(
    name="dist-ckpt",
    help=help_texts.APP,
    epilog=help_texts.ending("dist-ckpt inspect /checkpoints/iter_0000100"),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Directory or URL of one checkpoint, or directory of local ones.",
        show_default=False,
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
_Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Directory or URL of a checkpoint.", show_default=False),
]
_Target = Annotated[
    str,
    typer.Argument(metavar="DST", help="New or empty directory, or a URL.", show_default=False),
]
_Memory = Annotated[
    int,
    typer.Option(
        "--memory", metavar="MIB", min=1, help="Bound on elements in memory at once, in MiB."
    ),
]


def main() -> None:
    """Run the command line and exit with its status: the console script ``dist-ckpt``."""
    # Without Transformer Engine, which no command needs, Megatron-Core's import warns of it.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
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
    help=help_texts.INSPECT,
    epilog=help_texts.ending("dist-ckpt inspect DIR --keys 'decoder.*'"),
)
def inspect(
    directory: _Place,
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
    help=help_texts.VERIFY,
    epilog=help_texts.ending("dist-ckpt verify DIR && rsync -a DIR backup:"),
)
def verify(directory: _Place, *, as_json: _Json = False, debug: _Debug = False) -> None:
    """Check a checkpoint."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.verification import verify_checkpoint  # noqa: PLC0415

        status = verify_checkpoint(directory, as_json=as_json)
    raise typer.Exit(status)


@app.command(
    help=help_texts.PRUNE,
    epilog=help_texts.ending("dist-ckpt prune ROOT --keep-last 3 --unfinished"),
)
def prune(  # noqa: PLR0913 - one parameter for each option
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="Directory or URL that holds the checkpoints.", show_default=False
        ),
    ],
    *,
    keep_last: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Keep the N newest complete ones.", show_default=False
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Keep those of every N-th iteration.", show_default=False
        ),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", metavar=_FLAG, help="Remove what killed saves have left."),
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Unfinished ones that changed since stay: they may still be written.",
        ),
    ] = "1h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=_FLAG, help="Only show what would go.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", metavar=_FLAG, help="Do not ask.")] = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Remove old checkpoints."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.pruning import (  # noqa: PLC0415
            parse_duration_s,
            prune_checkpoints,
        )
        from dist_ckpt_strategies.plan.prune import Keeping  # noqa: PLC0415

        keeping = Keeping(keep_last, keep_every, unfinished, parse_duration_s(older_than))
        status = prune_checkpoints(root, keeping, dry_run=dry_run, is_agreed=yes, as_json=as_json)
    raise typer.Exit(status)


@app.command(
    help=help_texts.DEMO,
    epilog=help_texts.ending("dist-ckpt demo --keep /tmp/demo-checkpoint"),
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
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            metavar=_FLAG,
            help="Break ranks at every point of a step instead, and show that nothing is lost.",
        ),
    ] = False,
    debug: _Debug = False,
) -> None:
    """Run the demonstration."""
    if chaos and keep is not None:
        raise typer.BadParameter("--keep belongs to the demonstration without --chaos")
    with reported_failures(debug=debug):
        from rich.console import Console  # noqa: PLC0415

        if chaos:
            from dist_ckpt_strategies.cli.chaos.demo import run_chaos_demo  # noqa: PLC0415

            status = run_chaos_demo(Console())
        else:
            from dist_ckpt_strategies.cli.demo.main import run_demo  # noqa: PLC0415

            status = run_demo(keep, Console())
    raise typer.Exit(status)


@app.command(
    help=help_texts.CONVERT,
    epilog=help_texts.ending("dist-ckpt convert SRC DST --to zarr@2"),
)
def convert(  # noqa: PLR0913
    source: _Source,
    target: _Target,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="zarr@2, zarr@1, torch_dist or safetensors.",
            show_default=False,
        ),
    ],
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB", help="For safetensors: only keys that match.", show_default=False
        ),
    ] = None,
    max_file: Annotated[
        int | None,
        typer.Option(
            "--max-file",
            metavar="MB",
            min=1,
            help="Size of a file of safetensors (5000) or torch_dist (537), in MB.",
            show_default=False,
        ),
    ] = None,
    memory: _Memory = 256,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Convert a checkpoint."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.conversion import convert_checkpoint  # noqa: PLC0415

        convert_checkpoint(
            source, target, to, keys=keys, memory=memory, max_file=max_file, as_json=as_json
        )


@app.command(
    help=help_texts.UPGRADE,
    epilog=help_texts.ending("dist-ckpt upgrade SRC DST --to zarr@2"),
)
def upgrade(
    source: _Source,
    target: _Target,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="zarr@2, zarr@1 or torch_dist; by default the format of SRC.",
            show_default=False,
        ),
    ] = None,
    memory: _Memory = 256,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Upgrade a checkpoint."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.conversion import upgrade_checkpoint  # noqa: PLC0415

        upgrade_checkpoint(source, target, to, memory=memory, as_json=as_json)


@app.command(
    help=help_texts.DIFF,
    epilog=help_texts.ending("dist-ckpt diff A B && rm -r A", help_texts.DIFF_STATUS),
)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Compare only arrays whose keys match, and no objects.",
            show_default=False,
        ),
    ] = None,
    memory: _Memory = 256,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Compare two checkpoints."""
    with reported_failures(debug=debug, status=2):
        from dist_ckpt_strategies.cli.difference import diff_checkpoints  # noqa: PLC0415

        status = diff_checkpoints(a, b, keys, memory=memory, as_json=as_json)
    raise typer.Exit(status)


@app.command(
    help=help_texts.BENCH,
    epilog=help_texts.ending("dist-ckpt bench /checkpoints --size 2"),
)
def bench(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="A directory on the file system to measure.", show_default=False
        ),
    ] = None,
    *,
    size: Annotated[
        float, typer.Option(metavar="GB", min=0.001, help="Of the state, all ranks together.")
    ] = 0.25,
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Processes on this node.")] = 2,
    repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rounds that count; one more comes first.")
    ] = 3,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Measure a file system."""
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.bench.main import (  # noqa: PLC0415
            GB,
            BenchOptions,
            bench_directory,
        )

        options = BenchOptions(directory, round(size * GB), ranks, repetitions)
        bench_directory(options, as_json=as_json)


@app.command(
    help=help_texts.RUN,
    epilog=help_texts.ending("dist-ckpt run --nproc 4 --spares 1 train.py", help_texts.RUN_STATUS),
    context_settings={"allow_interspersed_args": False},
)
def run(  # noqa: PLR0913
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets.")
    ] = None,
    *,
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", metavar="N", min=1, help="Ranks.", show_default=False)
    ],
    spares: Annotated[
        int, typer.Option(metavar="S", min=0, help="Processes that wait to take over a rank.")
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(metavar="R", min=0, help="Workers that may be replaced, all in all.")
    ] = 16,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Silence that makes a worker a hung one; 0: none does."
        ),
    ] = 30.0,
    is_module: Annotated[
        bool, typer.Option("--module", "-m", metavar=_FLAG, help="SCRIPT names a module.")
    ] = False,
    debug: _Debug = False,
) -> None:
    """Run a script on several ranks."""
    if not is_module and not Path(script).is_file():
        raise typer.BadParameter(f"{script} is no file", param_hint="SCRIPT")
    with reported_failures(debug=debug):
        from dist_ckpt_strategies.cli.running import run_script  # noqa: PLC0415
        from dist_ckpt_strategies.inprocess.supervisor import (  # noqa: PLC0415
            Job,
            script_command,
        )

        command = script_command(script, args or (), is_module=is_module)
        status = run_script(Job(command, nproc, spares, max_restarts, heartbeat_timeout))
    raise typer.Exit(status)
