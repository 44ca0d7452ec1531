"""A job on a cluster: its agents, what its ranks have noted, and what must be true of that."""

import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from dist_ckpt_strategies.formats.scan import scan, verify
from tests.cluster.namespaces import ROOT, Cluster
from tests.support.processes import until
from tests.support.ranks import done_by
from tests.support.sharded_training import undisturbed

T = TypeVar("T")
SEED = 11
STORE = "store"
"""The node without ranks, where the job's store is."""

PORT = 29400
FENCED = 88
TTL_S = 4.0
LIMIT_S = 240.0
"""Against a hang: the machine of the tests may be busy with others."""

_AGAIN = f"""
trap : TERM
while :; do
  bash -c 'echo $PPID $$ > "$0"; exec "$@"' "$CLUSTER_SHARED/agents/$HOSTNAME" "$@"
  code=$?
  echo "exit code $code"
  [ $code = {FENCED} ] || exit $code
done
"""
"""What a scheduler does: an agent that is out of the job is started again, as a spare."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a job."""

    num_nodes: int = 2
    num_ranks: int = 2  # of each node
    num_spares: int = 1  # processes of each node
    num_spare_nodes: int = 1
    num_shards: int = 2  # of the state; ranks a multiple of it apart hold the same
    save_every: int = 0  # steps from a local checkpoint to the next; 0: none are made
    wait_s: float = 60.0  # for a node
    max_idle_attempts: int = 0  # 0: unlimited

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_ranks


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank has done."""

    at: float  # time by the clock of the machine
    rank: int
    process: tuple[str, str, int]  # node, boot id and process number of who did it
    what: str  # "step", "save", or what the state came from: "begin", "memory", "disk"
    step: int
    digest: str

    @property
    def node(self) -> str:
        return self.process[0]


class Job:
    def __init__(self, cluster: Cluster, shape: Shape) -> None:
        self.cluster, self.shape = cluster, shape
        self.shared = cluster.directory / "shared"
        for name in ("notes", "ready", "agents", "logs"):
            (self.shared / name).mkdir(parents=True)
        self.agents: dict[str, Popen[bytes]] = {}
        self.notes: list[Note] = []
        self._num_read: dict[Path, int] = {}

    def start(self, *names: str) -> None:
        """Start the agents of nodes; nodes that are down come up."""
        shape = self.shape
        for name in names:
            if name not in self.cluster.nodes:
                self.cluster.up(name)
            options = {
                "nnodes": shape.num_nodes,
                "nproc-per-node": shape.num_ranks,
                "rdzv-endpoint": f"{STORE}:{PORT}",
                "rdzv-id": "toy",
                "spares": shape.num_spares,
                "spare-nodes": shape.num_spare_nodes,
                "max-restarts": 10_000,
                "heartbeat-timeout": 10,
                "node-ttl": TTL_S,
                "node-wait": shape.wait_s,
            }
            role = "--store-only" if name == STORE else str(ROOT / "tests/cluster/training.py")
            self.agents[name] = self.cluster.nodes[name].start(
                *("bash", "-c", _AGAIN, "agent", sys.executable, "-W", "ignore"),
                *("-m", "dist_ckpt_strategies.cli", "run"),
                *(f"--{option}={value}" for option, value in options.items()),
                role,
                log=self.shared / "logs" / name,
                environment={
                    "CLUSTER_SHARED": str(self.shared),
                    "CLUSTER_SEED": str(SEED),
                    "CLUSTER_SHARDS": str(shape.num_shards),
                    "CLUSTER_SAVE_EVERY": str(shape.save_every),
                    "CLUSTER_MAX_IDLE": str(shape.max_idle_attempts),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
            )

    def read(self) -> list[Note]:
        """All notes by now, in the order in which they were made."""
        for path in (self.shared / "notes").iterdir():
            rank, node, boot_id, pid = path.name.split(".")
            process = node, boot_id, int(pid)
            begin = self._num_read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
            content = content[: content.rfind(b"\n") + 1]  # a reader may see a part of a write
            self._num_read[path] = begin + len(content)
            for line in content.decode().splitlines():
                at, what, step, digest = line.split()
                note = Note(float(at), int(rank), process, what, int(step), digest)
                self.notes.append(note)
        self.notes.sort(key=lambda note: note.at)
        return self.notes

    def workers(self) -> dict[int, Note]:
        return {note.rank: note for note in self.read()}

    def step(self) -> int:
        """The newest that a rank has come to in the present course; -1 before the first."""
        return max((note.step for note in self.workers().values()), default=-1)

    def busy(self) -> list[str]:
        """The nodes that have ranks."""
        return sorted({note.node for note in self.workers().values()})

    def idle(self) -> list[str]:
        return sorted({*self.cluster.nodes} - {*self.busy(), STORE})

    def spares(self, name: str) -> list[int]:
        """Processes of a node that wait for a rank, with everything imported."""
        node = self.cluster.nodes.get(name)
        if node is None:
            return []
        mine = f"{name}.{node.boot_id}."
        ready = {int(path.suffix[1:]) for path in (self.shared / "ready").glob(f"{mine}*")}
        taken = {int(path.suffix[1:]) for path in (self.shared / "notes").glob(f"*.{mine}*")}
        return [pid for pid in ready - taken if node.is_running(pid)]

    def signal(self, rank: int, number: int) -> None:
        name, _, pid = self.workers()[rank].process
        self.cluster.nodes[name].kill(number, pid)

    def kill_agent(self, name: str) -> None:
        """SIGKILL an agent, and first what would start it again."""
        pids = (self.shared / "agents" / name).read_text().strip()
        self.cluster.nodes[name].kill(signal.SIGKILL, pids)

    def until(self, is_so: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """The first result that is true.

        Raises:
            TimeoutError: there is none; the text has all logs.
        """
        try:
            return until(is_so, limit_s)
        except AssertionError:
            raise TimeoutError(f"not within {limit_s:g} s: {self.report()}") from None

    def go_on(self, since: float, num_steps: int = 3) -> float:
        """Wait until all ranks have done some steps more; seconds from ``since`` to the first.

        If ranks have restarted since then, only their steps after the restart count.
        """

        def first_steps() -> list[float]:
            done: dict[int, list[float]] = {rank: [] for rank in range(self.shape.world_size)}
            for note in self.read():
                if note.at > since:
                    done[note.rank] = [*done[note.rank], note.at] if note.what == "step" else []
            are_done = all(len(steps) >= num_steps for steps in done.values())
            return [steps[0] for steps in done.values()] if are_done else []

        return max(self.until(first_steps)) - since

    def await_spares(self) -> None:
        """Wait until processes wait for ranks on all nodes, as many as should."""

        def are_there() -> bool:
            wanted = dict.fromkeys(self.busy(), self.shape.num_spares)
            wanted |= dict.fromkeys(self.idle(), self.shape.num_ranks)
            return all(len(self.spares(name)) >= number for name, number in wanted.items())

        self.until(are_there)

    def finish(self, num_steps: int = 10) -> dict[str, int]:
        """Let the training end after some steps more; the agents' exit codes, by node."""
        (self.shared / "last_step.new").write_text(str(self.step() + num_steps))
        (self.shared / "last_step.new").rename(self.shared / "last_step")
        return self.codes()

    def codes(self) -> dict[str, int]:
        """Wait for all agents of nodes that are up; their exit codes."""
        running = {name: one for name, one in self.agents.items() if name in self.cluster.nodes}
        self.until(lambda: all(one.poll() is not None for one in running.values()))
        return {name: one.wait() for name, one in running.items()}

    def log(self, name: str) -> str:
        return (self.shared / "logs" / name).read_text(errors="replace")

    def report(self) -> str:
        """The ends of all agents' logs."""
        names = sorted(path.name for path in (self.shared / "logs").iterdir())
        ends = (f"--- {name}\n{self.log(name)[-3000:]}" for name in names)
        return "\n".join([*ends, f"last notes: {self.workers()}"])

    def require_right(self) -> None:
        """Compare all notes with the undisturbed training; no rank was in two processes at once."""
        notes = self.read()
        wrong = list(twice_written(notes))
        num_steps = 128
        while num_steps < max(note.step for note in notes):
            num_steps *= 2  # few different ones
        expected = reference(self.shape.world_size, self.shape.num_shards, num_steps)
        wrong += [
            f"another state than undisturbed: {note}"
            for note in notes
            if note.digest != expected[note.rank][note.step]
        ]
        assert not wrong, "\n".join([*wrong[:8], self.report()])

    def require_whole_checkpoints(self) -> int:
        """Check the digests of all finished checkpoints that nodes share; how many there are."""
        roots = [path.parent for path in sorted(self.shared.glob("global/*/metadata.json"))]
        issues = {root.name: found for root in roots if (found := verify(scan(root)))}
        assert not issues, issues
        assert roots, "no checkpoint was finished"
        return len(roots)


