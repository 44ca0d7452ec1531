"""One run of a tool in a process of its own, which says how much memory that took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.contenders.plain_files import copy_files, read_files
from benchmarks.contenders.roster import (
    COPY_FILES,
    READ_FILES,
    TO_TORCH_DIST,
    TO_ZARR_2,
    TO_ZARR_2_BY_TWO,
    VERIFY,
    VERIFY_BY_TWO,
)
from benchmarks.measuring.harness import HOST, RankContext
from benchmarks.measuring.quiet import quiet_imports

with quiet_imports():
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from dist_ckpt_strategies import ConvertOptions, convert
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.comm.torch_communicator import open_communicator
    from dist_ckpt_strategies.formats.scan import scan, verify

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process that is resident, in bytes.

    Attributes:
        before_nbytes: before the tool ran, its libraries loaded.
        peak_nbytes: the most there ever was.
    """

    before_nbytes: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a tool is given.

    Attributes:
        num_threads: files handled at the same time, by all processes.
        max_memory_nbytes: for elements, in a conversion.
        comm: the processes that share the work.
    """

    num_threads: int
    max_memory_nbytes: int
    comm: Communicator

    @property
    def options(self) -> ConvertOptions:
        """For each of the processes."""
        threads = max(1, self.num_threads // self.comm.size)
        return ConvertOptions(max_memory_bytes=self.max_memory_nbytes, num_threads=threads)


class ToolWorker:
    """A process for one run of one tool."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._before_nbytes = _status("VmRSS")

    def run(self, tool: str, source: Path, target: Path) -> None:
        """Run a tool from one directory to another, which is empty. Timed."""
        TOOLS[tool](source, target, self._bounds)

    def memory(self) -> Memory:
        """What this process has taken."""
        return Memory(self._before_nbytes, _status("VmHWM"))


def _verify(source: Path, _target: Path, bounds: Bounds) -> None:
    """What ``dist-ckpt verify`` does, which takes as many threads as there are cores."""
    issues = verify(scan(source), comm=bounds.comm)
    if issues:
        raise ValueError(f"{source}: {issues}")


def _convert(to: str) -> Callable[[Path, Path, Bounds], None]:
    def run(source: Path, target: Path, bounds: Bounds) -> None:
        convert(source, target, to, options=bounds.options, comm=bounds.comm)

    return run


def _read(source: Path, _target: Path, bounds: Bounds) -> None:
    read_files(source, bounds.num_threads)


def _copy(source: Path, target: Path, bounds: Bounds) -> None:
    copy_files(source, target, bounds.num_threads)


TOOLS: Final[Mapping[str, Callable[[Path, Path, Bounds], None]]] = {
    READ_FILES: _read,
    COPY_FILES: _copy,
    VERIFY: _verify,
    TO_ZARR_2: _convert("zarr@2"),
    TO_TORCH_DIST: _convert("torch_dist"),
    VERIFY_BY_TWO: _verify,
    TO_ZARR_2_BY_TWO: _convert("zarr@2"),
}
"""For each name of the roster, what runs it."""


def _status(name: str) -> int:
    """Bytes that the kernel counts under this name; see proc(5)."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"{_STATUS}: no {name}")


def make_worker(num_threads: int, max_memory_nbytes: int, context: RankContext) -> ToolWorker:
    """One run of a tool, in this process and those beside it."""
    if context.num_ranks > 1:
        store = TCPStore(HOST, context.store_port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("tools", store),
            rank=context.global_rank,
            world_size=context.num_ranks,
        )
    comm = open_communicator(None, timeout_s=context.timeout_s, purpose="benchmark")
    return ToolWorker(Bounds(num_threads, max_memory_nbytes, comm))
