"""``dist-ckpt run`` as a command, for scripts of a few lines."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import HOST, free_port
from tests.support.processes import is_running, until

LIMIT_S = 500
RUN = (sys.executable, "-m", "dist_ckpt_strategies.cli", "run")
Agent = subprocess.Popen[str]

VARIABLES = {
    "RES_OPTIONS": "attempts:0",  # see tests/conftest.py
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ.get("RANK")
Path(f"{'spare' if rank is None else 'rank' + rank}.{os.getpid()}").touch()
def is_first(what):
    mark = Path(f"{what} of {rank}")
    found = mark.exists()
    mark.touch()
    return not found
def wait_for(name, limit_s=120):
    end = time.monotonic() + limit_s
    while not Path(name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
"""
"""The beginning of every script; what waits for a rank notes itself under it later."""


class Agents:
    """Agents on this machine, of one script in one directory; their output goes to files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.endpoint = f"{HOST}:{free_port()}"
        self.started: list[Agent] = []

    def start(
        self,
        body: str,
        *options: str,
        args: tuple[str, ...] = (),
        has_pipe: bool = False,
        launcher: str = 'exec "$@"',
    ) -> Agent:
        """Start one, by a shell's line that runs its arguments; with a pipe it writes to that."""
        script = self.directory / "script.py"
        script.write_text(PRELUDE + body)
        tail = [] if "--store-only" in options else [str(script), *args]
        with (self.directory / f"{len(self.started)}.out").open("w") as out:
            agent = subprocess.Popen(
                ["/bin/sh", "-c", launcher, "sh", *RUN, *options, *tail],
                cwd=self.directory,
                env=os.environ | VARIABLES,
                stdout=subprocess.PIPE if has_pipe else out,
                stderr=subprocess.PIPE if has_pipe else subprocess.STDOUT,
                text=True,
            )
        self.started.append(agent)
        return agent

    def start_node(self, body: str, *options: str) -> Agent:
        """Start the agent of a node with one rank; returns once there is a store."""
        agent = self.join(body, *options)
        until(lambda: self._has_store() or agent.poll() is not None)
        return agent

    def join(self, body: str, *options: str) -> Agent:
        """Like ``start_node``; returns at once."""
        job = ("--nproc_per_node", "1", "--rdzv-endpoint", self.endpoint)
        return self.start(body, *job, "--node-ttl", "8", *options)

    def _has_store(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, int(self.endpoint.rpartition(":")[2]))) == 0

    def run(self, body: str, *options: str, args: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit code and output; the workers are gone."""
        agent = self.start(body, *options, args=args)
        code = self.code(agent)
        self.require_ended()
        return code, self.output(agent)

    def code(self, agent: Agent) -> int:
        try:
            return agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail("\n".join(map(self.output, self.started)))

    def output(self, agent: Agent) -> str:
        return (self.directory / f"{self.started.index(agent)}.out").read_text()

    def pids(self, name: str = "*") -> list[int]:
        """Of all processes that have noted themselves under a name."""
        return [int(path.suffix[1:]) for path in self.directory.glob(f"{name}.[0-9]*")]

    def worker(self, name: str) -> int:
        """The first process that has noted itself under a name, once one has."""
        return until(lambda: self.pids(name))[0]

    def go(self) -> None:
        (self.directory / "go").touch()

    def require_ended(self) -> None:
        """A moment after they were killed."""
        until(lambda: not any(map(is_running, self.pids())))
