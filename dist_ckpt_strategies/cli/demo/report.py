"""What the demonstration shows: phases while they run, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dist_ckpt_strategies.cli.demo.digest import Agreement
from dist_ckpt_strategies.cli.demo.events import (
    DigestsTaken,
    Event,
    GoldenCompared,
    IterationDone,
    PhaseBegun,
    PhaseEnded,
    ReadingShared,
)
from dist_ckpt_strategies.cli.demo.task import ParallelLayout
from dist_ckpt_strategies.cli.text import bytes_text


@dataclass(slots=True)
class StartRecord:
    """What one start of the ranks has reported so far.

    Attributes:
        layout: its parallel layout.
        seconds: duration of each finished phase, by name.
        losses: by iteration.
        digests: of the state saved or loaded, by key.
        golden: the comparison with the golden checkpoint, where there was one.
        reading: who read how much, where the ranks shared the reading.
    """

    layout: ParallelLayout
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    golden: GoldenCompared | None = None
    reading: ReadingShared | None = None

    def losses_between(self, first: int, end: int) -> tuple[tuple[int, float], ...]:
        """(iteration, loss) from ``first`` to before ``end``, in order."""
        return tuple((i, loss) for i, loss in sorted(self.losses.items()) if first <= i < end)

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case PhaseEnded(name, seconds):
                self.seconds[name] = seconds
            case IterationDone(iteration, loss):
                self.losses[iteration] = loss
            case DigestsTaken(digests):
                self.digests = digests
            case GoldenCompared():
                self.golden = event
            case ReadingShared():
                self.reading = event
            case PhaseBegun():
                pass


class PhaseDisplay:
    """One live line per phase with its iterations and loss; plain lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]done"),
            TextColumn("{task.fields[who]}", style="cyan"),
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
        """Start the live lines."""
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop them; what they show last stays."""
        self.end()
        self._progress.stop()

    def begin(self, who: str, name: str, num_iterations: int | None = None) -> None:
        """Show a new phase; the one before it is over.

        Args:
            who: the parallel layout, or which library.
            name: what is done.
            num_iterations: training iterations in it, None where it has none.
        """
        self.end()
        self._label, self._losses = f"{who:<16} {name:<28}", []
        self._began = time.monotonic()
        self._line = self._progress.add_task(name, total=num_iterations, who=who, loss="")

    def iterate(self, loss: float) -> None:
        """One iteration more, with its loss."""
        self._losses.append(loss)
        if self._line is not None:
            self._progress.update(self._line, advance=1, loss=_loss_change(self._losses))

    def end(self) -> None:
        """The phase that was begun last is over."""
        if self._line is None:
            return
        self._progress.update(self._line, total=1, completed=1)
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._began
            loss = _loss_change(self._losses)
            self._console.print(f"{self._label} {seconds:6.1f} s  {loss}", highlight=False)
        self._line = None


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the table of steps; cells stay empty where a column does not apply.

    Attributes:
        name: what was done.
        who: the parallel layout, or which library.
        seconds: what it took.
        losses: (iteration, loss) in order.
        nbytes: bytes written or read.
    """

    name: str
    who: str
    seconds: float
    losses: tuple[tuple[int, float], ...] = ()
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table of comparisons.

    Attributes:
        who: what was compared with the tensors before the save.
        agreements: how many tensors of each kind are bit-identical.
        loss_difference: largest difference of loss at the same iteration, where it trained on.
    """

    who: str
    agreements: tuple[Agreement, ...]
    loss_difference: float | None = None


def largest_difference(reference: Mapping[int, float], found: Mapping[int, float]) -> float:
    """Largest difference of loss at the same iteration, over the iterations of ``found``.

    Args:
        reference: loss by iteration.
        found: loss by iteration, of another run; not empty.
    """
    return max(abs(loss - reference[iteration]) for iteration, loss in found.items())


def build_step_table(steps: Sequence[Step], seconds: float) -> Table:
    """What was done and what it took.

    Args:
        steps: its lines, in order.
        seconds: what everything took, process starts included.
    """
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title='Backend ("zarr", 1) on Megatron-Core',
    )
    table.caption = f"{seconds:.0f} s in all, with starting the processes"
    for name in ("step", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("iteration", "seconds", "loss", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.name,
            step.who,
            f"{step.losses[0][0]}-{step.losses[-1][0]}" if step.losses else "",
            f"{step.seconds:.1f}",
            _loss_change([loss for _, loss in step.losses]),
            bytes_text(step.nbytes) if step.nbytes is not None else "",
        )
    return table


def build_reading_table(layout: ParallelLayout, reading: ReadingShared) -> Table:
    """What each rank of a data-parallel group read from storage, and what it has got.

    Args:
        layout: the parallel layout of these ranks.
        reading: bytes by rank.
    """
    num_ranks, total = len(reading.read_nbytes), sum(reading.read_nbytes)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=f"Two-stage load at {layout}: read once, sent on",
    )
    table.caption = (
        f"{bytes_text(total)} read by all {num_ranks} ranks together; each for itself, they would "
        f"have read {bytes_text(sum(reading.filled_nbytes))}"
    )
    table.add_column("bytes", no_wrap=True)
    for rank in range(num_ranks):
        table.add_column(f"rank {rank}", justify="right", no_wrap=True)
    table.add_row("read from storage", *map(bytes_text, reading.read_nbytes))
    table.add_row("loaded", *map(bytes_text, reading.filled_nbytes))
    return table


def build_comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Whether what was read is what was in memory, kind by kind.

    Args:
        comparisons: its lines, in order.
    """
    kinds = list(dict.fromkeys(a.kind for c in comparisons for a in c.agreements))
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="Bit-identical with the tensors before the save",
    )
    table.caption = "The golden checkpoint was written by Megatron-Core 0.12.3 at TP4."
    table.add_column("read by", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, no_wrap=True)
    table.add_column("loss diff", justify="right", no_wrap=True)
    for comparison in comparisons:
        cells = {a.kind: _answer(a) for a in comparison.agreements}
        difference = comparison.loss_difference
        table.add_row(
            comparison.who,
            *(cells.get(kind, "") for kind in kinds),
            "" if difference is None else f"{difference:.4f}",
        )
    return table


def _answer(agreement: Agreement) -> str:
    """Such as ``yes 17/17``."""
    num_differing = len(agreement.differing)
    num_all = max(agreement.num_expected, num_differing)
    word = "[red]NO[/]" if num_differing else "[green]yes[/]"
    return f"{word} {num_all - num_differing}/{num_all}"


def _loss_change(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""
