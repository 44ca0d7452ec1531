"""Verify and convert a checkpoint, beside reading and copying its files; and how much memory.

    python benchmarks/tools.py --out tools.jsonl
    python benchmarks/tools.py --smoke

One GPT-like state, saved by two ranks in format 1 and in format 2. Every run has a process of its
own, or two that share the work and the threads. The peak of resident memory, of both together, is
taken at the end; the time is that of the tool, without the start of Python. Warm: the page cache
holds the source; cold: it holds nothing of it. Candidates take turns; medians.

The baselines have as many threads as the tools: ``raw read`` reads the same files, ``raw copy``
also writes and flushes each as it is. A conversion is durable when it returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.common.command_line import Comparison, Output, comparison_command
from benchmarks.common.disks import (
    drop_cache,
    file_system,
    files_below,
    fill_cache,
    retire,
    touch_memory,
    workspace,
)
from benchmarks.common.processes import HOST, RankContext, Ranks, quiet_imports
from benchmarks.common.rounds import SECONDS, Case, Sample, Step, alternate
from benchmarks.common.states import GptSize

with quiet_imports():
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from dist_ckpt_strategies import ConvertOptions, convert
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.comm.torch_communicator import open_communicator
    from dist_ckpt_strategies.formats.scan import scan, verify

_MIB = 1 << 20
_BLOCK = 4 << 20
_NUM_SAVERS = 2
_STATUS = Path("/proc/self/status")
_CACHE = MappingProxyType({Step.LOAD_WARM: "warm", Step.LOAD_COLD: "cold"})


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

    def memory(self) -> tuple[int, int]:
        """Resident bytes before the tool ran, its libraries loaded, and the most there ever was."""
        return self._before_nbytes, _status("VmHWM")


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


def read_files(directory: Path, num_threads: int) -> int:
    """Read every file below, in blocks, into memory in use; how many bytes there were."""
    return _on_threads(directory, num_threads, _read_blocks)


def copy_files(directory: Path, target: Path, num_threads: int) -> int:
    """Read every file below, and write and flush it below ``target``; how many bytes there were."""

    def copy(source: Path, block: memoryview) -> int:
        to = target / source.relative_to(directory)
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb", buffering=0) as file:
            nbytes = _read_blocks(source, block, file.write)
            os.fsync(file.fileno())
        return nbytes

    return _on_threads(directory, num_threads, copy)


def _on_threads(directory: Path, num_threads: int, body: Callable[[Path, memoryview], int]) -> int:
    """The largest first, so that the threads end together; each thread has one block of memory."""
    blocks: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(num_threads):
        blocks.put(memoryview(bytearray(_BLOCK)))

    def run(path: Path) -> int:
        block = blocks.get()
        try:
            return body(path, block)
        finally:
            blocks.put(block)

    files = sorted(files_below(directory), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(run, files))


def _read_blocks(
    path: Path, block: memoryview, write: Callable[[memoryview], object] | None = None
) -> int:
    done = 0
    with path.open("rb", buffering=0) as file:
        while found := file.readinto(block):
            done += found
            if write is not None:
                write(block[:found])
    return done


TOOLS: Mapping[str, Callable[[Path, Path, Bounds], None]] = MappingProxyType(
    {
        "raw read": _read,
        "raw copy": _copy,
        "verify": _verify,
        "to zarr 2": _convert("zarr@2"),
        "to torch_dist": _convert("torch_dist"),
        "verify, 2 processes": _verify,
        "to zarr 2, 2 processes": _convert("zarr@2"),
    }
)
BASELINES = ("raw read", "raw copy")
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "zarr 1": ("to zarr 2", "to zarr 2, 2 processes"),
        "zarr 2": ("verify", "verify, 2 processes", "to torch_dist"),
    }
)
"""Formats, and the tools that take them."""


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


@dataclass(frozen=True, slots=True)
class ToolCase(Case):
    """One checkpoint on one file system.

    Attributes:
        source: its format.
        file_nbytes: of all its files.
        num_threads: of tools and baselines.
        max_memory_nbytes: for elements, in a conversion.
    """

    source: str = ""
    file_nbytes: int = 0
    num_threads: int = 1
    max_memory_nbytes: int = 0


def _run_place(
    size: GptSize, place: Path, max_memory_nbytes: int, comparison: Comparison, output: Output
) -> None:
    """Time every tool in one place."""
    num_threads = max(2, len(os.sched_getaffinity(0)))
    with workspace(place) as directory:
        nbytes = _save_all(size, directory, comparison)
        for source, tools in SOURCES.items():
            names = [name for name in comparison.names if name in {*tools, *BASELINES}]
            if not set(names) & set(tools):
                continue
            root = directory / source
            file_nbytes = sum(path.stat().st_size for path in files_below(root))
            case = ToolCase(
                file_system(place), nbytes, size.num_arrays, 1,
                source=source, file_nbytes=file_nbytes,
                num_threads=num_threads, max_memory_nbytes=max_memory_nbytes,
            )  # fmt: skip
            output.write_samples(case, _rounds(case, root, names, comparison))


def _save_all(size: GptSize, directory: Path, comparison: Comparison) -> int:
    """Store the state in each format; how many bytes it has."""
    args = ("benchmarks.save_load", size, list(SOURCES))
    with Ranks(_NUM_SAVERS, *args, timeout_s=comparison.timeout_s) as ranks:
        for source in SOURCES:
            target = directory / source
            target.mkdir()
            ranks.step("save", source, target)
            ranks.step("flush", target)
        return sum(ranks.step("nbytes").values)


def _rounds(
    case: ToolCase, root: Path, names: Sequence[str], comparison: Comparison
) -> Iterator[Sample]:
    args = ("benchmarks.tools", case.num_threads, case.max_memory_nbytes)
    for step in case.loads:
        for repetition, name in alternate(names, comparison.repetitions):
            target = root.with_name(f"from {root.name}")
            target.mkdir()
            num_ranks = 2 if name.endswith("2 processes") else 1
            with Ranks(num_ranks, *args, timeout_s=comparison.timeout_s) as ranks:
                touch_memory(2 * case.max_memory_nbytes)
                if step is Step.LOAD_COLD:
                    drop_cache(root)
                else:
                    fill_cache(root)
                seconds = ranks.step("run", name, root, target).seconds
                before, peak = map(sum, zip(*ranks.step("memory").values, strict=True))
            retire(target, root.with_name("attic"))
            values = {
                SECONDS: seconds,
                "nbytes_per_second": case.file_nbytes / seconds,
                "peak_nbytes": peak,
                "before_nbytes": before,
            }
            yield Sample(_CACHE[step], name, repetition, values)


@comparison_command(list(TOOLS), BASELINES, sizes_gb=(4.0,), repetitions=5, timeout_s=600.0)
def main(
    comparison: Comparison,
    output: Output,
    *,
    memory: Annotated[int, typer.Option(min=1, help="MiB that a conversion is given.")] = 256,
) -> None:
    """Verify and convert one GPT-like checkpoint with every tool in turn."""
    for size in comparison.sizes:
        for place in comparison.places:
            _run_place(size, place, memory * _MIB, comparison, output)


if __name__ == "__main__":
    typer.run(main)
