"""Ranks on this node for ``--nproc``, ``bench`` and ``demo``; they end with their parent.

Each is ``python -m dist_ckpt_strategies.cli.ranks``: it joins a gloo world and runs a module, with
the variables that torchrun sets. Rank 0 writes to its parent's output.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from rich.console import Console

from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.comm.shared_work import open_world
from dist_ckpt_strategies.config import environment, options_from_environment, rank_from_environment
from dist_ckpt_strategies.errors import CheckpointError, PeerTimeoutError, PlanError

if TYPE_CHECKING:  # torch takes a while to import, and the parent goes without
    from dist_ckpt_strategies.comm.base import Communicator

CLI = "dist_ckpt_strategies.cli"
"""The command, as a module."""

_START_S = 120.0
"""Longest time until all ranks have imported torch and found each other, in seconds."""
_GRACE_S = 10.0
"""Longest time for the others to end when a rank has failed or rank 0 has ended, in seconds."""
_POLL_S = 0.05
_NUM_TAIL_LINES = 15

_Process = subprocess.Popen[bytes]


class RankError(CheckpointError):
    """A rank failed, and rank 0 did not say so."""


def is_rank() -> bool:
    """Whether ``run_ranks`` has started this process."""
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == __name__


def is_reporting(nproc: int | None) -> bool:
    """Whether this process prints what a tool has found; all other ranks do not."""
    return nproc == 1 or rank_from_environment()[0] == 0


def needs_ranks(nproc: int | None) -> TypeGuard[int]:
    """Whether new ranks run a command; a PlanError if torchrun has started several already."""
    if nproc is None or nproc == 1 or is_rank():
        return False
    if (size := rank_from_environment()[1]) > 1:
        raise PlanError(
            f"--nproc {nproc}: WORLD_SIZE says that this is one of {size} ranks already; leave "
            "--nproc out, or unset RANK and WORLD_SIZE"
        )
    return True


@contextmanager
def tool_ranks(nproc: int | None) -> Iterator[Communicator | None]:
    """The ranks, of ours or torchrun's, that share a tool's work; None for this process alone.

    Collective.
    """
    rank, size = rank_from_environment()
    if nproc == 1 or size == 1:
        yield None
        return
    logging.getLogger("dist_ckpt_strategies.comm").setLevel(logging.ERROR)  # the command says it
    timeout_s = options_from_environment().timeout_s
    if is_rank():
        from dist_ckpt_strategies.comm.torch_communicator import open_communicator  # noqa: PLC0415

        yield open_communicator(None, timeout_s=timeout_s, purpose="tool")
        return
    with open_world(rank, size, None, start_s=_START_S, timeout_s=timeout_s) as comm:
        yield comm


def run_ranks(
    num_ranks: int, module: str, arguments: Sequence[str], *, timeout_s: float = _START_S
) -> int:
    """Run a module as ``__main__`` on new ranks of a gloo world; on return no process is left.

    Returns the exit status of rank 0, which reports failures to stderr. Raises a RankError if a
    rank was killed, or failed without rank 0. Collectives of the world wait at most ``timeout_s``.
    """
    with _leaving_on_sigterm(), TemporaryDirectory(prefix="dist-ckpt-ranks-") as scratch:
        logs = [Path(scratch, f"rank{rank}.log") for rank in range(num_ranks)]
        alive, ours = os.pipe()
        # -P: a file of the user's working directory must not pass for a module.
        command = [sys.executable, "-P", "-m", __name__, str(alive), f"{scratch}/store"]
        command += [str(max(_START_S, timeout_s)), module, *arguments]
        processes: list[_Process] = []
        try:
            for rank in range(num_ranks):
                with logs[rank].open("wb") as log:
                    output = log if rank else None
                    processes.append(
                        subprocess.Popen(  # noqa: S603 - our own interpreter and module
                            command,
                            pass_fds=[alive],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            env=_rank_environment(rank, num_ranks),
                            start_new_session=True,  # Ctrl-C reaches the parent alone
                        )
                    )
            codes = _codes_at_end(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            Console(stderr=True).show_cursor()  # which a killed rank may have hidden
            os.close(alive)
            os.close(ours)
        return _status(codes, logs)


def _codes_at_end(processes: Sequence[_Process]) -> list[int | None]:
    """The exit codes when all have ended, or rank 0, or one failed, and the others had time to."""
    left_s = _GRACE_S
    while left_s > 0:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(codes) or codes[0] is not None:
            left_s -= _POLL_S
        time.sleep(_POLL_S)
    return codes


def _status(codes: Sequence[int | None], logs: Sequence[Path]) -> int:
    """The exit status of rank 0, unless it was killed, or another rank failed without it."""
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    if (status := codes[0]) is not None and status > 0:
        return status
    first = min(failed, key=lambda rank: (codes[rank] or 0) > 0)  # what was killed comes first
    error = RankError(f"rank {first} failed (exit status {codes[first]})")
    output = logs[first].read_text(encoding="utf-8", errors="replace").splitlines()
    error.add_note("\n".join(output[-_NUM_TAIL_LINES:]))
    raise error


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM runs every ``finally``, so that no process or file is left."""

    def leave(signal_number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """This package importable, no GPU, gloo on the loopback device.

    Gloo would otherwise choose the device that the host's name resolves to, which on many
    laptops and in many containers cannot be reached.
    """
    variables = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    root = str(Path(__file__).resolve().parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def main(alive: str, store: str, timeout_s: str, module: str, *arguments: str) -> None:
    """Be one rank; see ``run_ranks``. The first argument is read until the parent's end."""
    threading.Thread(target=_end_with_parent, args=(int(alive),), daemon=True).start()
    warnings.simplefilter("ignore")

    import torch  # noqa: PLC0415 - the parent does without
    from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

    torch.set_num_threads(1)
    rank, size = rank_from_environment()
    limit_s = float(timeout_s)
    try:
        with open_world(rank, size, FileStore(store, size), start_s=limit_s, timeout_s=limit_s):
            sys.argv[1:] = arguments
            runpy.run_module(module, run_name="__main__")
    except PeerTimeoutError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(Status.FAILED)


def _end_with_parent(alive: int) -> None:
    """End this process, and all that it has started, when the parent has ended."""
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
