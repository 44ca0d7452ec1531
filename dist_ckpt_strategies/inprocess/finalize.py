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

import torch

from dist_ckpt_strategies.inprocess.health_check import HPState

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda
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
        trainer, self.trainer = self.trainer, None
        strategy, loop = getattr(trainer, "strategy", None), getattr(trainer, "fit_loop", None)
        for name in ("_lightning_module", "_model", "_optimizers", "lr_scheduler_configs"):
            _clear(strategy, name)
        for name in ("_combined_loader", "_data_fetcher"):
            _clear(loop, name)
        return a[0] if a else kw.get("state")

    def register_attributes(self, trainer: Any) -> None:
        """Name the trainer whose model, optimizers and loops are let go of."""
        self.trainer = trainer


def imported(module: str, name: str) -> Any:
    """What a module calls so, if this process has imported it; else None."""
    return getattr(sys.modules.get(module), name, None)


def abort_megatron() -> None:
    """Take Megatron-Core's parallel layout and its global buffers down."""
    destroy = imported("megatron.core.parallel_state", "destroy_model_parallel")
    if destroy is not None:
        destroy()


def abort_te() -> None:
    """Let Transformer Engine make its global state anew."""
    manager = imported("transformer_engine.pytorch.fp8", "FP8GlobalStateManager")
    if manager is not None:
        manager.reset()


def cleanup_rope() -> None:
    """Forget cached rotary embeddings: they may belong to a dead layout."""
    module = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    kind = imported(module, "RotaryEmbedding")
    clear = getattr(getattr(kind, "forward", None), "cache_clear", None)
    if clear is not None:
        clear()


def cleanup_ddp() -> None:
    """Forget the module that torch's DistributedDataParallel takes for the one in forward."""
    kind = imported("torch.nn.parallel.distributed", "DistributedDataParallel")
    if kind is not None:
        kind._active_ddp_module = None  # noqa: SLF001 - no public way


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
        cuda = _cuda.memory_allocated() if _cuda.is_initialized() else 0
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


def release_free_memory() -> None:
    """Have glibc, and torch's allocator where CUDA has been used, return freed memory.

    Each attempt allocates its model anew, from other threads, and glibc keeps the holes: without
    this a process grew by some megabytes with each restart.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if _cuda.is_initialized():
        _cuda.empty_cache()
