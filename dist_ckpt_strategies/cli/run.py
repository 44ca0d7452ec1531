"""``dist-ckpt run``: workers' lines on the terminal, each led by the rank that wrote it.

A reader that has gone ends the job, as any command. A line that cannot be written for another
reason, such as a full disk or a reader that does not read, is lost: no training ends for its log.

Options have torchrun's names and meanings where it has them.
"""

import itertools
import os
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import determine_local_world_size

from dist_ckpt_strategies.cli.render import printable
from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.errors import PeerLostError, PlanError
from dist_ckpt_strategies.inprocess.elastic_agent import ElasticAgent
from dist_ckpt_strategies.inprocess.job import FENCED, NODE_MISSING, Job, Nodes, script_command

_LOOK_S = 0.2
_PATIENCE_S = 5.0
"""Longest wait for a reader that does not read; meanwhile the agent does nothing else."""
_DEFAULT_PORT = 29400
"""Torchrun's for c10d."""

_NUM_PORTS = 1 << 16


def _send(target: IO[Any], rest: memoryview, wait_s: float) -> int:
    """Write what can be written now, or soon, and say how much.

    It goes past Python's buffer, which would try again what has failed; that counts as written.
    """
    try:
        if select.select([], [target.fileno()], [], wait_s)[1]:
            return os.write(target.fileno(), rest[: select.PIPE_BUF])
    except BrokenPipeError:
        raise
    except BlockingIOError:  # others have made it non-blocking, and write too
        return 0
    except OSError:
        return len(rest)  # lost, see above
    return 0


class _Output:
    """Writes workers' lines to the terminal, and to files where torchrun's options ask for them."""

    def __init__(
        self, job: Job, log_dir: str | None, redirects: str, tee: str, local_ranks_filter: str
    ) -> None:
        num_ranks = job.num_ranks
        self.signals: Sequence[int] = ()
        self._num_lost: Counter[IO[Any]] = Counter()
        self._num_ranks = num_ranks
        self._files: dict[tuple[int, str], BinaryIO] = {}
        try:
            ranks = [int(rank) for rank in local_ranks_filter.split(",") if rank]
        except ValueError:
            text = f"--local-ranks-filter: expected numbers such as 0,1, found {local_ranks_filter}"
            raise PlanError(text) from None
        self._shown = set(itertools.product(ranks or range(num_ranks), ("stdout", "stderr")))
        if log_dir is None and redirects == tee == "0":
            return
        try:
            specs = DefaultLogsSpecs(log_dir, Std.from_str(redirects), Std.from_str(tee))
        except ValueError as error:
            raise PlanError(f"--redirects, --tee: {error}") from error
        variables = {"TORCHELASTIC_RUN_ID": job.run_id, "TORCHELASTIC_RESTART_COUNT": "0"}
        files = specs.reify({rank: dict(variables) for rank in range(num_ranks)})
        for name, paths, teed in (
            ("stdout", files.stdouts, files.tee_stdouts),
            ("stderr", files.stderrs, files.tee_stderrs),
        ):
            for rank, path in paths.items():
                if path:
                    self._files[rank, name] = Path(path).open("ab", buffering=0)  # noqa: SIM115
                    if rank not in teed:
                        self._shown.discard((rank, name))

    def write_note(self, text: str) -> None:
        """Write what happens to a worker."""
        line = f"dist-ckpt: {printable(text)}\n".encode(errors="replace")
        self._write(sys.stderr, line)

    def write_line(self, who: str, stream: str, line: bytes) -> None:
        """Write what a worker has written; ``who`` is its rank, or "spare"."""
        source = (int(who) % self._num_ranks, stream) if who.isdecimal() else None
        if source in self._files:
            self._write(self._files[source], line)
        if source is None or source in self._shown:
            target = sys.stdout if stream == "stdout" else sys.stderr
            self._write(target, f"[{who}] ".encode() + line)

    def _write(self, target: IO[Any] | None, line: bytes) -> None:
        """Write it, unless the reader does not read.

        A reader that does not read holds this up, for less long after a signal. Then lines are lost
        until it reads again; it is told how many.
        """
        if target is None:
            return
        num_lost = self._num_lost[target]
        patience_s = 0.0 if num_lost else _PATIENCE_S
        notice = b"\ndist-ckpt: %d lines lost: this output was not read\n" % num_lost
        if num_lost and self._can_send(target, notice, patience_s):
            self._num_lost[target] = 0
        if self._num_lost[target] or not self._can_send(target, line, patience_s):
            self._num_lost[target] += 1

    def _can_send(self, target: IO[Any], content: bytes, patience_s: float) -> bool:
        """Send all of it; False if the reader does not read."""
        rest = memoryview(content)
        deadline = time.monotonic() + patience_s
        while rest:
            num_written = _send(target, rest, min(_LOOK_S, patience_s))
            if num_written:
                deadline = time.monotonic() + patience_s
            elif self.signals or time.monotonic() >= deadline:
                return False
            rest = rest[num_written:]
        return True


