"""Save one GPT-like state behind training: what does training wait for, and what slows it down?

    python benchmarks/async_save.py --out async_save.jsonl
    python benchmarks/async_save.py --smoke

Two parts, alternating candidates, medians; the first round of each is not counted.

``blocking``: two ranks. Seconds until the call returns and the tensors may be overwritten, beside a
copy of the rank's bytes into memory that is in use; and seconds until the checkpoint is there. What
the last round has saved is loaded and compared.

``training``: one rank, whose main thread runs steps of small matrix products on one core, while all
other threads and processes of the save are held to another. Steps with nothing else going on, timed
in the same round just before and after, are what its steps are compared with. ``raw writer`` is a
process that writes the same number of bytes and flushes them: what the machine itself takes from a
neighbour. ``idle`` is nothing: the noise.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import typer

from benchmarks.candidates.one_state import TORCH_DIST, ZARR, ZARR_2, Megatron, stand_in_for_cuda
from benchmarks.common.command_line import Comparison, Output, among, comparison_command
from benchmarks.common.disks import file_system, fresh, touch_memory, workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo, quiet_imports
from benchmarks.common.rounds import SECONDS, Case, Sample, alternate
from benchmarks.common.states import GptSize, Shard, build_shards

with quiet_imports():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    import dist_ckpt_strategies
    from dist_ckpt_strategies.cli.bench_rank import Target

BLOCKING, TRAINING = "blocking", "training"
PARTS = (BLOCKING, TRAINING)
MEMCPY, IDLE, RAW_WRITER = "memcpy", "idle", "raw writer"
BASELINES = {MEMCPY: (BLOCKING,), IDLE: (TRAINING,), RAW_WRITER: (TRAINING,)}
"""In which parts they take part; all others do in both."""

_MODULE = "benchmarks.async_save"
_NUM_RANKS = 2
_NUM_IDLE = 12
"""Steps before and after each save."""

_LIMIT_S = 300.0
_WIDTH = 160
_NUM_TRIALS = 200
_TASKS = Path("/proc/self/task")
_WRITE = """
import os, sys
name, nbytes, block = sys.argv[1], int(sys.argv[2]), bytes(8 << 20)
with open(name, "wb", buffering=0) as file:
    for done in range(0, nbytes, len(block)):
        file.write(block[: nbytes - done])
    os.fsync(file.fileno())
"""


class AsyncCandidate(Protocol):
    """One way to save behind training."""

    def begin(self, directory: Path) -> None:
        """The part that training waits for. Collective."""
        ...

    def is_done(self) -> bool:
        """Whether this rank has written its share; what training asks between two steps."""
        ...

    def finish(self) -> None:
        """Wait for what is left, until the checkpoint is there. Collective."""
        ...


class _Entry(Megatron):
    """This package's ``save_async``."""

    _handle: dist_ckpt_strategies.SaveHandle

    def begin(self, directory: Path) -> None:
        self._handle = dist_ckpt_strategies.save_async(
            self.state(), directory, self.backend, validate_access_integrity=True
        )

    def is_done(self) -> bool:
        return self._handle.done()

    def finish(self) -> None:
        self._handle.wait()


class _Queue(Megatron):
    """Megatron-Core's backend and its queue, which forks a process for each save."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        stand_in_for_cuda()
        super().__init__(shards, TORCH_DIST)
        self._queue: Any = AsyncCallsQueue()

    def begin(self, directory: Path) -> None:
        request = dist_checkpointing.save(
            self.state(), str(directory), self.backend, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)

    def is_done(self) -> bool:
        """See AsyncCandidate. It also ends the save that is done."""
        self._queue.maybe_finalize_async_calls(blocking=False)
        return bool(self._queue.get_num_unfinalized_calls() == 0)

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)


class _Memcpy:
    """A copy of the rank's bytes into memory that is there and was used, and nothing else."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._pairs = [(torch.zeros_like(shard.tensor), shard.tensor) for shard in shards]

    def begin(self, directory: Path) -> None:
        del directory
        for copy, tensor in self._pairs:
            copy.copy_(tensor)

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        """See AsyncCandidate. Nothing is left."""


