"""The cells of the seams, how one runs, and what must be true of it.

A cell ends in one of two ways: the training goes on to its end, or the job ends on all nodes, says
why, and goes on when it is started again. In either case all losses and the states at the end equal
those of an undisturbed run, bit for bit, and no load brings less than was saved before it.

Two ranks, under ``dist-ckpt run`` of two nodes, both on this machine.
"""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dist_ckpt_strategies.formats.scan import scan, verify
from tests.support.ports import HOST, free_port
from tests.support.processes import PYTHONPATH, is_running, process_state, until

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("run", "torchrun")
SAVES = ("manager", "local", "none")
LOOPS = ("plain", "Lightning", "Megatron-LM", "DCP")
FAULTS = ("kill", "SIGTERM", "exception", "stop")
NODES = {"run": ("a", "b"), "torchrun": ("a",)}
LIMIT_S = 300.0
"""Against a hang; cells took 15 to 75 s, and beside other tests up to 130 s."""

NONSENSE = {
    "torchrun of two nodes": "its agents count restarts each for itself, and ranks that were told "
    "different counts do not meet in init_process_group, whoever makes the checkpoints",
    "DCP with recovery from memory": "no second rank holds FSDP's shards",
    "dist-ckpt run without HPWrapper": "it could replace no rank, and says so (test_nodes.py)",
}
"""What the 96 cells leave out, and why."""

WORDS = {
    "run": "SIGTERM: ending all|the job ends|was asked to end|start the job again|does not answer",
    "torchrun": r"SignalException: .+|ChildFailedError|Received 15 death signal",
}
"""What says in an agent's output why it ended."""


@dataclass(frozen=True, slots=True)
class Cell:
    launcher: str
    saves: str
    loop: str
    fault: str = "none"
    rank: int = 0  # whom the fault befalls, in which step, and where in it
    step: int = 0
    point: str = "begin"
    target: tuple[str, ...] = ()  # nodes whose agents get SIGTERM; none: the rank itself does
    wraps: bool = True  # by HPWrapper; under torchrun a script does without it, too
    memory: bool = True  # whether ranks recover from each other's memory
    both: bool = False  # whether the manager saves on the nodes' disks, too
    parses_first: bool = False  # Megatron-LM's script, as on its main branch

    def __str__(self) -> str:
        how = f"{self.loop}, saves {self.saves}, {self.launcher}, {self.fault}"
        where = f"rank {self.rank}, step {self.step}, {self.point}, {','.join(self.target)}"
        names = ("wraps", "memory", "both", "parses_first")
        flags = [name for name in names if getattr(self, name)]
        return f"{how} ({where}; {' '.join(flags)})"


def drawn(launcher: str, saves: str, loop: str, fault: str, seed: int) -> Cell:
    """A cell; what the axes leave open is drawn."""
    draw = random.Random(f"{launcher} {saves} {loop} {fault} {seed}")
    wraps = launcher == "run" or draw.random() < 0.5
    # Megatron-LM's way is to ask memory first.
    memory = wraps and loop != "DCP" and (loop == "Megatron-LM" or draw.random() < 0.5)
    targets = [(), *((node,) for node in NODES[launcher]), NODES[launcher]]
    return Cell(
        *(launcher, saves, loop, fault),
        rank=draw.randrange(2),
        step=draw.randrange(2, 6),
        point=draw.choice(("begin", "gradients", "end")),
        target=draw.choice(targets) if fault == "SIGTERM" else (),
        wraps=wraps,
        memory=memory,
        both=saves == "manager" and loop != "Megatron-LM" and draw.random() < 0.5,
        parses_first=draw.random() < 0.5,
    )


def cells(seed: int) -> Iterator[Cell]:
    """All 96."""
    for axes in itertools.product(LAUNCHERS, SAVES, LOOPS, FAULTS):
        yield drawn(*axes, seed)


@dataclass(frozen=True, slots=True)
class Note:
    at: float
    rank: int
    what: str
    step: int
    value: str


