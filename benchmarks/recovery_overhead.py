"""What recovery costs in every step without a fault: the vote, and the mirror of random states.

    python benchmarks/recovery_overhead.py --out recovery_overhead.jsonl
    python benchmarks/recovery_overhead.py --smoke

Four gloo ranks, two replicas of two shards, train a small GPT; rounds of steps without recovery
("plain"), with it, and with checksums too, in turn. The difference per step is what recovery
costs. The model is small so that the steps do not hide it; its share is given for a step of 0.5 s.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.common.command_line import NOWHERE, Out, Smoke, TimeoutS, open_output
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import alternate
from benchmarks.recovery_training import NUM_RANKS, NUM_SHARDS, step
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.sharded_training import ShardedTraining, make_groups

PLAIN, RECOVERY, CHECKSUMS = "plain", "recovery", "recovery and checksums"
NAMES = (PLAIN, RECOVERY, CHECKSUMS)
_REFERENCE_STEP_S = 0.5


class Worker:
    """Trains the same model, with recovery and without."""

    def __init__(self, context: RankContext) -> None:
        """Join the others. Collective."""
        join_gloo(context)
        self._groups = make_groups(NUM_SHARDS)
        self._training = ShardedTraining(self._groups)

    def train(self, candidate: str, num_steps: int) -> float:
        """Seconds of some steps. Collective."""
        manager = CheckpointManager(enable_checksum=candidate == CHECKSUMS)
        if candidate != PLAIN:
            manager.track(self._training, replica_group=self._groups.twins)
            step(self._training, manager)
        began = time.perf_counter()
        for _ in range(num_steps):
            if candidate == PLAIN:
                self._plain_step()
            else:
                step(self._training, manager)
        return time.perf_counter() - began

    def _plain_step(self) -> None:
        training = self._training
        training.forward_backward()
        training.reduce_gradients()
        training.apply_update()
        training.gather_weights()
        training.set_step(training.step + 1)


def make_worker(context: RankContext) -> Worker:
    """One of the ranks, in its process. Collective."""
    return Worker(context)


def costs(ms_per_step: dict[tuple[str, int], float]) -> dict[str, float]:
    """Median milliseconds that each adds to a plain step of the same round.

    Args:
        ms_per_step: by candidate and round.
    """
    return {
        name: statistics.median(
            ms - ms_per_step[PLAIN, number]
            for (candidate, number), ms in ms_per_step.items()
            if candidate == name
        )
        for name in NAMES[1:]
    }


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each.")] = 60,
    out: Out = NOWHERE,
    smoke: Smoke = False,
    timeout_s: TimeoutS = 120.0,
) -> None:
    """Measure what recovery costs in every step without a fault."""
    if smoke:
        rounds, steps = 1, 3
    found = {}
    with (
        open_output(out, "recovery_overhead.py") as output,
        Ranks(NUM_RANKS, "benchmarks.recovery_overhead", timeout_s=timeout_s) as ranks,
    ):
        for repetition, name in alternate(NAMES, rounds + 1):
            timed = ranks.step("train", name, steps)
            if repetition > 0:
                found[name, repetition] = ms = 1000 * max(timed.values) / steps
                line = {"candidate": name, "repetition": repetition, "ms_per_step": ms}
                output.write("round", {**line, "num_steps": steps})
        for name, ms in costs(found).items():
            share = ms / 1000 / _REFERENCE_STEP_S
            output.write("summary", {"candidate": name, "ms_per_step": ms, "share": share})


if __name__ == "__main__":
    typer.run(main)
