"""``dist-ckpt run``: workers' lines on the terminal, each behind the rank that wrote it."""

from __future__ import annotations

import sys

import typer

from dist_ckpt_strategies.cli.text import printable
from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.inprocess.supervisor import Job, Supervisor


class TerminalListener:
    """Writes what workers write to the same stream of this process, line by line."""

    def line(self, who: str, stream: str, line: bytes) -> None:
        """See Listener."""
        target = (sys.stdout if stream == "stdout" else sys.stderr).buffer
        target.write(f"[{who}] ".encode() + line)
        target.flush()

    def note(self, text: str) -> None:
        """See Listener."""
        typer.echo(f"dist-ckpt: {printable(text)}", err=True)


def run_script(job: Job) -> int:
    """Run a job in the foreground; its exit code."""
    return Supervisor(job, environment(), TerminalListener()).run()
