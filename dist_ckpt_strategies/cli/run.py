"""``dist-ckpt run``: workers' lines on the terminal, each led by the rank that wrote it.

A reader that has gone ends the job, as any command. A line that cannot be written for another
reason, such as a full disk or a closed stream, is lost: no training ends for its log.
"""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO

from dist_ckpt_strategies.cli.render import printable
from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.inprocess.supervisor import Job, Supervisor


def _write_line(who: str, stream: str, line: bytes) -> None:
    _write(sys.stdout if stream == "stdout" else sys.stderr, f"[{who}] ".encode() + line)


def _write_note(text: str) -> None:
    _write(sys.stderr, f"dist-ckpt: {printable(text)}\n".encode(errors="replace"))


def _write(target: TextIO | None, line: bytes) -> None:
    """All of it at once, without Python's buffer, which would try again what has failed."""
    rest = memoryview(line)
    while rest and target is not None:
        try:
            rest = rest[os.write(target.fileno(), rest) :]
        except BrokenPipeError:
            raise
        except BlockingIOError:  # others have made it non-blocking
            select.select([], [target.fileno()], [])
        except OSError:
            return  # see above


def run_script(job: Job) -> int:
    """Run a job in the foreground; its exit code."""
    return Supervisor(job, environment(), _write_line, _write_note).run()
