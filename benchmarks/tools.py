"""Verify and convert a checkpoint, beside reading and copying its files; and how much memory.

    python benchmarks/tools.py --out tools.jsonl

One GPT-like state, saved by two ranks in format 1 and as packs. Every run has a process of its
own, or two that share the work and the threads. The peak of resident memory, of both together, is
taken at the end; the time is that of the tool, without the start of Python. Warm: the page cache
holds the source; cold: it holds nothing of it. Candidates take turns; medians.

The baselines have as many threads as the tools: ``raw read`` reads the same files, ``raw copy``
also writes and flushes each as it is. A conversion is durable when it returns.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from torch import distributed as dist

from benchmarks.common import disks
from benchmarks.common.command_line import Parser, case_of, open_output
from benchmarks.common.rounds import flush, run_on_ranks, timed
from dist_ckpt_strategies import ConvertOptions, convert
from dist_ckpt_strategies.cli.bench_rank import (
    MAKERS,
    SECONDS,
    GptSize,
    Sample,
    build_shards,
    interleaved,
)
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.formats.scan import scan, verify

_MIB = 1 << 20
_BLOCK = 4 << 20
_NUM_SAVERS = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Threads of all processes together, and memory for elements in a conversion."""

    num_threads: int
    max_memory_nbytes: int


Tool = Callable[[Path, Path, Bounds, Communicator], None]


def _verify(source: Path, _target: Path, _bounds: Bounds, comm: Communicator) -> None:
    """What ``dist-ckpt verify`` does, which takes as many threads as there are cores."""
    issues = verify(scan(source), comm=comm)
    if issues:
        raise ValueError(f"{source}: {issues}")


def _convert(source: Path, target: Path, bounds: Bounds, comm: Communicator, *, to: str) -> None:
    threads = max(1, bounds.num_threads // comm.size)
    options = ConvertOptions(max_memory_bytes=bounds.max_memory_nbytes, num_threads=threads)
    convert(source, target, to, options=options, comm=comm)


def _read(source: Path, _target: Path, bounds: Bounds, _comm: Communicator) -> None:
    _on_threads(source, bounds.num_threads, _read_blocks)


def _copy(source: Path, target: Path, bounds: Bounds, _comm: Communicator) -> None:
    def copy(path: Path, block: memoryview) -> None:
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb", buffering=0) as file:
            _read_blocks(path, block, file.write)
            os.fsync(file.fileno())

    _on_threads(source, bounds.num_threads, copy)


def _on_threads(
    directory: Path, num_threads: int, body: Callable[[Path, memoryview], None]
) -> None:
    """The largest first, so that the threads end together; each thread has one block of memory."""
    files = sorted(disks.files_below(directory), key=lambda path: -path.stat().st_size)

    def run(number: int) -> None:
        block = memoryview(bytearray(_BLOCK))
        for path in files[number::num_threads]:
            body(path, block)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, range(num_threads)))


def _read_blocks(
    path: Path, block: memoryview, write: Callable[[memoryview], object] = lambda _: None
) -> None:
    with path.open("rb", buffering=0) as file:
        while found := file.readinto(block):
            write(block[:found])


BASELINES: Final[Mapping[str, Tool]] = {"raw read": _read, "raw copy": _copy}
TOOLS: Final[Mapping[str, Mapping[str, Tool]]] = {
    "zarr 1": {
        "to packs": partial(_convert, to="pack"),
        "to packs, 2 processes": partial(_convert, to="pack"),
    },
    "packs": {
        "verify": _verify,
        "verify, 2 processes": _verify,
        "to torch_dist": partial(_convert, to="torch_dist"),
    },
}
"""By the format of the source."""
NAMES: Final = (*BASELINES, *(name for tools in TOOLS.values() for name in tools))


def save_sources(size: GptSize, directory: Path) -> None:
    """Store the state in each format, on one of the ranks. Collective."""
    shards = build_shards(size, dist.get_rank(), _NUM_SAVERS)
    for source in TOOLS:
        MAKERS[source](shards).save(directory / source)
        flush(directory / source)


def run_tool(tool: Tool, source: Path, target: Path, bounds: Bounds) -> tuple[float, int]:
    """Seconds of one run, and the most resident bytes of this process. Collective."""
    comm = open_communicator(None, timeout_s=600.0, purpose="benchmark")
    seconds = timed(lambda: tool(source, target, bounds, comm))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rounds(
    tools: Mapping[str, Tool], root: Path, bounds: Bounds, repetitions: int, timeout_s: float
) -> Iterator[Sample]:
    file_nbytes = sum(path.stat().st_size for path in disks.files_below(root))
    for step in ["warm"] if disks.is_in_memory(root) else ["warm", "cold"]:
        # No warm-up: every run has new processes, and finds what it should in the page cache.
        for repetition, name in interleaved(list(tools), repetitions - 1):
            target = root.with_name(f"from {root.name}")
            target.mkdir()
            disks.touch_memory(2 * bounds.max_memory_nbytes)
            if step == "cold":
                disks.drop_cache(root)
            else:
                disks.fill_cache(root)
            num_ranks = 2 if name.endswith("2 processes") else 1
            args = (tools[name], root, target, bounds)
            found = run_on_ranks(num_ranks, run_tool, *args, timeout_s=timeout_s)
            disks.retire(target, root.with_name("attic"))
            seconds = found[0][0]
            values = {
                SECONDS: seconds,
                "nbytes_per_second": file_nbytes / seconds,
                "peak_nbytes": sum(peak for _, peak in found),
            }
            yield Sample(step, name, repetition, values)


def main() -> None:
    """Verify and convert one GPT-like checkpoint with every tool in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(NAMES, BASELINES, sizes_gb=(4.0,), repetitions=5)
    parser.add_argument("--memory", type=int, default=256, help="MiB for a conversion (256)")
    options = parser.parse()
    bounds = Bounds(max(2, len(os.sched_getaffinity(0))), options.memory * _MIB)
    with open_output(options.out, __file__) as output:
        for size in options.sizes:
            for parent in options.directory:
                with disks.workspace(parent) as place:
                    for source in TOOLS:
                        (place / source).mkdir()
                    run_on_ranks(
                        _NUM_SAVERS, save_sources, size, place, timeout_s=options.timeout_s
                    )
                    for source, all_tools in TOOLS.items():
                        tools = {n: t for n, t in all_tools.items() if n in options.candidate}
                        if not tools:
                            continue
                        case = {**case_of(size, parent, 1), "source": source, **asdict(bounds)}
                        tools = {**BASELINES, **tools}
                        args = (tools, place / source, bounds, options.repetitions)
                        output.write_samples(case, _rounds(*args, options.timeout_s))


if __name__ == "__main__":
    main()
