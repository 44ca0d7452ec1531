"""Megatron-Core 0.15.3 loads what we save, and we load what it and its forebears save."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt_strategies.formats.scan import scan, verify
from tests.interop.content import (
    COMMON,
    VERSIONS,
    as_whole,
    cuts,
    flat_cuts,
    objects_of,
    others_wrong,
    part_of,
    recut,
    zeros_alone,
)
from tests.support.entries import Entry, load, prepare, save
from tests.support.processes import finished
from tests.support.ranks import done_by, run_processes
from tests.support.sharding import differences, state_of, zeros

SCRIPT = Path(__file__).with_name("old_megatron.py")
ROOT = SCRIPT.parents[2]
SIZE = 4
OLD_SIZE = 2  # of the world in which old releases save
TIMEOUT_S = 150

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(2 * TIMEOUT_S, func_only=True),
]


def run_old(releases: Path, *args: Path | str, version: str | None = None) -> Any:
    """The answer of the script, with a release or that of the environment."""
    command = (releases / "environment/bin/python", SCRIPT, *args)
    path = os.pathsep.join(map(str, [releases / version, ROOT] if version else [ROOT]))
    done = finished(*command, variables={"PYTHONPATH": path}, limit_s=TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def save_ours(rank: int, entry: Entry, root: Path) -> None:
    prepare(60)
    arrays = state_of(rank, cuts(SIZE) + zeros_alone(), part_of)
    save(entry, arrays | COMMON | objects_of(rank, SIZE), root)


@pytest.mark.parametrize("entry", list(Entry))
def test_megatron_015_loads_what_we_save(entry: Entry, releases: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    done_by(SIZE, save_ours, entry, checkpoint, timeout_s=TIMEOUT_S)

    assert run_old(releases, "load", checkpoint) == []


def load_theirs(rank: int, entry: Entry, root: Path) -> list[str]:
    """Load, whole on each of four ranks, what two saved."""
    prepare(60)
    whole = recut(cuts(OLD_SIZE) + flat_cuts(), as_whole, num_replicas=SIZE)
    owner, replica = rank % OLD_SIZE, rank // OLD_SIZE
    objects = objects_of(owner, OLD_SIZE, is_filled=False, replica=replica)
    loaded = load(entry, state_of(rank, whole, zeros) | objects, root)
    wrong = differences(rank, whole, loaded, part_of)
    return wrong + others_wrong(loaded, [owner], OLD_SIZE)


@pytest.mark.parametrize("version", [None, *VERSIONS])
def test_we_load_what_old_releases_save(
    version: str | None, releases: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    run_old(releases, "save", checkpoint, str(OLD_SIZE), version=version)

    for entry in Entry if version is None else [Entry.MEGATRON]:
        found = run_processes(SIZE, load_theirs, entry, checkpoint, timeout_s=TIMEOUT_S)
        assert found == [[]] * SIZE
    assert verify(scan(checkpoint)) == ()