def nodes_of(
    nnodes: str, endpoint: str, backend: str, num_ranks: int, **options: Any
) -> Nodes | None:
    """The nodes of a job; None where it has this one alone, and needs no other to find it."""
    if backend not in {"c10d", "static"}:
        raise PlanError(
            f"--rdzv-backend: expected c10d or static, a TCPStore, found {backend!r}; etcd and "
            "etcd-v2 are not supported"
        )
    least, _, most = nnodes.partition(":")
    nnodes = least if least == most else nnodes
    if not nnodes.isdecimal() or int(nnodes) < 1:
        raise PlanError(
            f"--nnodes: expected a number, found {nnodes!r}; the world of a job does not change, "
            "nodes beyond it wait with --spare-nodes"
        )
    if not endpoint:
        if nnodes != "1" or options["num_spare_nodes"] or options["is_store_only"]:
            raise PlanError("several nodes need --rdzv-endpoint HOST[:PORT], the same on all")
        return None
    host, _, port = endpoint.partition(":")
    number = int(port) if port.isdecimal() else 0 if port else _DEFAULT_PORT
    if not (host and 0 < number < _NUM_PORTS):
        raise PlanError(
            "--rdzv-endpoint: expected HOST or HOST:PORT with a port of 1 to 65535, found "
            f"{endpoint!r}"
        )
    return Nodes(int(nnodes), num_ranks, endpoint=(host, number), **options)


def command_of(
    script: str, args: Sequence[str], *, is_module: bool, is_program: bool, is_store_only: bool
) -> tuple[str, ...]:
    """The command line of each worker; a PlanError if there is none."""
    if is_store_only and script:
        raise PlanError(f"--store-only: the store's process runs no script, found {script}")
    if is_program and is_module:
        raise PlanError("--no-python: a module needs Python, leave out --module")
    program = shutil.which(script) if is_program else None
    if is_program and program is None:
        raise PlanError(f"SCRIPT: expected a program on the PATH, found {script or 'nothing'}")
    if not (is_module or is_program or is_store_only or Path(script).is_file()):
        there = f"{script}, which is no file" if script else "nothing"
        raise PlanError(f"SCRIPT: expected a Python file, or a module with -m, found {there}")
    if program is not None:
        return program, *args
    return script_command(script, args, is_module=is_module)


def signals_of(names: str) -> tuple[int, ...]:
    """The numbers of signals that a process can handle, given their names."""
    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    if not all(isinstance(one, signal.Signals) for one in numbers) or {
        signal.SIGKILL,
        signal.SIGSTOP,
    }.intersection(numbers):
        raise PlanError(
            "--signals-to-handle: expected names such as SIGTERM,SIGUSR1, without SIGKILL and "
            f"SIGSTOP, found {names!r}"
        )
    return tuple(map(int, filter(None, numbers)))


def ranks_of(nproc_per_node: str) -> int:
    """The number of ranks of a node: as given, or one per device with gpu, cpu or auto."""
    try:
        num_ranks = determine_local_world_size(nproc_per_node)
    except ValueError as error:
        raise PlanError(f"--nproc-per-node: {error}") from error
    if num_ranks < 1:
        raise PlanError(f"--nproc-per-node: expected a number > 0, found {nproc_per_node}")
    return int(num_ranks)


def run_script(job: Job, *output_options: Any) -> int:
    """Run this node of a job in the foreground; its exit code. Without a store the process ends.

    Workers' lines go where torchrun's options say: see ``_Output``.
    """
    try:
        get_logging_handler(job.event_log_handler)
    except KeyError:
        raise PlanError(
            f"--event-log-handler: expected null or console, found {job.event_log_handler!r}"
        ) from None
    output = _Output(job, *output_options)
    try:
        agent = ElasticAgent(job, environment(), output.write_line, output.write_note)
    except PeerLostError as error:
        output.write_note(f"{error.message}; it has not come within --node-wait")
        os._exit(NODE_MISSING)  # as below
    output.signals = agent.signals
    try:
        code = agent.run()
    except PeerLostError as error:
        output.write_note(error.message)
        code = FENCED
    if code == FENCED:
        # A thread may wait in torch's client for a store that is gone. If it returned while the
        # interpreter exits, that would abort the process, in place of its exit code.
        os._exit(code)
    return code