class _Idle:
    """Nothing at all, for as many steps as were asked for."""

    def __init__(self, _shards: tuple[Shard, ...]) -> None:
        self._left = 0

    def begin(self, directory: Path) -> None:
        del directory
        self._left = 12

    def is_done(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def finish(self) -> None:
        """See AsyncCandidate. Nothing is left."""


class _RawWriter:
    """Another process that writes as many bytes and flushes them: what the machine itself takes."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._nbytes = sum(shard.tensor.nbytes for shard in shards)
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, directory: Path) -> None:
        args = [str(directory / "raw"), str(self._nbytes)]
        self._process = subprocess.Popen([sys.executable, "-S", "-c", _WRITE, *args])

    def is_done(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def finish(self) -> None:
        if self._process is not None and self._process.wait(_LIMIT_S) != 0:
            raise OSError(f"the raw writer ended with {self._process.returncode}")


def _entry(backend: tuple[str, int], shards: tuple[Shard, ...]) -> AsyncCandidate:
    dist_ckpt_strategies.register()
    return _Entry(shards, backend)


MAKERS: Mapping[str, Callable[[tuple[Shard, ...]], AsyncCandidate]] = MappingProxyType(
    {
        MEMCPY: _Memcpy,
        IDLE: _Idle,
        RAW_WRITER: _RawWriter,
        "zarr 2": partial(_entry, ZARR_2),
        "zarr 1": partial(_entry, ZARR),
        "torch_dist, queue": _Queue,
    }
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How training goes.

    Attributes:
        training_core: where the steps run, alone.
        writing_core: where everything else of the process does.
        step_seconds: of a step, about.
        num_idle: steps before and after a save.
    """

    training_core: int
    writing_core: int
    step_seconds: float
    num_idle: int


@dataclass(frozen=True, slots=True)
class Steps:
    """How long each step of training took, in seconds.

    Attributes:
        before: with nothing else going on.
        during: those that began while a save was being written.
        after: with nothing else going on, again.
        begin_seconds: what the save held training up for.
        finish_seconds: what ending it did.
    """

    before: tuple[float, ...]
    during: tuple[float, ...]
    after: tuple[float, ...]
    begin_seconds: float
    finish_seconds: float


def run_beside(
    schedule: Schedule,
    begin: Callable[[], object],
    is_done: Callable[[], bool],
    finish: Callable[[], object],
) -> Steps:
    """Run steps before, during and after what ``begin`` starts. On the main thread."""
    os.sched_setaffinity(0, {schedule.training_core})
    step = _build_step(schedule.step_seconds)
    before = [step() for _ in range(schedule.num_idle)]
    # Threads and processes that are started here are born where their maker is.
    os.sched_setaffinity(0, {schedule.writing_core})
    begin_seconds = timed(begin)
    _move_others(schedule.writing_core)
    os.sched_setaffinity(0, {schedule.training_core})
    during = [step()]
    while not is_done():
        during.append(step())
    finish_seconds = timed(finish)
    after = [step() for _ in range(schedule.num_idle)]
    os.sched_setaffinity(0, {schedule.training_core, schedule.writing_core})
    return Steps(tuple(before), tuple(during), tuple(after), begin_seconds, finish_seconds)


def timed(body: Callable[[], object]) -> float:
    """How many seconds it takes."""
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def _build_step(step_seconds: float) -> Callable[[], float]:
    """A step of about so long: many small products on one thread, each a call from Python."""
    left, right, out = (torch.ones(_WIDTH, _WIDTH) for _ in range(3))

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            torch.mm(left, right, out=out)

    run(_NUM_TRIALS)
    trial_seconds = timed(lambda: run(_NUM_TRIALS))
    num_calls = max(1, round(_NUM_TRIALS * step_seconds / trial_seconds))
    return lambda: timed(lambda: run(num_calls))


def _move_others(core: int) -> None:
    """Have every thread but the main one run on one core."""
    for task in _TASKS.iterdir():
        if int(task.name) != os.getpid():  # the main thread's number is that of the process
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(task.name), {core})


class AsyncWorker:
    """One rank: every candidate over the same shards."""

    def __init__(self, context: RankContext, size: GptSize, names: Sequence[str]) -> None:
        join_gloo(context)
        shards = build_shards(size, context.global_rank, context.num_ranks)
        self._nbytes = sum(shard.tensor.nbytes for shard in shards)
        self._target = Target({shard.key: shard.tensor for shard in shards})
        self._candidates = {name: MAKERS[name](shards) for name in names}

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return self._nbytes

    def begin(self, name: str, directory: Path) -> None:
        """The part that training waits for. Timed."""
        self._candidates[name].begin(directory)

    def finish(self, name: str) -> None:
        """Wait until all is written and the checkpoint is there. Timed."""
        self._candidates[name].finish()

    def check(self, name: str, directory: Path) -> None:
        """Load what a candidate has saved, where it saves, and compare.

        Raises:
            ValueError: a tensor differs.
        """
        candidate = self._candidates[name]
        if isinstance(candidate, Megatron):
            self._target.clear()
            self._target.accept(candidate.load(directory))
            self._target.check(name)

    def train(self, name: str, directory: Path, schedule: Schedule) -> Steps:
        """Steps of training before, during and after a save."""
        one = self._candidates[name]
        return run_beside(schedule, lambda: one.begin(directory), one.is_done, one.finish)


def make_worker(size: GptSize, names: Sequence[str], context: RankContext) -> AsyncWorker:
    """One of the ranks, in its process. Collective."""
    return AsyncWorker(context, size, names)


