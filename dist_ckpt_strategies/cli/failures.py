"""How a command fails: one line on stderr and status 1, a traceback only where asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dist_ckpt_strategies.cli.text import printable
from dist_ckpt_strategies.config import debug_from_environment
from dist_ckpt_strategies.errors import CheckpointError

STATUS_FAILED = 1
STATUS_INTERRUPTED = 130


@contextmanager
def reported_failures(*, debug: bool, status: int = STATUS_FAILED) -> Iterator[None]:
    """End the command with a status, 1 by default, and one line on stderr where the block fails.

    Args:
        status: of the command, where it fails.
        debug: let the exception through instead, as ``DIST_CKPT_DEBUG`` does.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(STATUS_INTERRUPTED) from error
    except BrokenPipeError:
        raise  # typer ends the command in silence: the reader of our output has gone
    except Exception as error:
        if debug or debug_from_environment():
            raise
        _say(error)
        raise typer.Exit(status) from error


def _say(error: Exception) -> None:
    text = printable(str(error))
    if not isinstance(error, CheckpointError):
        text = f"unexpected {type(error).__name__}: {text} (--debug shows where)"
    label = typer.style("error:", fg=typer.colors.RED, bold=True)
    typer.echo(f"{label} {text}", err=True)
