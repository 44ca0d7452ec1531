"""``dist-ckpt demo``: train a GPT, save it as Zarr, resume it in other parallel layouts.

Four ranks on the CPU train a Megatron-Core GPTModel on real text, save through Megatron's own
``dist_checkpointing.save`` and train on. Then four new processes, in another parallel layout, load
the checkpoint and train on too: their state must be bit-identical, and their loss the same.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status as LiveLine

from dist_ckpt_strategies.cli.demo.task import Loading, ParallelLayout, RankTask, Role, Training
from dist_ckpt_strategies.cli.ranks import Event, RankError, rank_commands, run_rank_processes
from dist_ckpt_strategies.cli.render import Row, Table, bytes_text, print_dim, print_table
from dist_ckpt_strategies.cli.status import Status, status_of
from dist_ckpt_strategies.errors import CheckpointError, CheckpointExistsError

_TRAIN_LAYOUT = ParallelLayout(tp=2, dp=2)
_RESUMPTIONS = (
    (ParallelLayout(tp=4, dp=1), Loading.EACH),
    (ParallelLayout(tp=1, dp=2, pp=2), Loading.EACH),
    (ParallelLayout(tp=1, dp=4), Loading.TWO_STAGE),
)
_LOST_NODE = 1
_LOSS_TOLERANCE = 0.02
_START_TIMEOUT_S = 240.0
_WEIGHTS = "weights"
_OPTIMIZER_PREFIX = "optimizer.state."
_KIND_NAMES = {"param": "fp32 master", "fp32_param": "fp32 master"}

TaskRunner = Callable[[RankTask, Callable[[Event], None], float], None]
"""Carries out a task, calling with each event; the last is ``timeout_s``."""


class DemoError(CheckpointError):
    """The demonstration found a difference."""


def run_task(task: RankTask, on_event: Callable[[Event], None], timeout_s: float) -> None:
    """Carry out a task with one new process per rank of its layout.

    Raises:
        RankError: a rank failed, or there was no event for too long.
    """
    module = "dist_ckpt_strategies.cli.demo.worker"
    commands = rank_commands(module, task.layout.num_ranks, task)
    run_rank_processes(commands, task.scratch, on_event, timeout_s)


def run_demo(
    keep: Path | None,
    console: Console,
    *,
    training: Training | None = None,
    start: TaskRunner = run_task,
) -> int:
    """Run the demonstration; 0 if every step went well, else what failed has been shown.

    Args:
        keep: directory in which the checkpoint stays; it must be empty or not exist. None: the
            checkpoint is removed at the end.
        console: where progress and the tables are shown.
        training: sizes and number of iterations, smaller in tests.
        start: carries out one task, in new processes.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dist-ckpt-demo-") as scratch:
            _Demo(Path(scratch), keep, console, training or Training(), start).run()
    except (DemoError, RankError, CheckpointExistsError, OSError) as error:
        console.print("[bold red]The demonstration failed.[/]")
        console.print(str(error), markup=False, highlight=False)
        return Status.DAMAGED if isinstance(error, DemoError | RankError) else status_of(error)
    except KeyboardInterrupt:
        console.print("[bold red]Interrupted.[/] All ranks have been stopped.")
        return Status.INTERRUPTED
    return Status.FINE


