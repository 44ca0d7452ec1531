"""What is cleaned up between two attempts, once nothing of the block is running any more."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.inprocess.health_check import HPState

logger = logging.getLogger(__name__)

_TOLERANCE = 1.2
_SLACK_BYTES = 256 << 20
_LEFTOVER_BYTES = 32 << 20


class Finalize(ABC):
    """A step between two attempts, in the main thread. It may be called again."""

    @abstractmethod
    def __call__(self, *a: Any, **kw: Any) -> Any:
        """Clean up; given the state, returns it."""


class CheckpointlessFinalizeCleanup(Finalize):
    """Megatron-Core's, Transformer Engine's and a trainer's leavings, where they are imported.

    Attributes:
        trainer: see ``register_attributes``; forgotten after each call.
    """

    def __init__(self) -> None:
        self.trainer: Any = None

    def __call__(self, *a: Any, **kw: Any) -> HPState | None:
        """Clean up, in a fixed order; again does nothing more. Returns the state it was given."""
        abort_megatron()
        abort_te()
        cleanup_rope()
        cleanup_ddp()
        self._forget_trainer()
        return a[0] if a else kw.get("state")

    def register_attributes(self, trainer: Any) -> None:
        """Name the trainer whose model, optimizers and loops are let go of."""
        self.trainer = trainer

    def _forget_trainer(self) -> None:
        trainer, self.trainer = self.trainer, None
        strategy = getattr(trainer, "strategy", None)
        for owner, names in (
            (strategy, ("_lightning_module", "_model", "_optimizers", "lr_scheduler_configs")),
            (getattr(trainer, "fit_loop", None), ("_combined_loader", "_data_fetcher")),
        ):
            for name in names:
                _clear(owner, name)


def abort_megatron() -> None:
    """Take Megatron-Core's parallel layout and its global buffers down."""
    if "megatron.core.parallel_state" not in sys.modules:
        return
    from dist_ckpt_strategies.megatron.process_state import (  # noqa: PLC0415 - only if imported
        forget_parallel_layout,
    )

    forget_parallel_layout()


def abort_te() -> None:
    """Let Transformer Engine make its global state anew."""
    fp8 = sys.modules.get("transformer_engine.pytorch.fp8")
    manager = getattr(fp8, "FP8GlobalStateManager", None)
    if manager is not None:
        manager.reset()


def cleanup_rope() -> None:
    """Forget cached rotary embeddings: they may belong to a dead layout."""
    module = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    kind = getattr(module, "RotaryEmbedding", None)
    cached = getattr(getattr(kind, "forward", None), "cache_clear", None)
    if cached is not None:
        cached()


def cleanup_ddp() -> None:
    """Forget the module that torch's DistributedDataParallel takes for the one in forward."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(module, "DistributedDataParallel", None)
    if kind is not None:
        kind._active_ddp_module = None  # noqa: SLF001 - no public way


def release_cached_memory() -> None:
    """Give back what torch's CUDA allocator keeps, where CUDA has been used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _clear(owner: Any, name: str) -> None:
    value = getattr(owner, name, None)
    if isinstance(value, list):
        value.clear()
    elif value is not None:
        setattr(owner, name, None)


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory in use, in bytes.

    Attributes:
        resident: of the host.
        cuda: allocated by torch on the current device; 0 where CUDA has not been used.
    """

    resident: int
    cuda: int

    @classmethod
    def take(cls) -> MemoryStatus:
        """Of now."""
        return cls(_resident_bytes(), _cuda_bytes())

    def has_outgrown(self, first: MemoryStatus) -> bool:
        """Whether it is well above ``first``: more than what allocators vary by."""
        pairs = ((self.resident, first.resident), (self.cuda, first.cuda))
        return any(now > _TOLERANCE * then + _SLACK_BYTES for now, then in pairs)

    def has_leftovers(self, before: MemoryStatus) -> bool:
        """Whether an attempt has left so much behind that collecting its cycles is worth it."""
        grown = max(self.resident - before.resident, self.cuda - before.cuda)
        return grown > _LEFTOVER_BYTES

    def __str__(self) -> str:
        """In MiB."""
        return f"{self.resident >> 20} MiB resident, {self.cuda >> 20} MiB of CUDA memory"


class MemoryLog:
    """Logs memory at each restart, and warns where it grows."""

    def __init__(self) -> None:
        self._first: MemoryStatus | None = None

    def note(self, attempt: int) -> MemoryStatus:
        """Log what is used after ``attempt``; later notes are held against the first."""
        now = MemoryStatus.take()
        if self._first is None:
            self._first = now
        if now.has_outgrown(self._first):
            logger.warning(
                "memory grows: %s after attempt %d, %s at first", now, attempt, self._first
            )
        else:
            logger.info("after attempt %d: %s", attempt, now)
        return now


def give_back_free_memory() -> None:
    """Let the C library return what it keeps of freed memory to the system, where it can.

    Each attempt allocates its model anew, and from other threads. Between what lives longer, glibc
    keeps the holes of all of them: without this a process grew by some megabytes with each restart.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _cuda_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())
