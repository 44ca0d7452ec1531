"""What the demonstration shows: phases while they run, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dist_ckpt_strategies.cli.demo_digest import Agreement
from dist_ckpt_strategies.cli.demo_events import (
    DigestsTaken,
    Event,
    GoldenCompared,
    IterationDone,
    PhaseBegun,
    PhaseEnded,
)
from dist_ckpt_strategies.cli.demo_task import ParallelLayout

_UNIT = 1000
_UNITS = ("B", "kB", "MB", "GB")


@dataclass(slots=True)
class StartRecord:
    """What one start of the ranks has reported so far.

    Attributes:
        layout: its parallel layout.
        seconds: duration of each finished phase, by name.
        losses: by iteration.
        digests: of the state saved or loaded, by key.
        golden: the comparison with the golden checkpoint, where there was one.
    """

    layout: ParallelLayout
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    golden: GoldenCompared | None = None

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
class Row:
    """One line of the final table; empty cells where a column does not apply.

    Attributes:
        step: what was done.
        who: the parallel layout, or which library.
        seconds: what it took.
        losses: (iteration, loss) in order.
        nbytes: bytes written or read.
        verdict: what was compared, and how it came out.
    """

    step: str
    who: str
    seconds: float
    losses: tuple[tuple[int, float], ...] = ()
    nbytes: int | None = None
    verdict: str = ""


def describe_agreements(agreements: Sequence[Agreement]) -> str:
    """Such as ``bit-identical: yes (17 weights, 17 exp_avg)``, or ``NO`` and what is equal."""
    equal = {a.kind: a.num_expected - len(a.differing) for a in agreements}
    if any(agreement.differing for agreement in agreements):
        counts = ", ".join(f"{equal[a.kind]} of {a.num_expected} {a.kind}" for a in agreements)
        return f"bit-identical: [red]NO[/] ({counts})"
    counts = ", ".join(f"{count} {kind}" for kind, count in equal.items())
    return f"bit-identical: [green]yes[/] ({counts})"


def largest_difference(reference: Mapping[int, float], found: Mapping[int, float]) -> float:
    """Largest difference of loss at the same iteration, over the iterations of ``found``.

    Args:
        reference: loss by iteration.
        found: loss by iteration, of another run; not empty.
    """
    return max(abs(loss - reference[iteration]) for iteration, loss in found.items())


def build_table(rows: Sequence[Row], seconds: float) -> Table:
    """The final table.

    Args:
        rows: its lines, in order.
        seconds: what everything took, process starts included.
    """
    table = Table(
        title='Backend ("zarr", 1) on Megatron-Core',
        caption=f"{seconds:.0f} s in all, with starting the processes",
    )
    for name in ("step", "layout"):
        table.add_column(name)
    for name in ("iterations", "seconds", "loss", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compared", ratio=1)
    for row in rows:
        table.add_row(
            row.step,
            row.who,
            f"{row.losses[0][0]}-{row.losses[-1][0]}" if row.losses else "",
            f"{row.seconds:.1f}",
            _loss_change([loss for _, loss in row.losses]),
            format_bytes(row.nbytes) if row.nbytes is not None else "",
            row.verdict,
        )
    return table


def format_bytes(nbytes: int) -> str:
    """Such as ``38.1 MB``, in powers of ten."""
    amount = float(nbytes)
    for unit in _UNITS[:-1]:
        if amount < _UNIT:
            return f"{amount:.3g} {unit}"
        amount /= _UNIT
    return f"{amount:.3g} {_UNITS[-1]}"


def _loss_change(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""
