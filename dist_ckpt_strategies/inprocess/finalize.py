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
    """Resets global state of Megatron-Core, Transformer Engine and a trainer, if imported.

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
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        torch = sys.modules.get("torch")
        has_cuda = torch is not None and torch.cuda.is_initialized()
        cuda = int(torch.cuda.memory_allocated()) if torch is not None and has_cuda else 0
        return cls(int(pages) * os.sysconf("SC_PAGE_SIZE"), cuda)

    def log(self, attempt: int, first: MemoryStatus) -> None:
        """Log it, with a warning if it is above ``first`` by more than allocators vary."""
        pairs = ((self.resident, first.resident), (self.cuda, first.cuda))
        if any(now > _TOLERANCE * then + _SLACK_BYTES for now, then in pairs):
            logger.warning("memory grows: %s after attempt %d, %s at first", self, attempt, first)
        else:
            logger.info("after attempt %d: %s", attempt, self)

    def has_leftovers(self, before: MemoryStatus) -> bool:
        """Whether an attempt has left so much behind that collecting its cycles is worth it."""
        grown = max(self.resident - before.resident, self.cuda - before.cuda)
        return grown > _LEFTOVER_BYTES

    def __str__(self) -> str:
        """In MiB."""
        return f"{self.resident >> 20} MiB resident, {self.cuda >> 20} MiB of CUDA memory"


def give_back_free_memory() -> None:
    """Have glibc return freed memory to the system.

    Each attempt allocates its model anew, from other threads, and glibc keeps the holes: without
    this a process grew by some megabytes with each restart.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