def started(cluster: Cluster, shape: Shape, *names: str) -> Job:
    """A job whose store and nodes are up, and whose ranks have done some steps."""
    job = Job(cluster, shape)
    began = time.monotonic()
    job.start(STORE, *names)
    job.go_on(began)
    return job


def twice_written(notes: Iterable[Note]) -> Iterable[str]:
    """Where a process has noted something after another one had for the same rank.

    A process that was frozen may still note the end of the step it was in, once.
    """
    last: dict[int, Note] = {}
    steps: dict[tuple[str, str, int], int] = {}
    replaced: set[tuple[int, tuple[str, str, int]]] = set()
    for note in notes:
        before = last.get(note.rank, note)
        is_late = (note.rank, note.process) in replaced
        if is_late and note.step == steps.pop(note.process, note.step) + 1:
            continue
        if is_late:
            yield f"two processes of one rank: {note}, after {before}"
        if before.process != note.process:
            replaced.add((note.rank, before.process))
        last[note.rank] = note
        steps[note.process] = note.step


@cache
def reference(world_size: int, num_shards: int, num_steps: int) -> list[list[str]]:
    """By rank and step, the digest of the state in a training without faults."""
    return done_by(world_size, undisturbed, num_shards, SEED, num_steps, timeout_s=LIMIT_S)