@dataclass(slots=True)
class StartRecord:
    """What one start of the ranks has reported so far.

    Attributes:
        layout: its parallel layout.
        seconds: duration of each finished phase, by name.
        losses: by iteration, in order.
        digests: of the state saved or loaded, by key.
        reading: bytes that each rank read and has got, where the ranks shared the reading.
    """

    layout: ParallelLayout
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    reading: tuple[list[int], list[int]] | None = None

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event["event"]:
            case "ended":
                self.seconds[event["name"]] = event["seconds"]
            case "iteration":
                self.losses[event["iteration"]] = event["loss"]
            case "digests":
                self.digests = event["digests"]
            case "reading":
                self.reading = (event["read_nbytes"], event["filled_nbytes"])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many tensors of one kind are bit-identical.

    Attributes:
        kind: ``weights``, or the optimizer's name for its state.
        num_expected: tensors that there were.
        differing: keys of those that differ, are missing or were not there before.
    """

    kind: str
    num_expected: int
    differing: tuple[str, ...]

    def __str__(self) -> str:
        """Such as ``yes 17/17``."""
        num_differing = len(self.differing)
        num_all = max(self.num_expected, num_differing)
        return f"{'NO' if num_differing else 'yes'} {num_all - num_differing}/{num_all}"


def compare_digests(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[Agreement, ...]:
    """How two states compare, by kind of tensor: weights first, then the optimizer's by name.

    Args:
        expected: digest of every global tensor, by key.
        found: the same, of the other state.
    """
    kinds: dict[str, list[str]] = {}
    for key in sorted(expected.keys() | found.keys()):
        name = key.removeprefix(_OPTIMIZER_PREFIX).split(".", 1)[0]
        is_weight = not key.startswith(_OPTIMIZER_PREFIX)
        kind = _WEIGHTS if is_weight else _KIND_NAMES.get(name, name)
        kinds.setdefault(kind, []).append(key)
    return tuple(
        Agreement(
            kind,
            sum(key in expected for key in keys),
            tuple(key for key in keys if expected.get(key) != found.get(key)),
        )
        for kind, keys in sorted(kinds.items(), key=lambda item: (item[0] != _WEIGHTS, item[0]))
    )


def largest_difference(reference: Mapping[int, float], found: Mapping[int, float]) -> float:
    """Largest difference of loss at the same iteration, over the iterations of ``found``."""
    return max(abs(loss - reference[iteration]) for iteration, loss in found.items())


class _Demo:
    """The steps of the demonstration, and the tables at the end."""

    def __init__(
        self,
        scratch: Path,
        keep: Path | None,
        console: Console,
        training: Training,
        start: TaskRunner,
    ) -> None:
        self._scratch = scratch
        self._keep = keep
        self._checkpoint = (keep or scratch / "checkpoint").resolve()
        self._nodes = scratch / "nodes"
        self._console = console
        self._training = training
        self._run_task = start
        self._steps: list[Row] = []
        self._reading: Table | None = None
        self._kinds: list[str] = []
        self._comparisons: list[Row] = []
        self._problems: list[str] = []

    def run(self) -> None:
        """All steps, then the tables.

        Raises:
            RankError: a rank failed.
            DemoError: a state or a loss is not as it should be.
        """
        began = time.monotonic()
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        if any(self._checkpoint.iterdir()):
            raise CheckpointExistsError(
                f"{self._checkpoint}: expected a new or empty directory, found files in it",
                path=str(self._checkpoint),
            )
        reference = self._train()
        for layout, loading in _RESUMPTIONS:
            self._resume(layout, reference, loading)
        self._console.print(f"lose the disk of node {_LOST_NODE}", highlight=False)
        shutil.rmtree(self._nodes / f"node{_LOST_NODE}")
        self._resume(_TRAIN_LAYOUT, reference, Loading.LOCAL)
        self._show(time.monotonic() - began)
        if self._problems:
            raise DemoError("\n".join(self._problems))

    def _train(self) -> StartRecord:
        """Train, save, train on: the reference for all resumed runs."""
        record = self._start(Role.TRAIN, _TRAIN_LAYOUT, Loading.EACH)
        num_before = self._training.num_before_save
        before = {i: loss for i, loss in record.losses.items() if i < num_before}
        after = {i: loss for i, loss in record.losses.items() if i >= num_before}
        name = str(_TRAIN_LAYOUT)
        self._add_step("train", name, record.seconds["train"], before)
        self._add_step("save", name, record.seconds["save"], source=self._checkpoint)
        self._add_step("save locally", name, record.seconds["save locally"], source=self._nodes)
        self._add_step("train on", name, record.seconds["train on"], after)
        losses = list(before.values())
        if losses[-1] >= losses[0]:
            self._problems.append(f"the loss did not fall in {num_before} iterations")
        return record

    def _resume(self, layout: ParallelLayout, reference: StartRecord, loading: Loading) -> None:
        """Load in new processes and another layout, compare, and train on."""
        record = self._start(Role.RESUME, layout, loading)
        name, step, source = str(layout), "load", self._checkpoint
        if loading is Loading.LOCAL:
            name, step, source = f"{layout}, lost", "recover", self._nodes
        self._add_step(step, name, record.seconds["load"], source=source)
        self._add_step("resume", name, record.seconds["resume"], record.losses)
        if record.reading is not None:
            self._reading = _reading_table(layout, *record.reading)
        agreements = compare_digests(reference.digests, record.digests)
        difference = largest_difference(reference.losses, record.losses)
        self._kinds = [agreement.kind for agreement in agreements]
        self._comparisons.append(comparison_row(name, agreements, difference))
        for agreement in agreements:
            if agreement.differing:
                keys = ", ".join(agreement.differing)
                self._problems.append(f"{name}: {agreement.kind}: not bit-identical: {keys}")
        if not difference <= _LOSS_TOLERANCE:
            self._problems.append(
                f"{name}: the loss differs by {difference:.4f} from the uninterrupted run, "
                f"expected at most {_LOSS_TOLERANCE}"
            )

    def _start(self, role: Role, layout: ParallelLayout, loading: Loading) -> StartRecord:
        """Start the ranks afresh and wait until all have ended; their reports."""
        scratch = self._scratch / f"{role}-{layout.tp}-{layout.dp}-{layout.pp}"
        scratch.mkdir()
        task = RankTask(
            role,
            layout,
            self._training,
            self._checkpoint,
            scratch,
            loading=loading,
            nodes=self._nodes,
        )
        record, console = StartRecord(layout), self._console
        live: Any = console.status(f"{layout}: start {layout.num_ranks} processes")

        def take(event: Event) -> None:
            record.add(event)
            self._show_event(live, layout, event)

        try:
            with live if console.is_terminal else nullcontext():
                self._run_task(task, take, _START_TIMEOUT_S)
        except RankError as error:
            raise RankError(f"{layout}: {error}") from error
        return record

    def _show_event(self, live: LiveLine, layout: ParallelLayout, event: Event) -> None:
        """Show the phase in a live line, and each that is over in a line of its own."""
        if event["event"] == "begun":
            live.update(f"{layout}: {event['name']}")
        elif event["event"] == "iteration":
            live.update(f"{layout}: iteration {event['iteration']}, loss {event['loss']:.3f}")
        elif event["event"] == "ended":
            line = f"{layout!s:<16} {event['name']:<20} {event['seconds']:6.1f} s"
            self._console.print(line, highlight=False)

    def _add_step(
        self,
        step: str,
        name: str,
        seconds: float,
        losses: Mapping[int, float] | None = None,
        *,
        source: Path | None = None,
    ) -> None:
        """Add a row to the table of steps: with losses by iteration, or the size of files."""
        numbers, values = list(losses or {}), list((losses or {}).values())
        facts = (
            name,
            f"{numbers[0]}-{numbers[-1]}" if numbers else "",
            f"{seconds:.1f}",
            f"{values[0]:.3f} -> {values[-1]:.3f}" if values else "",
            "" if source is None else bytes_text(_size(source)),
        )
        self._steps.append(Row(step, facts))

    def _show(self, seconds: float) -> None:
        titles = Row("step", ("layout", "iteration", "seconds", "loss", "size"))
        right = ("iteration", "seconds", "loss", "size")
        self._print(
            'Backend ("zarr", 1) on Megatron-Core', Table(titles, tuple(self._steps), right)
        )
        print_dim(self._console, f"{seconds:.0f} s in all, with starting the processes")
        if self._reading is not None:
            self._print("Two-stage load: each byte is read once and sent on", self._reading)
        titles = Row("read by", (*self._kinds, "loss diff"))
        comparisons = Table(titles, tuple(self._comparisons), ("loss diff",))
        self._print("Bit-identical with the tensors before the save", comparisons)
        if self._keep is not None:
            size = bytes_text(_size(self._checkpoint))
            self._console.print(
                f"The checkpoint stays in {self._checkpoint} ({size}).", markup=False
            )

    def _print(self, title: str, table: Table) -> None:
        self._console.print(f"\n{title}", highlight=False, markup=False)
        print_table(self._console, table)


def comparison_row(name: str, agreements: Sequence[Agreement], loss_difference: float) -> Row:
    """Whether the state of a resumed run is the one that was saved, kind by kind.

    Args:
        name: of its layout.
        agreements: how many tensors of each kind are bit-identical.
        loss_difference: largest difference of loss at the same iteration.
    """
    is_marked = any(agreement.differing for agreement in agreements)
    return Row(name, (*map(str, agreements), f"{loss_difference:.4f}"), is_marked)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _reading_table(layout: ParallelLayout, read: Sequence[int], filled: Sequence[int]) -> Table:
    """Bytes that each rank of a data-parallel group read from storage, and that it loaded."""
    ranks = tuple(f"rank {rank}" for rank in range(len(read)))
    rows = (("read from storage", read), ("loaded", filled))
    return Table(
        Row(str(layout), (*ranks, "all")),
        tuple(Row(name, (*map(bytes_text, some), bytes_text(sum(some)))) for name, some in rows),
        (*ranks, "all"),
    )
