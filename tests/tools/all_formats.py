"""One state saved in each format that a conversion reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies import convert
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from tests.support.entries import Entry, prepare, save
from tests.support.ranks import allow_torch_dist, run_processes

BACKENDS = {
    "zarr@1": ("zarr", 1),
    "zarr@3": ("zarr", 3),
    "torch_dist": ("torch_dist", 1),
    "pack": ("safetensors", 1),
}
FORMATS = tuple(BACKENDS)


def saved_by(num_ranks: int, state_of: Callable[[int, str], Any], root: Path) -> Path:
    """Save what ``state_of(rank, format)`` gives in each format; the directory of all of them.

    Nothing saves Zarr v3, and ("zarr", 1) takes no irregular shards: they are converted.
    """
    pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")
    saved = run_processes(num_ranks, _save, root, state_of, timeout_s=300)
    assert saved == [None] * num_ranks
    for name in ("zarr@1", "zarr@3"):
        convert(root / "pack", root / name, name)
    return root


def _save(rank: int, root: Path, state_of: Callable[[int, str], Any]) -> None:
    allow_torch_dist()
    prepare(60)
    for name, backend in BACKENDS.items():
        if name.startswith("zarr"):
            continue
        with cpu_stand_ins():  # torch_dist synchronises CUDA, also for tensors on the CPU
            entry = Entry.OURS if backend[0] != "torch_dist" else Entry.MEGATRON
            state = state_of(rank, name) | {"iteration": 7}
            save(entry, state, root / name, sharded_strategy=backend)
