"""The end of a command: its exit status, and one line on stderr if it fails.

An object store that is out of reach fails a command before it begins.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import typer

from dist_ckpt_strategies.cli.render import printable
from dist_ckpt_strategies.config import (
    debug_from_environment,
    rank_from_environment,
    store_options_from_environment,
)
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    CoverageError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    RestartError,
    StrategyError,
)
from dist_ckpt_strategies.formats.issues import Issue, Problem

_DAMAGE = (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    CoverageError,
    RestartError,  # a job of `run` that gave up
)
_USAGE = (PlanError, StrategyError, CheckpointExistsError, ArrayNotFoundError)
_NOT_LOOKED_AT = {Problem.UNREADABLE, Problem.UNKNOWN_BACKEND}

_FIRST_ANSWER_S = 11.0
"""With the try that says why there was no answer, and the start of Python, 15 s in all."""


class Status(IntEnum):
    """Exit status of every command; docs/cli.md has the table."""

    FINE = 0
    DAMAGED = 1
    USAGE = 2
    FAILED = 3
    INTERRUPTED = 130
    NO_READER = 141


def status_of_issues(issues: Sequence[Issue]) -> Status:
    """The exit status for what a command found in a checkpoint."""
    if not issues:
        return Status.FINE
    is_looked_at = any(issue.problem not in _NOT_LOOKED_AT for issue in issues)
    return Status.DAMAGED if is_looked_at else Status.FAILED


@contextmanager
def reported_failures(*, debug: bool) -> Iterator[None]:
    """End the command with a status, and one line or a traceback on stderr, if the block fails."""
    try:
        yield
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        if rank_from_environment()[0] == 0:
            typer.echo("interrupted", err=True)
        raise typer.Exit(Status.INTERRUPTED) from error
    except (BrokenPipeError, SystemExit) as error:
        cause = error if isinstance(error, BrokenPipeError) else error.__context__  # rich's end
        if not isinstance(cause, BrokenPipeError):
            raise
        # The reader of our output has gone: no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(Status.NO_READER) from error
    except Exception as error:
        if not _is_reported_by_first_rank(error):
            _report(error, debug=debug)
        raise typer.Exit(_status_of(error)) from error


def _report(error: Exception, *, debug: bool) -> None:
    if debug or debug_from_environment():
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        return
    text = printable(str(error))
    if not isinstance(error, CheckpointError | OSError):
        text = f"unexpected {type(error).__name__}: {text} (--debug shows where)"
    label = typer.style("error:", fg=typer.colors.RED, bold=True)
    typer.echo(f"{label} {text}", err=True)


def _status_of(error: Exception) -> Status:
    if isinstance(error, IncompatibleVersionError):
        return Status.FAILED
    if isinstance(error, _DAMAGE):
        return Status.DAMAGED
    return Status.USAGE if isinstance(error, _USAGE) else Status.FAILED


def _is_reported_by_first_rank(error: Exception) -> bool:
    """Whether this is another rank of torchrun than the first, which has the same error."""
    if rank_from_environment()[0] == 0 or not isinstance(error, CheckpointError):
        return False
    is_first_lost = isinstance(error, PeerLostError | PeerTimeoutError) and error.rank in {0, None}
    return error.global_rank is not None and not is_first_lost


def require_answers(*addresses: str) -> None:
    """Ask each object store for a short list, so that one out of reach fails the command soon.

    ``DIST_CKPT_STORE_TIMEOUT_S`` sets another limit. TensorStore's libraries write to stderr which
    files with credentials they miss; the error says what matters of it.
    """
    for address in addresses:
        from dist_ckpt_strategies.formats.locations import located  # noqa: PLC0415

        options = store_options_from_environment(timeout_s=_FIRST_ANSWER_S)
        place = located(address, options)
        if not isinstance(place, Path):
            with _no_library_logs():
                place.require_bucket()


@contextmanager
def _no_library_logs() -> Iterator[None]:
    """Discard the output of libraries to stderr within the block."""
    if sys.stderr is None or debug_from_environment():  # closed from the start
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - as os.dup2
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
