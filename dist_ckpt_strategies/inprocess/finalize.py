"""Clean-up between two attempts, once nothing of the block runs any more."""

import ctypes
import gc
import logging
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.device import gpu_memory_nbytes, release_gpu_memory
from dist_ckpt_strategies.inprocess.health_check import HPState

logger = logging.getLogger(__name__)

_TOLERANCE = 1.2
_SLACK_BYTES = 256 << 20
_NOT_FREED_BYTES = 32 << 20


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
        """Clean up in a fixed order; idempotent. Returns the state."""
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
        """Set the trainer whose model, optimizers and loops are released."""
        self.trainer = trainer


def imported(module: str, path: str) -> Any:
    """An attribute of a module that this process has imported; else None."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def abort_megatron() -> None:
    """Take Megatron-Core's parallel layout and its global buffers down."""
    _call(imported("megatron.core.parallel_state", "destroy_model_parallel"))


def abort_te() -> None:
    """Let Transformer Engine recreate its global state."""
    _call(imported("transformer_engine.pytorch.fp8", "FP8GlobalStateManager.reset"))


def cleanup_rope() -> None:
    """Forget cached rotary embeddings: they may belong to a dead layout."""
    module = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    _call(imported(module, "RotaryEmbedding.forward.cache_clear"))


def cleanup_ddp() -> None:
    """Forget the module that torch's DistributedDataParallel takes for the one in forward."""
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None  # noqa: SLF001


def _call(reset: Any) -> None:
    if reset is not None:
        reset()


def _clear(owner: Any, name: str) -> None:
    value = getattr(owner, name, None)
    if isinstance(value, list):
        value.clear()
    elif value is not None:
        setattr(owner, name, None)


class ProcessMemory:
    """The memory of this process, from one attempt to the next."""

    def __init__(self) -> None:
        release_free_memory()
        self._before = memory_in_use()
        self._first: tuple[int, int] | None = None

    def release(self) -> None:
        """Have free memory returned. Most of an attempt is freed without the garbage collector.

        That goes through all objects of all libraries, which takes longer than all else that a
        restart does. So it runs only where an attempt has left much behind.
        """
        release_free_memory()
        now = memory_in_use()
        if max(now[0] - self._before[0], now[1] - self._before[1]) > _NOT_FREED_BYTES:
            gc.collect()
            release_free_memory()
        self._before = memory_in_use()

    def log(self, attempt: int) -> None:
        """Log what is in use, with a warning if it has grown by more than allocators vary."""
        now, first = self._before, self._first or self._before
        self._first = first
        grows = any(a > _TOLERANCE * b + _SLACK_BYTES for a, b in zip(now, first, strict=True))
        logger.log(
            logging.WARNING if grows else logging.INFO,
            "%safter attempt %d: %d MiB resident, %d MiB of CUDA memory; at first %d and %d",
            "memory grows: " if grows else "",
            attempt,
            *(number >> 20 for number in (*now, *first)),
        )


def memory_in_use() -> tuple[int, int]:
    """Resident bytes of this process, and bytes that torch has allocated on its CUDA device."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE"), gpu_memory_nbytes()


def release_free_memory() -> None:
    """Have glibc, and torch's allocator where CUDA has been used, return freed memory.

    Each attempt allocates its model again, from other threads, and glibc keeps the holes: without
    this a process grew by some megabytes with each restart.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    release_gpu_memory()
