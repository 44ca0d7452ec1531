"""Common parts of the commands: help, exit status, failures and arguments."""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import cleandoc
from typing import Annotated, Any

import typer

from dist_ckpt_strategies.cli.ranks import CLI, needs_ranks, run_ranks
from dist_ckpt_strategies.cli.status import reported_failures, require_answers
from dist_ckpt_strategies.config import environment, update_environment


def epilog(example: str, status: str) -> str:
    """The end of a help text."""
    return f"Example: [bold]{example}[/]\n\n[bold]Exit status:[/] {status}"


def command(
    example: str, status: str, **options: Any
) -> Callable[[Callable[..., int | None]], Callable[[typer.Typer], None]]:
    """Make a command of a function: its docstring is the help, its result the exit status.

    None is the status 0. A failure becomes a status and one line on stderr, or with ``--debug`` a
    traceback. In place of the function is then one that adds the command to a parser.
    """

    def decorated(function: Callable[..., int | None]) -> Callable[[typer.Typer], None]:
        @wraps(function)
        def run(**arguments: Any) -> None:
            with reported_failures(debug=arguments["debug"]):
                nproc = arguments.get("nproc")
                if needs_ranks(nproc):
                    status: int | None = run_ranks(nproc, CLI, sys.argv[1:])
                else:
                    status = function(**arguments)
            raise typer.Exit(status or 0)

        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)

        def add_to(app: typer.Typer) -> None:
            app.command(help=text, epilog=epilog(example, status), **options)(run)

        return add_to

    return decorated


def prepare(*addresses: str) -> None:
    """Require that object stores answer, and let torch's libraries report errors alone."""
    if "TORCH_CPP_LOG_LEVEL" not in environment():
        update_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    require_answers(*addresses)


def argument(metavar: str, help: str) -> Any:  # noqa: A002 - as typer calls it
    """An argument that has no default."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def flag(*names: str, help: str) -> Any:  # noqa: A002
    """An option without a value, and without a placeholder for one."""
    return typer.Option(*names, metavar="", help=help)


def value(*names: str, metavar: str, help: str, **limits: Any) -> Any:  # noqa: A002
    """An option with a value that has no default."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, **limits)


Place = Annotated[
    str, argument("DIR", "Directory or URL of one checkpoint, or directory or file of local ones.")
]
Source = Annotated[str, argument("SRC", "Directory or URL of a checkpoint.")]
Target = Annotated[str, argument("DST", "New or empty directory, or a URL.")]
Json = Annotated[bool, flag("--json", help="Print one JSON object instead.")]
Debug = Annotated[
    bool, flag("--debug", help="Show a traceback on failure, as DIST_CKPT_DEBUG=1 does.")
]
Memory = Annotated[
    int | None,
    value(
        metavar="MIB",
        min=1,
        help="Bound on elements in memory at once, in MiB for each process (512, or "
        "DIST_CKPT_MAX_INFLIGHT_BYTES).",
    ),
]
Keys = Annotated[
    str | None, value(metavar="GLOB", help="Only arrays and objects whose keys match.")
]
Nproc = Annotated[
    int | None,
    value(
        "--nproc",
        "-n",
        metavar="N",
        min=1,
        help="Share the work among N processes of this node; under torchrun its ranks share it.",
    ),
]
