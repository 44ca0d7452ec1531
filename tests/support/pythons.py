"""Scripts in processes of their own, forked from one Python that has imported Megatron-Core.

Megatron-Core takes seven seconds to import. Of this package the Python has imported nothing, so
that a script finds only what it imports itself.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).resolve().parents[2]
_SERVE = "from tests.support.pythons import serve; serve()"


class Python:
    """Runs one script after the other."""

    def __init__(self, process: subprocess.Popen[str], requests: IO[str], answers: IO[str]) -> None:
        self._process = process
        self._requests = requests
        self._answers = answers

    def run(
        self, script: Path, *args: str, timeout_s: float = 250.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in the directory where it is; what it printed, and its exit status."""
        request = {"script": str(script), "args": args}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        if not select.select([self._answers], [], [], timeout_s)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise TimeoutError(f"{script} not done in {timeout_s:g} s")
        status = int(self._answers.readline())
        out, err = (path.read_text(encoding="utf-8") for path in _outputs(script))
        return subprocess.CompletedProcess([str(script), *args], status, out, err)


@contextmanager
def started_python() -> Iterator[Python]:
    """The Python that scripts are forked from; it ends on leaving."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVE]
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Python(process, process.stdin, process.stdout)


def serve() -> None:
    """Fork for each request; the status of each process, a line, is the answer."""
    import megatron.core.dist_checkpointing  # noqa: F401, PLC0415
    import tensorstore  # noqa: F401, PLC0415
    import torch.distributed  # noqa: F401, PLC0415

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # Leaves as a script does: by the end of the interpreter, or with a traceback.
            _carry_out(json.loads(line))
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _carry_out(request: Mapping[str, list[str]]) -> None:
    script = Path(str(request["script"]))
    os.chdir(script.parent)
    for stream, path in enumerate(_outputs(script), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [str(script), *request["args"]]
    sys.path[:1] = [str(script.parent), str(_ROOT)]
    runpy.run_path(str(script), run_name="__main__")


def _outputs(script: Path) -> tuple[Path, Path]:
    return script.with_suffix(".out"), script.with_suffix(".err")
