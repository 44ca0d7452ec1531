"""What a rank of the seams has of its cell, whatever the loop.

What a rank does it notes at once, in a file of its process: a time, and the loss of a step, a step
that is saved, the step that a load has brought, or the digest of the state at the end.
"""

import hashlib
import json
import os
import signal
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dist_ckpt_strategies as package  # imports a name on first use: some take long
from dist_ckpt_strategies import local
from dist_ckpt_strategies.recovery import CheckpointManager

NUM_STEPS, SAVE_EVERY = 10, 3
SHARED = Path(os.environ["SEAMS_SHARED"])
CELL: dict[str, Any] = json.loads(os.environ["SEAMS_CELL"])
PACE_S = 0.3 if CELL["fault"] == "SIGTERM" else 0.05
"""After a step; a launcher passes a signal on some tenths of a second later."""

IS_TORCHRUN = CELL["launcher"] == "torchrun"
LIMIT_S = 8 if IS_TORCHRUN and CELL["fault"] == "stop" else 100
"""Of all waits for other ranks. Nothing else notices under torchrun that a rank is stopped."""

BARRIER_S = 5 if IS_TORCHRUN and CELL["fault"] in {"stop", "kill"} else 100
"""Of the wait for the next attempt, to which no lost rank comes. Torchrun's SIGTERM does not end it
where a save follows a SIGTERM; its SIGKILL comes 30 s later, whatever ``--shutdown-timeout``."""


class OrderedError(Exception):
    """What a rank raises whose cell says so."""


class Seams:
    """What a rank has of its cell, whatever the loop, and whatever the attempt."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.saves: str = CELL["saves"]
        self.memory = CheckpointManager(timeout_s=LIMIT_S) if CELL["memory"] else None
        path = SHARED / "notes" / f"{self.rank}.{os.getpid()}"
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, step: int, value: str = "-") -> None:
        os.write(self._notes, f"{time.monotonic()} {what} {step} {value}\n".encode())

    def join(self) -> None:
        """Make the default group."""
        backend = "interruptible_gloo" if CELL["wraps"] else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT_S))

    def reach(self, step: int, point: str) -> None:
        """The fault of the cell happens here, once."""
        if [self.rank, step, point] != [CELL[name] for name in ("rank", "step", "point")]:
            return
        with suppress(FileExistsError):
            (SHARED / "fault").touch(exist_ok=False)
            self._fail()

    def _fail(self) -> None:
        match CELL["fault"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                raise OrderedError("as ordered")
            case "SIGTERM":
                agents = json.loads((SHARED / "agents").read_text())
                for pid in [agents[name] for name in CELL["target"]] or [os.getpid()]:
                    os.kill(pid, signal.SIGTERM)

    def local(self) -> Any:
        """On the disk of the node, copied to the other's."""
        cliques = local.LazyCliqueReplicationStrategy(replication_jump=1, replication_factor=2)
        node = SHARED / f"disk of {os.environ['SEAMS_NODE']}"
        return local.LocalCheckpointManager(node, "run", cliques, timeout_s=LIMIT_S)

    def tiers(self) -> Any:
        """The manager; for a loop that has no way of its own to local checkpoints, of these."""
        is_local = self.saves == "local"
        policy = package.SavePolicy(
            every_steps=None if is_local else SAVE_EVERY,
            local_every_steps=SAVE_EVERY if is_local else 2 if CELL["both"] else None,
            keep_last=2,
        )
        return package.TieredCheckpointManager(
            SHARED / "root",
            local=self.local() if is_local or CELL["both"] else None,
            recovery=self.memory,
            policy=policy,
            options=package.ManagerOptions(timeout_s=LIMIT_S),
        )

    def note_saved(self, tiers: Any) -> None:
        if tiers is not None and (steps := tiers.all_steps()):
            self.note("saved", steps[-1])


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sum(1, keepdim=True)


def make_model(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 1)
    )


def digest(*tensors: torch.Tensor, **objects: Any) -> str:
    found = hashlib.sha256(json.dumps(objects, sort_keys=True, default=str).encode())
    for tensor in tensors:
        ours = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        found.update(ours.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def moments_of(optimizer: Any) -> list[torch.Tensor]:
    return [value for _, state in optimizer.state.items() for _, value in sorted(state.items())]


def run(seams: Seams, training: Any) -> None:
    """A loop of one's own, up to the digest of the state at its end."""
    with training.tiers or nullcontext():
        training.load()
        while training.number < NUM_STEPS:
            training.step()
            training.save()
            seams.reach(training.number - 1, "end")
            time.sleep(PACE_S)
    tensors = [*training.model.parameters(), *moments_of(training.optimizer), torch.get_rng_state()]
    seams.note("final", NUM_STEPS, digest(*tensors))
