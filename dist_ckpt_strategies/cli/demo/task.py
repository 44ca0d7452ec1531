"""The demonstration's task for its ranks, and its outcome, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FULLY_RESHARDABLE = "fully_reshardable"


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
        """Such as ``TP2 x DP2``; sizes of 1 are left out where TP says enough."""
        pipeline = f" x PP{self.pp}" if self.pp > 1 else ""
        return f"TP{self.tp} x DP{self.dp}{pipeline}"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a SwiGLU GPT with learned positions and an untied output layer."""

    num_layers: int = 4
    hidden: int = 256
    num_heads: int = 8
    num_query_groups: int = 4
    ffn_hidden: int = 512
    vocab: int = 256
    sequence_length: int = 64


@dataclass(frozen=True, slots=True)
class Training:
    """How the demonstration trains, counted in iterations and sequences.

    Attributes:
        size: the model's sizes.
        global_batch: sequences per iteration, over all data-parallel ranks.
        num_before_save: iterations before the checkpoint.
        num_after_save: iterations after it, done once without a break and once per resumption.
        peak_learning_rate: reached after a tenth of all iterations, then falling.
        sharding_type: Megatron's name for the form that the optimizer's state has on disk.
    """

    size: ModelSize = field(default_factory=ModelSize)
    global_batch: int = 16
    num_before_save: int = 50
    num_after_save: int = 10
    peak_learning_rate: float = 3e-3
    sharding_type: str = FULLY_RESHARDABLE


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of all ranks of one start.

    Attributes:
        layout: the parallel layout of this start.
        training: the same for every start.
        checkpoint: the directory that is saved to or loaded from.
        resumes: load the checkpoint and train on; else train, save and train on.
        two_stage: each data-parallel group reads each byte once; else every rank reads its own.
    """

    layout: ParallelLayout
    training: Training
    checkpoint: Path
    resumes: bool = False
    two_stage: bool = False


@dataclass(slots=True)
class Outcome:
    """What the ranks of one start have done.

    Attributes:
        seconds: duration of each step, by name.
        iterations: of each step that trained.
        losses: by iteration.
        digests: of the state saved or loaded, by key; on rank 0 alone.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    iterations: dict[str, range] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
