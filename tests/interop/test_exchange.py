"""Megatron-Core 0.15.3 loads what we save, and we load what it and its forebears save.

Its environment has zarr 2.18 and numpy 1 and does not contain this package; ``tox -e interop``
makes it and names its interpreter in DIST_CKPT_INTEROP_PYTHON. Older releases, each in a directory
of its own below DIST_CKPT_INTEROP_RELEASES, use that environment too.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from dist_ckpt_strategies.formats.scan import scan, verify
from tests.interop.releases import VERSIONS
from tests.support.entries import Entry, load, prepare, save
from tests.support.ranks import run_processes
from tests.support.sharding import Cut, Part, at_random, in_runs, on_grid, state_of

PYTHON = os.environ.get("DIST_CKPT_INTEROP_PYTHON")
RELEASES = Path(os.environ.get("DIST_CKPT_INTEROP_RELEASES", "releases"))
SCRIPT = Path(__file__).with_name("old_megatron.py")
SIZE = 4
TIMEOUT_S = 150

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(PYTHON is None, reason="needs Megatron-Core 0.15.3: run `tox -e interop`"),
]

OLD_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OLD_DTYPES += [torch.float16, torch.float32, torch.float64, torch.bfloat16]
OLD_DTYPES += [torch.complex64, torch.complex128]
OBJECTS = {"rng_state": [{"rank": n} for n in range(SIZE)]}
COMMON = {"iteration": 7, "args": {"tensor_model_parallel_size": 2}}


def start(*args: object, release: Path | None = None) -> subprocess.Popen[str]:
    assert PYTHON is not None
    command = [PYTHON, str(SCRIPT), *map(str, args)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if release is not None:
        environment["PYTHONPATH"] = str(release)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def whole(cut: Cut) -> torch.Tensor:
    """The content of an array, without NaNs, which the old loader changes for bfloat16."""
    numbers = torch.arange(torch.Size(cut.shape).numel()).reshape(cut.shape)
    if cut.key == "zeros":
        return torch.zeros(cut.shape)
    if cut.dtype is torch.bool:
        return numbers % 3 == 0
    return (numbers % 251 - 100 if cut.dtype.is_signed else numbers % 251).to(cut.dtype)


def part_of(cut: Cut, part: Part) -> torch.Tensor:
    return whole(cut)[part.slices()].reshape(part.shape[cut.num_prepended :]).clone()


def cuts() -> list[Cut]:
    found = [
        on_grid("zeros", (8, 4), (4, 1)),
        in_runs("uneven", [10, 21, 33, 46]),
        at_random("uneven.plane", (7, 10), 4, dtype=torch.bfloat16),
    ]
    for dtype in OLD_DTYPES:
        name = str(dtype).removeprefix("torch.")
        found += [
            on_grid(f"rows.{name}", (8, 6), (4, 1), dtype=dtype),
            on_grid(f"columns.{name}", (5, 8), (1, 4), dtype=dtype),
            on_grid(f"layers.{name}", (4, 3, 4), (4, 1, 1), dtype=dtype, num_prepended=1),
            on_grid(f"replicated.{name}", (3, 5), (1, 1), dtype=dtype, num_replicas=SIZE),
        ]
    return found


def save_ours(rank: int, entry: Entry, root: Path, engine: str) -> None:
    prepare(60, engine)
    own = ShardedObject("rng_state", OBJECTS["rng_state"][rank], (SIZE,), (rank,))
    save(entry, state_of(rank, cuts(), part_of) | COMMON | {"object": own}, root)


@pytest.mark.parametrize("engine", ["tensorstore", "zarr"])
@pytest.mark.parametrize("entry", list(Entry))
def test_megatron_015_loads_what_we_save(entry: Entry, engine: str, tmp_path: Path) -> None:
    checkpoint, expected = tmp_path / "checkpoint", tmp_path / "expected.pt"
    checkpoint.mkdir()
    run_processes(SIZE, save_ours, entry, checkpoint, engine, timeout_s=TIMEOUT_S)
    torch.save(({cut.key: whole(cut) for cut in cuts()}, OBJECTS, COMMON), expected)

    found = answer(start("load", checkpoint, expected))
    assert found == {"arrays": len(cuts()), "wrong": []}


def load_theirs(rank: int, entry: Entry, root: Path, expected: Path, engine: str) -> list[str]:
    """Load, on four ranks, what two saved: in quarters, whole, and through what they hold."""
    prepare(60, engine)
    tensors, objects, common = torch.load(expected, weights_only=True)
    make = ShardedTensor.from_rank_offsets
    wanted: dict[str, Any] = {
        key: make(key, torch.empty_like(right), replica_id=rank) for key, right in tensors.items()
    }
    wanted["object"] = ShardedObject("rng_state", None, (2,), (rank % 2,), replica_id=rank // 2)
    wanted["cell"] = ShardedObject("grid", None, (2, 2), (rank // 2, rank % 2))
    loaded = load(entry, wanted, root)
    wrong = [
        key
        for key, right in tensors.items()
        if loaded[key].dtype != right.dtype or not torch.equal(loaded[key], right)
    ]
    wrong += ["object"] * (loaded["object"] != objects["rng_state"][rank % 2])
    wrong += ["cell"] * (loaded["cell"] != objects["grid"][rank // 2][rank % 2])
    return wrong + [key for key in common if loaded[key] != common[key]]


def save_theirs(directory: Path, release: Path | None) -> tuple[Path, Path]:
    """A checkpoint that two ranks of an old release have written, and what is in it."""
    checkpoint, expected = directory / "checkpoint", directory / "expected.pt"
    place = (2, directory / "rendezvous")
    writers = [start("save", checkpoint, expected, n, *place, release=release) for n in range(2)]
    try:
        assert [answer(writer)["arrays"] for writer in writers] == [50, 50]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    return checkpoint, expected


@pytest.mark.parametrize("engine", ["tensorstore", "zarr"])
def test_we_load_what_megatron_015_saves(engine: str, tmp_path: Path) -> None:
    checkpoint, expected = save_theirs(tmp_path, None)
    for entry in Entry:
        found = run_processes(
            SIZE, load_theirs, entry, checkpoint, expected, engine, timeout_s=TIMEOUT_S
        )
        assert found == [[]] * SIZE


@pytest.mark.parametrize("version", VERSIONS)
def test_we_load_what_older_releases_save(version: str, tmp_path: Path) -> None:
    checkpoint, expected = save_theirs(tmp_path, RELEASES / version)
    found = run_processes(
        SIZE, load_theirs, Entry.MEGATRON, checkpoint, expected, "tensorstore", timeout_s=TIMEOUT_S
    )
    assert found == [[]] * SIZE
    assert verify(scan(checkpoint)) == ()
