"""``dist-ckpt demo``: train a GPT, save it as packs, resume it in other parallel layouts.

Four ranks on the CPU train a Megatron-Core GPTModel on real text, save through Megatron's own
``dist_checkpointing.save`` and train on. Then four new processes, in another parallel layout, load
the checkpoint and train on too: their state must be bit-identical, and their loss the same.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dist_ckpt_strategies.cli.ranks import RankError, run_ranks
from dist_ckpt_strategies.cli.render import print_table
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.errors import CheckpointExistsError

_RANK_MODULE = "dist_ckpt_strategies.cli.demo.rank"
FULLY_RESHARDABLE = "fully_reshardable"
_LOSS_TOLERANCE = 0.02
_WEIGHTS = "weights"
_OPTIMIZER_PREFIX = "optimizer.state."
_KIND_NAMES = {"param": "fp32 master", "fp32_param": "fp32 master"}


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the tensor-, data- and pipeline-parallel groups; their product is all ranks."""

    tp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """All ranks that the layout takes."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        """Such as ``TP2 x DP2``."""
        pipeline = f" x PP{self.pp}" if self.pp > 1 else ""
        return f"TP{self.tp} x DP{self.dp}{pipeline}"


_TRAIN_LAYOUT = ParallelLayout(tp=2, dp=2)
_RESUMED_LAYOUTS = (ParallelLayout(tp=4), ParallelLayout(dp=2, pp=2), ParallelLayout(dp=4))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a SwiGLU GPT with learned positions."""

    num_layers: int = 4
    hidden: int = 256
    num_heads: int = 8
    num_query_groups: int = 4
    ffn_hidden: int = 512
    vocab: int = 256
    sequence_length: int = 64
    ties_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """The training of the demonstration; ``global_batch`` counts sequences of all ranks.

    ``num_after_save`` iterations are done once without a break and once per resumption.
    ``sharding_type`` is Megatron's name for the form of the optimizer's state on disk; what is
    saved is version 1 of ``backend``.
    """

    size: ModelSize = field(default_factory=ModelSize)
    global_batch: int = 16
    num_before_save: int = 50
    num_after_save: int = 10
    sharding_type: str = FULLY_RESHARDABLE
    backend: str = "safetensors"


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of all ranks of one start.

    They load the checkpoint and train on if ``resumes``, else train, save and train on. In a
    ``two_stage`` load each data-parallel group reads each byte once; else every rank its own.
    """

    layout: ParallelLayout
    training: Training
    checkpoint: Path
    resumes: bool = False
    two_stage: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses by iteration, and on rank 0 digests by key of the state saved or loaded."""

    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def run_task(task: RankTask) -> Outcome:
    """Carry out a task with one new process per rank of its layout; rank 0 prints its steps.

    Raises:
        RankError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-demo-") as scratch:
        task_path, outcome_path = Path(scratch, "task"), Path(scratch, "outcome")
        task_path.write_bytes(pickle.dumps(task))
        paths = [str(task_path), str(outcome_path)]
        try:
            status = run_ranks(task.layout.num_ranks, _RANK_MODULE, paths)
        except RankError as error:
            error.args = (f"{task.layout}: {error.message}",)
            raise
        if status:
            raise RankError(f"{task.layout}: rank 0 failed (exit status {status}), see above")
        outcome: Outcome = pickle.loads(outcome_path.read_bytes())  # noqa: S301 - our own
    return outcome


def compare_digests(
    expected: Mapping[str, str], found: Mapping[str, str]
) -> dict[str, tuple[int, list[str]]]:
    """By kind, weights first: number of tensors, and keys that differ or are in one state alone."""
    kinds: dict[str, list[str]] = {_WEIGHTS: []}
    for key in sorted(expected.keys() | found.keys()):
        name = key.removeprefix(_OPTIMIZER_PREFIX).split(".", 1)[0]
        is_weight = not key.startswith(_OPTIMIZER_PREFIX)
        kinds.setdefault(_WEIGHTS if is_weight else _KIND_NAMES.get(name, name), []).append(key)
    return {
        kind: (len(keys), [key for key in keys if expected.get(key) != found.get(key)])
        for kind, keys in kinds.items()
    }


def run_demo(
    keep: Path | None,
    console: Console,
    *,
    training: Training | None = None,
    start: Callable[[RankTask], Outcome] = run_task,
) -> Status:
    """Run the demonstration; what went wrong is shown. The checkpoint stays only in ``keep``.

    ``start`` carries out one task, in new processes. Sizes of ``training`` are smaller in tests.
    """
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-demo-") as scratch:
        checkpoint = (keep or Path(scratch)).resolve()
        checkpoint.mkdir(parents=True, exist_ok=True)
        if any(checkpoint.iterdir()):
            raise CheckpointExistsError(
                f"{checkpoint}: expected a new or empty directory, found files in it",
                path=str(checkpoint),
            )
        problems: list[str] = []
        try:
            _train_and_resume(checkpoint, console, training or Training(), start, problems)
        except RankError as error:
            problems += [str(error), *getattr(error, "__notes__", ())]
        if keep is not None:
            console.print(f"The checkpoint stays in {checkpoint}.", markup=False)
    if problems:
        console.print("[bold red]The demonstration failed.[/]")
        console.print("\n".join(problems), markup=False, highlight=False)
    return Status.DAMAGED if problems else Status.FINE


def _train_and_resume(
    checkpoint: Path,
    console: Console,
    training: Training,
    start: Callable[[RankTask], Outcome],
    problems: list[str],
) -> None:
    """All steps, a line for each, and the table; ``problems`` gets what is not as it should be.

    Raises:
        RankError: a rank failed.
    """
    reference = start(RankTask(_TRAIN_LAYOUT, training, checkpoint))
    num_before = training.num_before_save
    if reference.losses[num_before - 1] >= reference.losses[0]:
        problems.append(f"the loss did not fall in {num_before} iterations")
    table: list[dict[str, str]] = []
    for layout in _RESUMED_LAYOUTS:
        two_stage = layout is _RESUMED_LAYOUTS[-1]
        task = RankTask(layout, training, checkpoint, resumes=True, two_stage=two_stage)
        outcome = start(task)
        row = {"read by": str(layout)}
        for kind, (count, differing) in compare_digests(reference.digests, outcome.digests).items():
            row[kind] = f"{'NO' if differing else 'yes'} {count - len(differing)}/{count}"
            if differing:
                problems.append(f"{layout}: {kind}: not bit-identical: {', '.join(differing)}")
        apart = max(abs(loss - reference.losses[n]) for n, loss in outcome.losses.items())
        table.append(row | {"loss diff": f"{apart:.4f}"})
        if not apart <= _LOSS_TOLERANCE:
            problems.append(
                f"{layout}: the loss differs by {apart:.4f} from the uninterrupted run, "
                f"expected at most {_LOSS_TOLERANCE}"
            )
    console.print(
        f'\nSaved with ("{training.backend}", 1); bit-identical with the tensors before the save:'
    )
    rows = tuple(tuple(row.values()) for row in table)
    marked = {number for number, row in enumerate(rows) if "NO" in " ".join(row)}
    print_table(console, list(table[0]), rows, ("loss diff",), marked)
