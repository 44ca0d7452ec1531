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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dist_ckpt_strategies.cli.demo.task import Loading, ParallelLayout, RankTask, Role, Training
from dist_ckpt_strategies.cli.ranks import Event, RankError, rank_commands, run_rank_processes
from dist_ckpt_strategies.cli.render import bytes_text
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
    commands = rank_commands(module, task.layout.num_ranks, task.to_json())
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
        """Such as ``yes 17/17``, with markup."""
        num_differing = len(self.differing)
        num_all = max(self.num_expected, num_differing)
        word = "[red]NO[/]" if num_differing else "[green]yes[/]"
        return f"{word} {num_all - num_differing}/{num_all}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A resumed run beside the uninterrupted one.

    Attributes:
        name: of its layout.
        agreements: how many tensors of each kind are bit-identical.
        loss_difference: largest difference of loss at the same iteration.
    """

    name: str
    agreements: tuple[Agreement, ...]
    loss_difference: float


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
        self._display = _PhaseDisplay(console)
        self._training = training
        self._run_task = start
        self._steps = _table('Backend ("zarr", 1) on Megatron-Core', ("step", "layout"))
        for name in ("iteration", "seconds", "loss", "size"):
            self._steps.add_column(name, justify="right", no_wrap=True)
        self._reading: Table | None = None
        self._comparisons: list[Comparison] = []
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
        with self._display:
            reference = self._train()
            for layout, loading in _RESUMPTIONS:
                self._resume(layout, reference, loading)
            self._display.begin(str(_TRAIN_LAYOUT), f"lose the disk of node {_LOST_NODE}")
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
        self._comparisons.append(Comparison(name, agreements, difference))
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
        record, name = StartRecord(layout), str(layout)

        def take(event: Event) -> None:
            record.add(event)
            if event["event"] == "begun":
                self._display.begin(name, event["name"], event["num_iterations"])
            elif event["event"] == "iteration":
                self._display.iterate(event["loss"])
            elif event["event"] == "ended":
                self._display.end()

        self._display.begin(name, f"start {layout.num_ranks} processes")
        try:
            self._run_task(task, take, _START_TIMEOUT_S)
        except RankError as error:
            raise RankError(f"{layout}: {error}") from error
        return record

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
        numbers = list(losses or ())
        self._steps.add_row(
            step,
            name,
            f"{numbers[0]}-{numbers[-1]}" if numbers else "",
            f"{seconds:.1f}",
            _loss_change(list((losses or {}).values())),
            "" if source is None else bytes_text(_size(source)),
        )

    def _show(self, seconds: float) -> None:
        console = self._console
        self._steps.caption = f"{seconds:.0f} s in all, with starting the processes"
        console.print()
        console.print(self._steps)
        if self._reading is not None:
            console.print(self._reading)
        console.print(build_comparison_table(self._comparisons))
        if self._keep is not None:
            size = bytes_text(_size(self._checkpoint))
            console.print(f"The checkpoint stays in {self._checkpoint} ({size}).", markup=False)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _loss_change(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _reading_table(layout: ParallelLayout, read: Sequence[int], filled: Sequence[int]) -> Table:
    """Bytes that each rank of a data-parallel group read from storage, and has got."""
    table = _table(f"Two-stage load at {layout}: read once, sent on", ("bytes",))
    table.caption = (
        f"{bytes_text(sum(read))} read by all {len(read)} ranks together; each for itself, they "
        f"would have read {bytes_text(sum(filled))}"
    )
    for rank in range(len(read)):
        table.add_column(f"rank {rank}", justify="right", no_wrap=True)
    table.add_row("read from storage", *map(bytes_text, read))
    table.add_row("loaded", *map(bytes_text, filled))
    return table


def build_comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Whether each resumed state is the one that was saved, kind by kind."""
    kinds = list(dict.fromkeys(a.kind for c in comparisons for a in c.agreements))
    table = _table("Bit-identical with the tensors before the save", ("read by", *kinds))
    table.add_column("loss diff", justify="right", no_wrap=True)
    for comparison in comparisons:
        cells = {agreement.kind: str(agreement) for agreement in comparison.agreements}
        table.add_row(
            comparison.name,
            *(cells.get(kind, "") for kind in kinds),
            f"{comparison.loss_difference:.4f}",
        )
    return table


class _PhaseDisplay:
    """One live line per phase with its iterations and loss; plain lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]done"),
            TextColumn("{task.fields[layout]}", style="cyan"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}", style="magenta"),
            console=console,
            disable=not console.is_terminal,
        )
        self._line: TaskID | None = None
        self._label = ""
        self._began = 0.0
        self._losses: list[float] = []

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()
        self._progress.stop()

    def begin(self, layout: str, name: str, num_iterations: int | None = None) -> None:
        """Show a new phase; the one before it is over.

        Args:
            layout: of the ranks.
            name: of the phase.
            num_iterations: training iterations in it, None where it has none.
        """
        self.end()
        self._label, self._losses = f"{layout:<16} {name:<28}", []
        self._began = time.monotonic()
        self._line = self._progress.add_task(name, total=num_iterations, layout=layout, loss="")

    def iterate(self, loss: float) -> None:
        """One iteration more, with its loss."""
        self._losses.append(loss)
        if self._line is not None:
            self._progress.update(self._line, advance=1, loss=_loss_change(self._losses))

    def end(self) -> None:
        """The current phase is over."""
        if self._line is None:
            return
        self._progress.update(self._line, total=1, completed=1)
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._began
            loss = _loss_change(self._losses)
            self._console.print(f"{self._label} {seconds:6.1f} s  {loss}", highlight=False)
        self._line = None
