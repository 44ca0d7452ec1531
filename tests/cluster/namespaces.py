"""A cluster on one machine: its nodes are namespaces on a switch, which is one too.

A node has a network address, host name, hosts file, process numbers, boot id, ``/dev/shm`` and a
local disk of its own; clocks and all other directories are those of the machine. It needs root.

Nodes live as long as a pipe of the process that made them is open: nothing is left when that
ends, even by SIGKILL, and nothing is changed outside of the namespaces. Not every kernel has netem,
so links lose packets (classic BPF that draws random numbers) or are slow (tbf), but do not delay.
"""

import itertools
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Self

from tests.support.processes import PYTHONPATH

ROOT = Path(__file__).parents[2]
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "bash")
_LIMIT_S = 60
_LOSE = "4,32 0 0 4294963256,53 0 1 {most},6 0 0 4294967295,6 0 0 2"
"""A packet is dropped (2) where a random number of 32 bits is less than ``most``."""

_INIT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=1g shm /dev/shm
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/$0.boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$1/$0.disk" "$1/disk"
hostname "$0"
ip link set lo up
echo up
exec 1>&2
while read -r; do :; done
"""
"""The first process of a node. It reaps orphans, and ends with the pipe that it reads."""


@cache
def why_not() -> str:
    """Why no cluster can be made here; empty if one can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a cluster needs the commands {', '.join(missing)}"
    command = ["bash", "-c", "unshare --net --pid --mount --fork ip link add type bridge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return f"a cluster needs root, and namespaces: {done.stderr.strip()}" if done.returncode else ""


class Node:
    """A node that is up.

    Attributes:
        disk: its local disk, by the path that all nodes have theirs under.
        boot_id: another one each time that it comes up.
        port: of the switch, that it is plugged into.
        enter: what a command that is to run on it begins with.
        processes: ``nsenter`` of each program, which ends as that does.
    """

    def __init__(self, name: str, address: str, port: str, directory: Path) -> None:
        self.name, self.address, self.port, self.disk = name, address, port, directory / "disk"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.boot_id = str(uuid.uuid4())
        (directory / f"{name}.boot_id").write_text(f"{self.boot_id}\n")
        spaces = ("--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child")
        init = ["unshare", *spaces, "bash", "-c", _INIT, name, str(directory)]
        self._owner = subprocess.Popen(init, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._owner.stdout is not None
        assert self._owner.stdout.readline() == b"up\n", f"node {name} did not start"
        owner = self._owner.pid
        self.pid = int(Path(f"/proc/{owner}/task/{owner}/children").read_text())
        self.enter = ["nsenter", "--target", str(self.pid), "--all"]

    def start(
        self, *command: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program; its variables are those of this process and the given ones."""
        variables = {
            **os.environ,
            "HOSTNAME": self.name,
            "PYTHONPATH": PYTHONPATH,
            "RES_OPTIONS": "attempts:0",  # see tests/conftest.py
            **(environment or {}),
        }
        enter = [*self.enter, "bash", "-c", 'cd "$0" && exec "$@"', str(self.disk), *command]
        with log.open("ab") as out:
            process = subprocess.Popen(
                enter, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.processes.append(process)
        return process

    def kill(self, number: int, pids: int | str) -> None:
        """Send a signal to what has these process numbers on the node; -1: to everything."""
        _run(*self.enter, "bash", "-c", f"kill -{int(number)} {pids}")

    def is_running(self, pid: int) -> bool:
        return Path(f"/proc/{self.pid}/root/proc/{pid}").exists()

    def end(self) -> None:
        """SIGKILL everything that runs, at once."""
        self._owner.kill()
        self._owner.wait()
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.wait()
        for pipe in (self._owner.stdin, self._owner.stdout):
            assert pipe is not None
            pipe.close()


class Cluster:
    """Nodes on a switch. Leaving the block takes all of them down.

    Args:
        directory: an empty one. Nodes share it, but for its ``disk``.
        names: of the nodes; they are down at first.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self.nodes: dict[str, Node] = {}
        self._numbers = itertools.count()
        (directory / "disk").mkdir()
        lines = [f"{address} {name}\n" for name, address in self._addresses.items()]
        (directory / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        wait = ["unshare", "--net", "cat"]
        self._switch = subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._enter = ["nsenter", "--target", str(self._switch.pid), "--net"]

    def __enter__(self) -> Self:
        """The cluster; its bridges, one for each part that a partition could have, are up."""
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._switch.pid}/ns/net").readlink() == own:
            assert self._switch.poll() is None, "unshare has failed"
        for number in range(len(self._addresses)):
            self._ip(f"link add br{number} type bridge", f"link set br{number} up")
        return self

    def __exit__(self, *_error: object) -> None:
        for name in list(self.nodes):
            self.kill(name)
        self._switch.communicate(timeout=_LIMIT_S)

    def up(self, name: str, *, keeps_disk: bool = True) -> Node:
        """Start a node that is down, on its old disk or on an empty one."""
        disk = self.directory / f"{name}.disk"
        if not keeps_disk:
            shutil.rmtree(disk)
        disk.mkdir(exist_ok=True)
        # The kernel takes its time to remove the port that a dead node had.
        port = f"port{next(self._numbers)}"
        node = self.nodes[name] = Node(name, self._addresses[name], port, self.directory)
        # The same hardware address each time: the others know it by that.
        hardware = f"02:00:00:00:00:{int(node.address.rpartition('.')[2]):02x}"
        self._ip(
            f"link add {node.port} type veth peer name eth0 address {hardware} netns {node.pid}",
            f"link set {node.port} master br0 up",
        )
        commands = f"addr add {node.address}/24 dev eth0\nlink set eth0 up\n"
        _run(*node.enter, "ip", "-batch", "-", content=commands)
        return node

    def kill(self, name: str) -> None:
        """SIGKILL all processes of a node; the kernel closes their connections, and says so."""
        self.nodes.pop(name).end()

    def crash(self, name: str) -> None:
        """Let a node lose its power: nothing is heard of it any more."""
        self.unplug(name)
        self.kill(name)

    def unplug(self, name: str) -> None:
        """Drop all that a node sends and is sent."""
        self._ip(f"link set {self.nodes[name].port} nomaster")

    def freeze(self, name: str) -> None:
        self.nodes[name].kill(signal.SIGSTOP, -1)

    def thaw(self, name: str) -> None:
        self.nodes[name].kill(signal.SIGCONT, -1)
        for process in self.nodes[name].processes:  # nsenter stops itself where its child is
            process.send_signal(signal.SIGCONT)

    def replug(self, name: str) -> None:
        self._ip(f"link set {self.nodes[name].port} master br0")

    def partition(self, *groups: Sequence[str]) -> None:
        """Let nodes reach those of their group only; one group of all nodes ends that."""
        for number, group in enumerate(groups):
            ports = [self.nodes[name].port for name in group]
            self._ip(*(f"link set {port} master br{number}" for port in ports))

    def separate(self, first: str, second: str) -> None:
        """Let two nodes reach all but each other."""
        for name, other in ((first, second), (second, first)):
            address = self._addresses[other]
            _run(*self.nodes[name].enter, "ip", "route", "add", "unreachable", address)

    def lossy(self, name: str, share: float) -> None:
        """Lose a share of what a node sends, and of what it is sent."""
        lose = ["bpf", "da", "bytecode", _LOSE.format(most=int(share * (2**32 - 1)))]
        port = self.nodes[name].port
        self._tc("qdisc", "add", "dev", port, "clsact")
        for direction in ("ingress", "egress"):
            self._tc("filter", "add", "dev", port, direction, *lose)

    def slow(self, name: str, rate: str) -> None:
        """Limit what a node is sent to a rate, in tc's words: 1mbit."""
        shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
        self._tc("qdisc", "add", "dev", self.nodes[name].port, "root", *shape)

    def mend(self, name: str) -> None:
        port = self.nodes[name].port
        found = _run(*self._enter, "tc", "qdisc", "show", "dev", port)
        for kind, place in (("clsact", "clsact"), ("tbf", "root")):
            if f"qdisc {kind} " in found:
                self._tc("qdisc", "del", "dev", port, place)

    def _ip(self, *commands: str) -> None:
        content = "".join(f"{command}\n" for command in commands)
        _run(*self._enter, "ip", "-batch", "-", content=content)

    def _tc(self, *arguments: str) -> None:
        _run(*self._enter, "tc", *arguments)


def _run(*command: str, content: str = "") -> str:
    done = subprocess.run(
        command, input=content, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{command}: {content}{done.stdout}{done.stderr}"
    return done.stdout
