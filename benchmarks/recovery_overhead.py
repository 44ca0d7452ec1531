"""What recovery costs in every step without a fault: the step commit, and replicated RNG states.

    python benchmarks/recovery_overhead.py --out recovery_overhead.jsonl

Two replicas of one shard, and of two: two gloo ranks, and four. They train a small GPT; rounds of
steps without recovery ("plain"), with it, and with checksums too, in turn. The difference per step
is what recovery costs. The model is small so that the steps do not hide it; its share is given for
a step of 0.5 s. On fewer cores than ranks, CPU time of several ranks adds up to wall time: it is
given too, as the mean of the ranks.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from benchmarks.common.command_line import Output, Parser, open_output
from benchmarks.common.rounds import gathered, run_on_ranks
from benchmarks.recovery_training import step
from dist_ckpt_strategies.cli.bench_rank import interleaved
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.sharded_training import ShardedTraining, make_groups, step_once

PLAIN, RECOVERY, CHECKSUMS = "plain", "recovery", "recovery and checksums"
NAMES = (PLAIN, RECOVERY, CHECKSUMS)
_REFERENCE_STEP_S = 0.5
_NUM_REPLICAS = 2


def measure(
    num_shards: int, num_rounds: int, num_steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds per step of each, and of the CPU per rank and step, by round. Collective."""
    groups = make_groups(num_shards)
    training = ShardedTraining(groups)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for repetition, name in interleaved(NAMES, num_rounds):
        manager = CheckpointManager(enable_checksum=name == CHECKSUMS)
        if name != PLAIN:
            manager.track(training, replica_group=groups.twins)
            step(training, manager)
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            if name == PLAIN:
                step_once(training)
            else:
                step(training, manager)
        took = time.perf_counter() - began, time.process_time() - cpu_began
        seconds, cpu_seconds = zip(*gathered(took), strict=True)
        if repetition > 0:
            mean = statistics.fmean(cpu_seconds)
            found[name].append((1000 * max(seconds) / num_steps, 1000 * mean / num_steps))
    return found


def _added(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(times, plain, strict=True))


def main() -> None:
    """Measure what recovery costs in every step without a fault."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (15)")
    parser.add_argument("--steps", type=int, default=60, help="steps in each (60)")
    options = parser.parse()
    num_rounds, num_steps = (1, 3) if options.smoke else (options.rounds, options.steps)
    with open_output(options.out, __file__) as output:
        for num_shards in (1, 2):
            num_ranks = _NUM_REPLICAS * num_shards
            args = num_shards, num_rounds, num_steps
            found = run_on_ranks(num_ranks, measure, *args, timeout_s=options.timeout_s)[0]
            _write(output, num_ranks, found)


def _write(
    output: Output, num_ranks: int, found: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    wall, cpu = ({n: [m[i] for m in ms] for n, ms in found.items()} for i in range(2))
    for name in NAMES:
        times = {"ms_per_step": wall[name], "cpu_ms_per_rank_step": cpu[name]}
        output.write("rounds", candidate=name, num_ranks=num_ranks, **times)
    for name in NAMES[1:]:
        ms, cpu_ms = (_added(times[name], times[PLAIN]) for times in (wall, cpu))
        added = {"ms_per_step": ms, "share": ms / 1000 / _REFERENCE_STEP_S}
        added["cpu_ms_per_rank_step"] = cpu_ms
        output.write("summary", candidate=name, num_ranks=num_ranks, **added)


if __name__ == "__main__":
    main()
