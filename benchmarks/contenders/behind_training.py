"""Ways to save behind training, and what bounds them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from benchmarks.contenders.one_state import TORCH_DIST, ZARR, ZARR_2, Megatron, stand_in_for_cuda
from benchmarks.contenders.roster import ASYNC_ZARR_1, ASYNC_ZARR_2, IDLE, MEMCPY, QUEUE, RAW_WRITER
from benchmarks.measuring.gpt_state import Shard
from benchmarks.measuring.quiet import quiet_imports

with quiet_imports():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    import dist_ckpt_strategies

_RAW_WRITER = Path(__file__).with_name("raw_writer.py")
_LIMIT_S = 300.0


class AsyncContender(Protocol):
    """One way to save behind training."""

    def begin(self, directory: Path) -> None:
        """The part that training waits for. Collective."""
        ...

    def is_done(self) -> bool:
        """Whether this rank has written its share; what training asks between two steps."""
        ...

    def finish(self) -> None:
        """Wait for what is left, until the checkpoint is there. Collective."""
        ...


class Entry(Megatron):
    """This package's ``save_async``."""

    _handle: dist_ckpt_strategies.SaveHandle

    def begin(self, directory: Path) -> None:
        """See AsyncContender."""
        self._handle = dist_ckpt_strategies.save_async(
            self.state(), directory, self.backend, validate_access_integrity=True
        )

    def is_done(self) -> bool:
        """See AsyncContender."""
        return self._handle.done()

    def finish(self) -> None:
        """See AsyncContender."""
        self._handle.wait()


class Queue(Megatron):
    """Megatron-Core's backend and its queue, which forks a process for each save."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        stand_in_for_cuda()
        super().__init__(shards, TORCH_DIST)
        self._queue: Any = AsyncCallsQueue()

    def begin(self, directory: Path) -> None:
        """See AsyncContender."""
        request = dist_checkpointing.save(
            self.state(), str(directory), self.backend, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)

    def is_done(self) -> bool:
        """See AsyncContender. It also ends the save that is done."""
        self._queue.maybe_finalize_async_calls(blocking=False)
        return bool(self._queue.get_num_unfinalized_calls() == 0)

    def finish(self) -> None:
        """See AsyncContender."""
        self._queue.maybe_finalize_async_calls(blocking=True)


class _Memcpy:
    """A copy of the rank's bytes into memory that is there and was used, and nothing else."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._pairs = [(torch.zeros_like(shard.tensor), shard.tensor) for shard in shards]

    def begin(self, directory: Path) -> None:
        """See AsyncContender."""
        del directory
        for copy, tensor in self._pairs:
            copy.copy_(tensor)

    def is_done(self) -> bool:
        """See AsyncContender."""
        return True

    def finish(self) -> None:
        """See AsyncContender. Nothing is left."""


class _Idle:
    """Nothing at all, for as many steps as were asked for."""

    def __init__(self, _shards: tuple[Shard, ...]) -> None:
        self._left = 0

    def begin(self, directory: Path) -> None:
        """See AsyncContender."""
        del directory
        self._left = 12

    def is_done(self) -> bool:
        """See AsyncContender."""
        self._left -= 1
        return self._left <= 0

    def finish(self) -> None:
        """See AsyncContender. Nothing is left."""


class _RawWriter:
    """Another process that writes as many bytes and flushes them: what the machine itself takes."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._nbytes = sum(shard.tensor.nbytes for shard in shards)
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, directory: Path) -> None:
        """See AsyncContender."""
        command = [sys.executable, "-S", str(_RAW_WRITER), str(directory / "raw")]
        self._process = subprocess.Popen([*command, str(self._nbytes)])

    def is_done(self) -> bool:
        """See AsyncContender."""
        return self._process is not None and self._process.poll() is not None

    def finish(self) -> None:
        """See AsyncContender."""
        if self._process is not None and self._process.wait(_LIMIT_S) != 0:
            raise OSError(f"{_RAW_WRITER.name} ended with {self._process.returncode}")


def _zarr_1(shards: tuple[Shard, ...]) -> AsyncContender:
    return _entry(shards, ZARR)


def _zarr_2(shards: tuple[Shard, ...]) -> AsyncContender:
    return _entry(shards, ZARR_2)


def _entry(shards: tuple[Shard, ...], backend: tuple[str, int]) -> AsyncContender:
    dist_ckpt_strategies.register()
    return Entry(shards, backend)


ASYNC_MAKERS: Final[Mapping[str, Callable[[tuple[Shard, ...]], AsyncContender]]] = {
    MEMCPY: _Memcpy,
    IDLE: _Idle,
    RAW_WRITER: _RawWriter,
    ASYNC_ZARR_2: _zarr_2,
    ASYNC_ZARR_1: _zarr_1,
    QUEUE: Queue,
}
"""For each name of the roster, what builds it in a rank process, for this rank's shards."""
