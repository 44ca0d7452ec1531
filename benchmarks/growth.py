"""How bytes, files, calls, collectives and memory of a save and a load grow with the ranks.

    python benchmarks/growth.py --out growth.jsonl

Each rank holds 16 MiB: rows of each of 64 float32 arrays, and the arrays grow with the ranks. Each
way is called through its own ``save`` and ``load``; the second call counts for bytes, calls and
memory, the third for collectives. Nothing is timed, so a busy machine gives the same counts.

Bytes and calls are those of ``/proc/self/io``, with threads and ended child processes: ``wchar``,
``rchar``, ``syscw``, ``syscr``. Memory is how far ``VmHWM`` rises above what is resident when the
call begins, without child processes. Of each, the most of any rank is shown, and that of the first
rank, which has work that the others do not have.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output
from benchmarks.common.disks import file_system, fresh, workspace
from benchmarks.many_shards import CANDIDATES
from benchmarks.walk import recorded
from dist_ckpt_strategies.cli.bench_rank import stand_in_for_cuda

_NUM_ARRAYS, _ROWS, _COLUMNS = 64, 64, 1024
"""Of each array a rank holds 64 rows of 4 KiB."""

RANK_NBYTES: Final = _NUM_ARRAYS * _ROWS * _COLUMNS * 4
_COUNTERS: Final = {
    "written_nbytes": "wchar",
    "read_nbytes": "rchar",
    "write_calls": "syscw",
    "read_calls": "syscr",
}


def _state() -> dict[str, ShardedTensor]:
    offset = (0, dist.get_rank(), dist.get_world_size())
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(_ROWS, _COLUMNS), offset)
        for key in (f"layers.{number:02}.weight" for number in range(_NUM_ARRAYS))
    }


def measure(name: str, place: Path) -> list[dict[str, Any]]:
    """What this rank's second save and load cost, and the collectives of the third. Collective."""
    stand_in_for_cuda()
    save, load = CANDIDATES[name]
    state = _state()
    lines: list[dict[str, Any]] = []
    for number in range(3):
        target = place / str(number)
        rounds.on_first_rank(fresh, place, target.name)
        for call, act in (("save", save), ("load", load)):
            dist.barrier()
            if number == 2:  # noqa: PLR2004 - see the module
                counts = recorded(lambda: act(state, target))["collectives"]  # noqa: B023
                lines[0 if call == "save" else 1]["collectives"] = sum(counts.values())
            else:
                cost = _cost_of(lambda: act(state, target))  # noqa: B023
                if number == 1:
                    files = sum(path.is_file() for path in target.rglob("*"))
                    lines.append({"call": call, "files": files, **cost})
    return lines


def _cost_of(act: Callable[[], object]) -> dict[str, int]:
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is kept would hide what the call needs
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    resident, before = _status("VmRSS"), _io()
    act()
    after = _io()
    cost = {name: after[field] - before[field] for name, field in _COUNTERS.items()}
    return {**cost, "peak_nbytes": _status("VmHWM") - resident}


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _status(field: str) -> int:
    """Bytes that ``/proc/self/status`` gives for a field in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def main() -> None:
    """Count what a save and a load of every candidate cost at several numbers of ranks."""
    parser = Parser(__doc__)
    parser.add_argument("--directory", type=Path, help="where to write")
    parser.add_repeated("ranks", [2, 4, 8, 16], "ranks", type=int)
    parser.add_repeated("candidate", list(CANDIDATES), "only these", choices=list(CANDIDATES))
    options = parser.parse_args()
    sizes = [2] if options.smoke else options.ranks or [2, 4, 8, 16]
    with open_output(options.out, __file__) as output:
        for num_ranks in sizes:
            for name in options.candidate or CANDIDATES:
                with workspace(options.directory) as place:
                    about = {"file_system": file_system(place), "num_ranks": num_ranks}
                    by_rank = rounds.run_on_ranks(
                        num_ranks, measure, name, place, timeout_s=options.timeout_s
                    )
                for lines in zip(*by_rank, strict=True):
                    most = {
                        field: max(line[field] for line in lines)
                        for field in lines[0]
                        if field != "call"
                    }
                    cost = {"candidate": name, "call": lines[0]["call"], "most": most}
                    output.write("growth", **about, **cost, first=lines[0])


if __name__ == "__main__":
    main()
