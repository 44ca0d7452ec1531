"""``dist-ckpt demo``: train a GPT, save it as Zarr, resume it in other parallel layouts.

Four ranks on the CPU train a Megatron-Core GPTModel on real text, save through Megatron's own
``dist_checkpointing.save`` and train on. Then four new processes, in another parallel layout, load
the checkpoint and train on too: their state must be bit-identical, and their loss the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from dist_ckpt_strategies.cli.demo.task import Outcome, ParallelLayout, RankTask, Training
from dist_ckpt_strategies.cli.ranks import Event, RankError, run_ranks
from dist_ckpt_strategies.cli.render import Table, bytes_text, print_table
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.errors import CheckpointExistsError

_TRAIN_LAYOUT = ParallelLayout(tp=2, dp=2)
_RESUMED_LAYOUTS = (ParallelLayout(tp=4), ParallelLayout(dp=2, pp=2), ParallelLayout(dp=4))
_LOSS_TOLERANCE = 0.02
_TIMEOUT_S = 120.0
_WEIGHTS = "weights"
_OPTIMIZER_PREFIX = "optimizer.state."
_KIND_NAMES = {"param": "fp32 master", "fp32_param": "fp32 master"}

TaskRunner = Callable[[RankTask, Callable[[Event], None]], Outcome]
"""Carries out a task, calling with each event."""


def run_task(task: RankTask, on_event: Callable[[Event], None]) -> Outcome:
    """Carry out a task with one new process per rank of its layout.

    Raises:
        RankError: a rank failed, or there was no event for too long.
    """
    outcome: Outcome = run_ranks(
        "dist_ckpt_strategies.cli.demo.worker:carry_out",
        task,
        task.layout.num_ranks,
        timeout_s=_TIMEOUT_S,
        on_event=on_event,
        silence_s=2 * _TIMEOUT_S,
    )
    return outcome


def compare_digests(
    expected: Mapping[str, str], found: Mapping[str, str]
) -> dict[str, tuple[int, list[str]]]:
    """How two states compare, by kind of tensor: weights first, then the optimizer's by name.

    Args:
        expected: digest of every global tensor, by key.
        found: the same, of the other state.

    Returns:
        For each kind the number of tensors, and the keys of those that differ or are in one state
        alone.
    """
    kinds: dict[str, list[str]] = {_WEIGHTS: []}
    for key in sorted(expected.keys() | found.keys()):
        name = key.removeprefix(_OPTIMIZER_PREFIX).split(".", 1)[0]
        is_weight = not key.startswith(_OPTIMIZER_PREFIX)
        kinds.setdefault(_WEIGHTS if is_weight else _KIND_NAMES.get(name, name), []).append(key)
    return {
        kind: (len(keys), [key for key in keys if expected.get(key) != found.get(key)])
        for kind, keys in kinds.items()
    }


def largest_difference(reference: Mapping[int, float], found: Mapping[int, float]) -> float:
    """Largest difference of loss at the same iteration, over the iterations of ``found``."""
    return max(abs(loss - reference[iteration]) for iteration, loss in found.items())


def run_demo(
    keep: Path | None,
    console: Console,
    *,
    training: Training | None = None,
    start: TaskRunner = run_task,
) -> Status:
    """Run the demonstration; what went wrong is shown.

    Args:
        keep: directory in which the checkpoint stays. None: it is removed at the end.
        console: where progress and the tables are shown.
        training: sizes and number of iterations, smaller in tests.
        start: carries out one task, in new processes.

    Raises:
        CheckpointExistsError: there are files in ``keep``.
    """
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-demo-") as scratch:
        checkpoint = (keep or Path(scratch)).resolve()
        checkpoint.mkdir(parents=True, exist_ok=True)
        if any(checkpoint.iterdir()):
            raise CheckpointExistsError(
                f"{checkpoint}: expected a new or empty directory, found files in it",
                path=str(checkpoint),
            )
        demo = _Demo(checkpoint, console, training or Training(), start)
        try:
            demo.run()
        except RankError as error:
            demo.problems += [str(error), *getattr(error, "__notes__", ())]
        if keep is not None:
            console.print(f"The checkpoint stays in {checkpoint}.", markup=False)
    if demo.problems:
        console.print("[bold red]The demonstration failed.[/]")
        console.print("\n".join(demo.problems), markup=False, highlight=False)
    return Status.DAMAGED if demo.problems else Status.FINE


class _Demo:
    """The steps of the demonstration, and the tables at the end."""

    def __init__(
        self, checkpoint: Path, console: Console, training: Training, start: TaskRunner
    ) -> None:
        self._checkpoint = checkpoint
        self._console = console
        self._training = training
        self._run_task = start
        self._steps: list[tuple[str, ...]] = []
        self.problems: list[str] = []

    def run(self) -> None:
        """All steps, then the tables.

        Raises:
            RankError: a rank failed.
        """
        reference = self._start(RankTask(_TRAIN_LAYOUT, self._training, self._checkpoint))
        num_before = self._training.num_before_save
        if reference.losses[num_before - 1] >= reference.losses[0]:
            self.problems.append(f"the loss did not fall in {num_before} iterations")
        compared = [self._resume(layout, reference) for layout in _RESUMED_LAYOUTS]
        titles = ("step", "layout", "iteration", "seconds", "loss", "size")
        self._console.print('\nBackend ("zarr", 1) on Megatron-Core', highlight=False)
        print_table(self._console, Table(titles, tuple(self._steps), titles[2:]))
        self._console.print("\nBit-identical with the tensors before the save")
        rows = tuple(tuple(row.values()) for row in compared)
        marked = {number for number, row in enumerate(rows) if "NO" in " ".join(row)}
        print_table(self._console, Table(tuple(compared[0]), rows, ("loss diff",), marked))

    def _resume(self, layout: ParallelLayout, reference: Outcome) -> dict[str, str]:
        """Load in new processes and another layout, train on, and compare; a row of the table."""
        two_stage = layout is _RESUMED_LAYOUTS[-1]
        found = self._start(
            RankTask(layout, self._training, self._checkpoint, resumes=True, two_stage=two_stage)
        )
        row = {"read by": str(layout)}
        for kind, (count, differing) in compare_digests(reference.digests, found.digests).items():
            row[kind] = f"{'NO' if differing else 'yes'} {count - len(differing)}/{count}"
            if differing:
                keys = ", ".join(differing)
                self.problems.append(f"{layout}: {kind}: not bit-identical: {keys}")
        difference = largest_difference(reference.losses, found.losses)
        if not difference <= _LOSS_TOLERANCE:
            self.problems.append(
                f"{layout}: the loss differs by {difference:.4f} from the uninterrupted run, "
                f"expected at most {_LOSS_TOLERANCE}"
            )
        return row | {"loss diff": f"{difference:.4f}"}

    def _start(self, task: RankTask) -> Outcome:
        """Start the ranks afresh and wait until all have ended; adds a row for each step."""
        console, layout = self._console, task.layout
        live: Any = console.status(f"{layout}: start {layout.num_ranks} processes")

        def show(event: Event) -> None:
            """The phase in a live line, and each that is over in a line of its own."""
            if "seconds" in event:
                line = f"{layout!s:<16} {event['event']:<20} {event['seconds']:6.1f} s"
                console.print(line, highlight=False)
            else:
                live.update(f"{layout}: {event['event']}")

        try:
            with live if console.is_terminal else nullcontext():
                outcome = self._run_task(task, show)
        except RankError as error:
            error.args = (f"{layout}: {error.message}",)
            raise
        files = (path for path in self._checkpoint.rglob("*") if path.is_file())
        size = bytes_text(sum(path.stat().st_size for path in files))
        for step, seconds in outcome.seconds.items():
            iterations, losses = outcome.iterations.get(step, ()), outcome.losses
            numbers, loss = "", ""
            if iterations:
                first, last = iterations[0], iterations[-1]
                numbers, loss = f"{first}-{last}", f"{losses[first]:.3f} -> {losses[last]:.3f}"
            row = (step, str(layout), numbers, f"{seconds:.1f}", loss, "" if iterations else size)
            self._steps.append(row)
        return outcome