class Job:
    """A training in a directory, which is started once or again."""

    def __init__(self, cell: Cell, directory: Path) -> None:
        self.cell, self.directory = cell, directory
        for name in ("notes", "pids", "logs"):
            (directory / name).mkdir()

    def notes(self) -> list[Note]:
        found = []
        for path in (self.directory / "notes").iterdir():
            for line in path.read_text().splitlines():
                at, what, step, value = line.split()
                rank = int(path.name.partition(".")[0])
                found.append(Note(float(at), rank, what, int(step), value))
        return sorted(found, key=lambda note: note.at)

    def pids(self) -> list[int]:
        """Of all ranks that were started."""
        return [int(path.name) for path in (self.directory / "pids").iterdir()]

    def finals(self) -> dict[int, str]:
        return {note.rank: note.value for note in self.notes() if note.what == "final"}

    @contextmanager
    def started(self, number: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """The agents of both nodes, killed at the end with all that they started."""
        port, agents = free_port(), {}
        try:
            for node in NODES[self.cell.launcher]:
                variables = {
                    "SEAMS_SHARED": str(self.directory),
                    "SEAMS_CELL": json.dumps(asdict(self.cell)),
                    "SEAMS_NODE": node,
                    "PYTHONPATH": PYTHONPATH,
                    "PYTHONWARNINGS": "ignore",
                    "PYTHONDONTWRITEBYTECODE": "",  # it takes each process 1 s to do without
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(
                        int(not self.cell.wraps)
                    ),  # recovery.md
                    "RES_OPTIONS": "attempts:0",  # see tests/conftest.py
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                }
                with self.log(number, node).open("wb") as log:
                    agents[node] = subprocess.Popen(
                        [*self.command(port), str(ROOT / "tests/seams/training.py")],
                        cwd=self.directory,
                        env=os.environ | variables,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
            pids = {node: agent.pid for node, agent in agents.items()}
            (self.directory / "agents").write_text(json.dumps(pids))
            yield agents
        finally:
            for agent in agents.values():
                agent.kill()
                agent.wait()
            for pid in filter(is_running, self.pids() if self.cell.launcher == "torchrun" else ()):
                os.kill(pid, signal.SIGKILL)

    def command(self, port: int) -> list[str]:
        options = ["--max-restarts=4", "--shutdown-timeout=30"]
        if self.cell.launcher == "torchrun":
            options += ["--standalone", "--nproc-per-node=2"]
            return [sys.executable, "-m", "torch.distributed.run", *options]
        options += ["--nnodes=2", f"--rdzv-endpoint={HOST}:{port}"]
        options += [f"--heartbeat-timeout={3 if self.cell.fault == 'stop' else 30}"]
        options += [f"--node-wait={5 if len(self.cell.target) == 1 else 60}"]  # one that has left
        return [sys.executable, "-m", "dist_ckpt_strategies.cli", "run", *options]

    def log(self, number: int, node: str) -> Path:
        return self.directory / "logs" / f"{number}.{node}"

    def run(self, number: int) -> dict[str, int]:
        """Start both nodes and wait for their ends; the exit codes."""
        with self.started(number) as agents:

            def is_over() -> bool:
                self.wake_last_rank()
                return all(one.poll() is not None for one in agents.values())

            try:
                until(is_over, LIMIT_S)
            except AssertionError:
                raise AssertionError(f"a hang: {self.report()}") from None
            until(lambda: not any(map(is_running, self.pids())), 30.0)
            return {node: agent.wait() for node, agent in agents.items()}

    def wake_last_rank(self) -> None:
        """Have a stopped rank go on once the other has ended: torchrun would wait for 30 s."""
        if (self.cell.launcher, self.cell.fault) != ("torchrun", "stop"):
            return
        running = [pid for pid in self.pids() if is_running(pid)]
        if len(running) == 1 and process_state(running[0]) == "T":
            os.kill(running[0], signal.SIGCONT)

    def report(self) -> str:
        logs = sorted((self.directory / "logs").iterdir())
        texts = [f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs]
        notes = [f"{n.at:.2f} {n.rank} {n.what} {n.step} {n.value}" for n in self.notes()]
        return "\n".join([str(self.cell), *notes, *texts])


@cache
def undisturbed(loop: str) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
    """Losses by rank and step, and the states at the end, of a run without faults and saves."""
    with TemporaryDirectory() as directory:
        job = Job(Cell("run", "none", loop), Path(directory))
        assert not any(job.run(0).values()), job.report()
        losses = {(n.rank, n.step): n.value for n in job.notes() if n.what == "loss"}
        assert sorted(job.finals()) == [0, 1], job.report()
        return losses, job.finals()


def run_cell(cell: Cell, directory: Path) -> str:
    """How a cell has ended, in a word. Raises an AssertionError if that is not right."""
    expected = undisturbed(cell.loop)
    directory.mkdir()
    job = Job(cell, directory)
    codes = job.run(0)
    is_over = sorted(job.finals()) == [0, 1]
    outcome = "went on" if is_over else f"ended {[*codes.values()]}"
    if is_over:
        assert not any(codes.values()), job.report()
        assert " is lost: the script ended" not in job.report()  # an attempt's save is none of it
    else:
        require_clear_end(job, codes)
        done = max(note.step + 1 for note in job.notes() if note.what == "loss")
        num_notes = len(job.notes())
        assert not any(job.run(1).values()), job.report()
        if cell.saves == "manager":  # it saves after a SIGTERM
            assert job.notes()[num_notes].step == done, job.report()
    assert (directory / "fault").exists(), job.report()
    require_right(job, expected)
    return outcome


def require_clear_end(job: Job, codes: dict[str, int]) -> None:
    """Only a signal ends a job before its time, and the output of each node says so."""
    assert job.cell.fault == "SIGTERM", job.report()
    assert all(codes.values()) or not any(codes.values()), job.report()  # no node calls it done
    for node in (node for node in codes if codes[node]):
        text = job.log(0, node).read_text(errors="replace")
        assert re.search(WORDS[job.cell.launcher], text), job.report()


def require_right(job: Job, expected: tuple[dict[tuple[int, int], str], dict[int, str]]) -> None:
    """Compare losses, states, and what loads have brought; check the checkpoints."""
    losses, finals = expected
    notes = job.notes()
    wrong = [n for n in notes if n.what == "loss" and losses[n.rank, n.step] != n.value]
    assert not wrong, f"another loss than undisturbed: {wrong[:4]}\n{job.report()}"
    assert job.finals() == finals, f"another state than undisturbed:\n{job.report()}"
    saved = 0
    for note in notes:
        if note.what == "saved":
            saved = max(saved, note.step)
        elif note.what not in {"loss", "final"}:
            assert note.step >= saved, f"{note} lost what was saved:\n{job.report()}"
    for root in (job.directory / "root").glob("iter_*"):
        if (root / "metadata.json").exists():
            assert not verify(scan(root)), job.report()
