"""``dist-ckpt demo``: train a GPT, save it as Zarr, resume it in other parallel layouts.

Four ranks on the CPU train a Megatron-Core GPTModel on real text, save through Megatron's own
``dist_checkpointing.save`` and go on. Then four new processes, in another parallel layout, load
the checkpoint and go on too: their state must be bit-identical, and their loss the same.
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dist_ckpt_strategies.cli.demo_array import ArrayView, read_with_tensorstore
from dist_ckpt_strategies.cli.demo_digest import compare_digests
from dist_ckpt_strategies.cli.demo_events import (
    GOLDEN,
    LOAD,
    RESUME,
    SAVE,
    TRAIN,
    TRAIN_ON,
    Event,
    GoldenCompared,
    IterationDone,
    PhaseBegun,
)
from dist_ckpt_strategies.cli.demo_ranks import run_task
from dist_ckpt_strategies.cli.demo_report import (
    PhaseDisplay,
    Row,
    StartRecord,
    build_table,
    describe_agreements,
    format_bytes,
    largest_difference,
)
from dist_ckpt_strategies.cli.demo_task import (
    DemoError,
    ParallelLayout,
    RankTask,
    Role,
    Training,
)

_TRAIN_LAYOUT = ParallelLayout(tp=2, dp=2)
_RESUME_LAYOUTS = (ParallelLayout(tp=4, dp=1), ParallelLayout(tp=1, dp=2, pp=2))
_GOLDEN_NAME = "m0123_tp4_modelonly"
_ARRAY_KEY = "decoder.layers.mlp.linear_fc2.weight"
_TENSORSTORE = "tensorstore"
_LOSS_TOLERANCE = 0.02
_START_TIMEOUT_S = 240.0
_STATUS_FAILED = 1
_STATUS_INTERRUPTED = 130


def run_demo(keep: Path | None, console: Console, *, training: Training | None = None) -> int:
    """Run the demonstration; 0 if every step went well, else what failed has been shown.

    Args:
        keep: directory in which the checkpoint stays; it must be empty or not exist. None: the
            checkpoint is removed at the end.
        console: where progress and the table are shown.
        training: sizes and number of iterations, smaller in tests.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dist-ckpt-demo-") as scratch:
            _Demo(Path(scratch), keep, console, training or Training()).run()
    except (DemoError, OSError) as error:
        console.print("[bold red]The demonstration failed.[/]")
        console.print(str(error), markup=False, highlight=False)
        return _STATUS_FAILED
    except KeyboardInterrupt:
        console.print("[bold red]Interrupted.[/] All ranks have been stopped.")
        return _STATUS_INTERRUPTED
    return 0


class _Demo:
    """The steps of the demonstration, and the rows that they add to the final table."""

    def __init__(
        self, scratch: Path, keep: Path | None, console: Console, training: Training
    ) -> None:
        self._scratch = scratch
        self._keep = keep
        self._checkpoint = (keep or scratch / "checkpoint").resolve()
        self._console = console
        self._display = PhaseDisplay(console)
        self._training = training
        self._rows: list[Row] = []
        self._findings: list[str] = []

    def run(self) -> None:
        """All steps, then the table.

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
        self._rows += [
            Row(TRAIN, layout, seconds[TRAIN], before),
            Row(SAVE, layout, seconds[SAVE], nbytes=_size(self._checkpoint)),
            Row(TRAIN_ON, layout, seconds[TRAIN_ON], after),
        ]
        if before[-1][1] >= before[0][1]:
            self._findings.append(f"the loss did not fall in {num_before} iterations")
        return record

    def _resume(self, layout: ParallelLayout, reference: StartRecord, golden: Path | None) -> None:
        """Load in new processes and another layout, compare, and train on."""
        record = self._start(Role.RESUME, layout, golden)
        self._add_load(record, reference)
        difference = largest_difference(reference.losses, record.losses)
        verdict = f"loss within {difference:.4f} of the uninterrupted run"
        losses = tuple(sorted(record.losses.items()))
        self._rows.append(Row(RESUME, str(layout), record.seconds[RESUME], losses, verdict=verdict))
        if difference > _LOSS_TOLERANCE:
            self._findings.append(f"{layout}: {verdict}, expected {_LOSS_TOLERANCE}")
        if record.golden is not None:
            self._add_golden(record, record.golden)

    def _add_load(self, record: StartRecord, reference: StartRecord) -> None:
        agreements = compare_digests(reference.digests, record.digests)
        verdict = describe_agreements(agreements)
        nbytes = _size(self._checkpoint)
        seconds = record.seconds[LOAD]
        self._rows.append(Row(LOAD, str(record.layout), seconds, nbytes=nbytes, verdict=verdict))
        for agreement in agreements:
            self._expect_none_differ(f"{record.layout}: {agreement.kind}", agreement.differing)

    def _add_golden(self, record: StartRecord, found: GoldenCompared) -> None:
        answer = "[red]NO[/]" if found.differing else "[green]yes[/]"
        num_equal = found.num_arrays - len(found.differing)
        verdict = f"bit-identical: {answer} ({num_equal} of {found.num_arrays} weights)"
        step = "load what Megatron-Core 0.12.3 wrote at TP4"
        self._rows.append(Row(step, str(record.layout), record.seconds[GOLDEN], verdict=verdict))
        self._expect_none_differ("golden checkpoint", found.differing)

    def _expect_none_differ(self, what: str, differing: tuple[str, ...]) -> None:
        if differing:
            self._findings.append(f"{what}: not bit-identical: {', '.join(differing)}")

    def _read_one_array(self, reference: StartRecord) -> ArrayView:
        """Open an array as anyone would who does not have this package."""
        step = "open one array"
        self._display.begin(_TENSORSTORE, step)
        began = time.monotonic()
        view = read_with_tensorstore(self._checkpoint, _ARRAY_KEY)
        seconds = time.monotonic() - began
        same = view.digest == reference.digests.get(_ARRAY_KEY)
        self._expect_none_differ(_TENSORSTORE, () if same else (_ARRAY_KEY,))
        verdict = f"bit-identical: {'[green]yes[/]' if same else '[red]NO[/]'}"
        self._rows.append(Row(step, _TENSORSTORE, seconds, nbytes=view.nbytes, verdict=verdict))
        return view

    def _start(self, role: Role, layout: ParallelLayout, golden: Path | None) -> StartRecord:
        """Start the ranks afresh and wait until all have ended; what they reported.

        Raises:
            DemoError: a rank failed, or they took too long.
        """
        scratch = self._scratch / f"{role}-{layout.tp}-{layout.dp}-{layout.pp}"
        scratch.mkdir()
        task = RankTask(role, layout, self._training, self._checkpoint, scratch, golden=golden)
        record = StartRecord(layout)
        self._display.begin(str(layout), f"start {layout.num_ranks} processes")
        try:
            run_task(task, lambda event: self._take(event, record), _START_TIMEOUT_S)
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
        console.print(build_table(self._rows, seconds))
        if self._keep is not None:
            size = format_bytes(_size(self._checkpoint))
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