@dataclass(frozen=True, slots=True)
class AsyncCase(Case):
    """One part, size and file system.

    Attributes:
        part: ``BLOCKING`` or ``TRAINING``.
        step_seconds: of a step of training, about.
        shares_core: whether the two processors that take part are threads of one core.
    """

    part: str = BLOCKING
    step_seconds: float = 0.0
    shares_core: bool = False


def _names_of(part: str, comparison: Comparison) -> list[str]:
    return [name for name in comparison.names if part in BASELINES.get(name, PARTS)]


def _run_blocking(size: GptSize, comparison: Comparison, output: Output) -> None:
    """Time what is waited for, in every place."""
    names = _names_of(BLOCKING, comparison)
    with Ranks(_NUM_RANKS, _MODULE, size, names, timeout_s=comparison.timeout_s) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        for place in comparison.places:
            case = AsyncCase(file_system(place), nbytes, size.num_arrays, _NUM_RANKS)
            with workspace(place) as directory:
                rounds = _blocking_rounds(ranks, case, directory, names, comparison.repetitions)
                output.write_samples(case, rounds)
                for name in names:
                    ranks.step("check", name, directory / name)


def _blocking_rounds(
    ranks: Ranks, case: Case, directory: Path, names: Sequence[str], repetitions: int
) -> Iterator[Sample]:
    for repetition, name in alternate(names, repetitions + 1):
        target = fresh(directory, name)
        touch_memory(case.held_nbytes)
        seconds = ranks.step("begin", name, target).seconds
        finishing = ranks.step("finish", name).seconds
        if repetition > 0:
            values = {SECONDS: seconds, "until_there": seconds + finishing}
            yield Sample(BLOCKING, name, repetition, values)


def _run_training(
    size: GptSize, comparison: Comparison, schedule: Schedule, output: Output
) -> None:
    """Time steps of training beside saves, in every place. All steps are written too."""
    names = _names_of(TRAINING, comparison)
    step_seconds = schedule.step_seconds
    shares_core = _share_core(schedule.training_core, schedule.writing_core)
    with Ranks(1, _MODULE, size, names, timeout_s=comparison.timeout_s) as ranks:
        nbytes = ranks.step("nbytes").values[0]
        for place in comparison.places:
            plain = (file_system(place), nbytes, size.num_arrays, 1, 1)
            case = AsyncCase(*plain, TRAINING, step_seconds, shares_core)
            with workspace(place) as directory:
                for repetition, name in alternate(names, comparison.repetitions + 1):
                    target = fresh(directory, name)
                    touch_memory(case.held_nbytes)
                    (steps,) = ranks.step("train", name, target, schedule).values
                    if repetition > 0:
                        about = {"candidate": name, "repetition": repetition, "case": case}
                        output.write("steps", steps, **about)
                        sample = Sample(TRAINING, name, repetition, _of_steps(steps))
                        output.write_samples(case, [sample])


def _of_steps(steps: Steps) -> dict[str, float]:
    """What the steps of one save amount to; ratios are to the median of idle ones."""
    idle = [*steps.before, *steps.after]
    usual = median(idle)
    return {
        SECONDS: median(steps.during),
        "slowdown": median(steps.during) / usual,
        "worst": max(steps.during) / usual,
        "worst_idle": max(idle) / usual,
        "num_steps": len(steps.during),
        "begin_seconds": steps.begin_seconds,
        "finish_seconds": steps.finish_seconds,
    }


def _share_core(one: int, other: int) -> bool:
    path = Path(f"/sys/devices/system/cpu/cpu{one}/topology/core_cpus_list")
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return False
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return any(ends[0] <= other <= ends[-1] for ends in ranges)


@comparison_command(list(MAKERS), list(BASELINES))
def main(
    comparison: Comparison,
    output: Output,
    *,
    part: Annotated[
        list[str] | None, typer.Option(help="blocking or training.", callback=among(PARTS))
    ] = None,
    step_ms: Annotated[float, typer.Option(min=1, help="Of a step of training.")] = 70.0,
) -> None:
    """Save one GPT-like state behind training with every candidate in turn."""
    parts = part or PARTS
    cores = sorted(os.sched_getaffinity(0))
    has_two = len(cores) > 1
    if TRAINING in parts and not has_two:
        output.skip(TRAINING, "one core only: there is none to write on beside training")
    pace = (0.002, 3) if comparison.is_smoke else (step_ms / 1000, _NUM_IDLE)
    for size in comparison.sizes:
        if BLOCKING in parts:
            _run_blocking(size, comparison, output)
        if TRAINING in parts and has_two:
            _run_training(size, comparison, Schedule(cores[-1], cores[0], *pace), output)


if __name__ == "__main__":
    typer.run(main)
