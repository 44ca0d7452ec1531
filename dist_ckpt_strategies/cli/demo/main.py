"""``dist-ckpt demo``: train a GPT, save it as Zarr, resume it in other parallel layouts.

Four ranks on the CPU train a Megatron-Core GPTModel on real text, save through Megatron's own
``dist_checkpointing.save`` and go on. Then four new processes, in another parallel layout, load
the checkpoint and go on too: their state must be bit-identical, and their loss the same.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dist_ckpt_strategies.cli.demo.array import ArrayView, read_with_tensorstore
from dist_ckpt_strategies.cli.demo.digest import WEIGHTS, Agreement, compare_digests
from dist_ckpt_strategies.cli.demo.events import (
    GOLDEN,
    LOAD,
    RESUME,
    SAVE,
    SAVE_LOCALLY,
    TRAIN,
    TRAIN_ON,
    Event,
    IterationDone,
    PhaseBegun,
    PhaseEnded,
    ReadingShared,
)
from dist_ckpt_strategies.cli.demo.ranks import run_task
from dist_ckpt_strategies.cli.demo.report import (
    Comparison,
    PhaseDisplay,
    StartRecord,
    Step,
    build_comparison_table,
    build_reading_table,
    build_step_table,
    largest_difference,
)
from dist_ckpt_strategies.cli.demo.task import (
    DemoError,
    Loading,
    ParallelLayout,
    RankTask,
    Role,
    Training,
)
from dist_ckpt_strategies.cli.text import bytes_text

_TRAIN_LAYOUT = ParallelLayout(tp=2, dp=2)
_RESUME_LAYOUTS = (ParallelLayout(tp=4, dp=1), ParallelLayout(tp=1, dp=2, pp=2))
_SHARING_LAYOUT = ParallelLayout(tp=1, dp=4)
_LOST_NODE = 1
_RECOVER = "recover"
_LOST_NODE_SUFFIX = ", lost"
_GOLDEN_NAME = "m0123_tp4_modelonly"
_ARRAY_KEY = "decoder.layers.mlp.linear_fc2.weight"
_TENSORSTORE = "tensorstore"
_LOSS_TOLERANCE = 0.02
_START_TIMEOUT_S = 240.0
_STATUS_FAILED = 1
_STATUS_INTERRUPTED = 130

TaskRunner = Callable[[RankTask, Callable[[Event], None], float], None]
"""Carries out a task, calling with each event; the last is ``timeout_s``."""


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
    except (DemoError, OSError) as error:
        console.print("[bold red]The demonstration failed.[/]")
        console.print(str(error), markup=False, highlight=False)
        return _STATUS_FAILED
    except KeyboardInterrupt:
        console.print("[bold red]Interrupted.[/] All ranks have been stopped.")
        return _STATUS_INTERRUPTED
    return 0


class _Demo:
    """The steps of the demonstration, and what they add to the tables at the end."""

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
        self._display = PhaseDisplay(console)
        self._training = training
        self._run_task = start
        self._steps: list[Step] = []
        self._comparisons: list[Comparison] = []
        self._findings: list[str] = []
        self._reading: ReadingShared | None = None

    def run(self) -> None:
        """All steps, then the tables.

        Raises:
            DemoError: a step failed, or something was not as it should be.
        """
        began = time.monotonic()
        _make_empty(self._checkpoint)
        with self._display:
            reference = self._train()
            golden = self._unpack_golden()
            for layout in _RESUME_LAYOUTS:
                # One of the starts is enough for the golden checkpoint: the last.
                last = layout is _RESUME_LAYOUTS[-1]
                self._resume(layout, reference, golden if last else None)
            self._resume(_SHARING_LAYOUT, reference, None, Loading.TWO_STAGE)
            self._lose_node()
            self._resume(_TRAIN_LAYOUT, reference, None, Loading.LOCAL)
            view = self._read_one_array(reference)
        self._show(view, time.monotonic() - began)
        if self._findings:
            raise DemoError("\n".join(self._findings))

    def _train(self) -> StartRecord:
        """Train, save, train on: the reference for everything that follows."""
        record = self._start(Role.TRAIN, _TRAIN_LAYOUT, None)
        layout, seconds = str(_TRAIN_LAYOUT), record.seconds
        num_before = self._training.num_before_save
        before = record.losses_between(0, num_before)
        after = record.losses_between(num_before, num_before + self._training.num_after_save)
        self._steps += [
            Step(TRAIN, layout, seconds[TRAIN], before),
            Step(SAVE, layout, seconds[SAVE], nbytes=_size(self._checkpoint)),
            Step(SAVE_LOCALLY, layout, seconds[SAVE_LOCALLY], nbytes=_size(self._nodes)),
            Step(TRAIN_ON, layout, seconds[TRAIN_ON], after),
        ]
        if before[-1][1] >= before[0][1]:
            self._findings.append(f"the loss did not fall in {num_before} iterations")
        return record

    def _resume(
        self,
        layout: ParallelLayout,
        reference: StartRecord,
        golden: Path | None,
        loading: Loading = Loading.EACH,
    ) -> None:
        """Load in new processes and another layout, compare, and train on."""
        record = self._start(Role.RESUME, layout, golden, loading)
        is_local = loading is Loading.LOCAL
        who = f"{layout}{_LOST_NODE_SUFFIX}" if is_local else str(layout)
        seconds, source = record.seconds, self._nodes if is_local else self._checkpoint
        losses = tuple(sorted(record.losses.items()))
        self._steps += [
            Step(_RECOVER if is_local else LOAD, who, seconds[LOAD], nbytes=_size(source)),
            Step(RESUME, who, seconds[RESUME], losses),
        ]
        agreements = compare_digests(reference.digests, record.digests)
        difference = largest_difference(reference.losses, record.losses)
        self._compare(Comparison(who, agreements, difference))
        self._reading = record.reading or self._reading
        if record.golden is not None:
            self._steps.append(Step(GOLDEN, who, seconds[GOLDEN]))
            found = Agreement(WEIGHTS, record.golden.num_arrays, record.golden.differing)
            self._compare(Comparison("golden checkpoint", (found,)))

    def _lose_node(self) -> None:
        """Remove what one node has on its disk."""
        self._display.begin(str(_TRAIN_LAYOUT), f"lose the disk of node {_LOST_NODE}")
        shutil.rmtree(self._nodes / f"node{_LOST_NODE}")

    def _compare(self, comparison: Comparison) -> None:
        """Add a line to the table, and what is wrong to the findings."""
        self._comparisons.append(comparison)
        for agreement in comparison.agreements:
            if agreement.differing:
                keys = ", ".join(agreement.differing)
                self._findings.append(
                    f"{comparison.who}: {agreement.kind}: not bit-identical: {keys}"
                )
        difference = comparison.loss_difference
        if difference is not None and not difference <= _LOSS_TOLERANCE:
            self._findings.append(
                f"{comparison.who}: the loss differs by {difference:.4f} from the uninterrupted "
                f"run, expected at most {_LOSS_TOLERANCE}"
            )

    def _read_one_array(self, reference: StartRecord) -> ArrayView:
        """Open an array as anyone would who does not have this package."""
        name = "open one array"
        self._display.begin(_TENSORSTORE, name)
        began = time.monotonic()
        view = read_with_tensorstore(self._checkpoint, _ARRAY_KEY)
        seconds = time.monotonic() - began
        self._steps.append(Step(name, _TENSORSTORE, seconds, nbytes=view.nbytes))
        same = view.digest == reference.digests.get(_ARRAY_KEY)
        found = Agreement(WEIGHTS, 1, () if same else (_ARRAY_KEY,))
        self._compare(Comparison("plain tensorstore", (found,)))
        return view

    def _start(
        self,
        role: Role,
        layout: ParallelLayout,
        golden: Path | None,
        loading: Loading = Loading.EACH,
    ) -> StartRecord:
        """Start the ranks afresh and wait until all have ended; what they reported.

        Raises:
            DemoError: a rank failed, or they took too long.
        """
        scratch = self._scratch / f"{role}-{layout.tp}-{layout.dp}-{layout.pp}"
        scratch.mkdir()
        task = RankTask(
            role,
            layout,
            self._training,
            self._checkpoint,
            scratch,
            loading=loading,
            golden=golden,
            nodes=self._nodes,
        )
        record = StartRecord(layout)
        self._display.begin(str(layout), f"start {layout.num_ranks} processes")
        try:
            self._run_task(task, lambda event: self._take(event, record), _START_TIMEOUT_S)
        except DemoError as error:
            raise DemoError(f"{layout}: {error}") from error
        return record

    def _take(self, event: Event, record: StartRecord) -> None:
        """Keep an event and show it."""
        record.add(event)
        match event:
            case PhaseBegun(name, num_iterations):
                self._display.begin(str(record.layout), name, num_iterations)
            case IterationDone(_, loss):
                self._display.iterate(loss)
            case PhaseEnded():
                self._display.end()

    def _unpack_golden(self) -> Path:
        packed = resources.files("dist_ckpt_strategies.cli") / "data" / f"{_GOLDEN_NAME}.tar.xz"
        with packed.open("rb") as file, tarfile.open(fileobj=file) as archive:
            archive.extractall(self._scratch, filter="data")
        return self._scratch / _GOLDEN_NAME

    def _show(self, view: ArrayView, seconds: float) -> None:
        console = self._console
        console.print()
        console.print(f"One array, opened with plain tensorstore: [bold]{escape(view.key)}[/]")
        console.print(view.metadata, markup=False)
        console.print(f"first values: {view.first_values}", markup=False)
        console.print()
        console.print(build_step_table(self._steps, seconds))
        if self._reading is not None:
            console.print(build_reading_table(_SHARING_LAYOUT, self._reading))
        console.print(build_comparison_table(self._comparisons))
        if self._keep is not None:
            size = bytes_text(_size(self._checkpoint))
            console.print(f"The checkpoint stays in {self._checkpoint} ({size}).", markup=False)


def _make_empty(directory: Path) -> None:
    """Make the directory.

    Raises:
        DemoError: it holds something.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise DemoError(
            f"{directory}: expected a new or empty directory, found files in it",
            path=str(directory),
        )


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
