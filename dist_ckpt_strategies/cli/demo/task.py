"""The demonstration's task for its ranks, as plain values that travel to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

ZARR = ("zarr", 1)
LOCAL_REPLICATED = ("local_replicated", 1)
FULLY_RESHARDABLE = "fully_reshardable"


class Role(StrEnum):
    """The purpose of one start of the ranks."""

    TRAIN = "train"
    RESUME = "resume"


class Loading(StrEnum):
    """Who reads the checkpoint."""

    EACH = "every rank reads what it needs"
    TWO_STAGE = "a data-parallel group reads each byte once"
    LOCAL = "every rank reads from its node, and what is lost there from a copy"


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
        role: train and save, or load and resume.
        layout: the parallel layout of this start.
        training: the same for every start.
        backend: the checkpoint's backend and version.
        checkpoint: the directory that is saved to or loaded from.
        scratch: a directory of this start alone: rendezvous, events and failures.
        loading: who reads the checkpoint, where it is loaded.
        nodes: the directory that holds one for each node, where there is a local checkpoint too.
        timeout_s: longest wait for a peer, in seconds.
    """

    role: Role
    layout: ParallelLayout
    training: Training
    checkpoint: Path
    scratch: Path
    backend: tuple[str, int] = ZARR
    loading: Loading = Loading.EACH
    nodes: Path | None = None
    timeout_s: float = 120.0


def local_checkpoint(global_rank: int) -> Path:
    """Where a rank's node has the local checkpoint; every rank is a node of its own here."""
    return Path(f"node{global_rank}") / "checkpoint"
