"""Each benchmark at toy size: every candidate takes part, and nothing is left behind."""

import json
import signal
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from benchmarks import (
    async_save,
    dcp,
    growth,
    local_replicated,
    object_stores,
    one_process,
    pack_format,
    planning,
    recovery_faults,
    recovery_overhead,
    reshard,
    save_load,
    tools,
    two_stage,
    walk,
)

pytestmark = pytest.mark.multiprocess

NEEDS_MOTO = pytest.mark.skipif(
    not (find_spec("moto") and find_spec("boto3")), reason="moto and boto3 are not installed"
)

Lines = dict[str, list[dict[str, Any]]]


def lines_of(
    module: ModuleType, scratch: Path, *options: str, takes_directory: bool = True
) -> Lines:
    """The lines that a run writes, by kind; it leaves nothing in the directory where it works.

    It runs in this process, whose ranks start without imports.
    """
    place, out = scratch / "place", scratch / "results.jsonl"
    place.mkdir()
    where = ("--directory", str(place)) if takes_directory else ()
    command = [str(module.__file__), *where, "--smoke", "--out", str(out), *options]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(sys, "argv", command):
            module.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert list(place.iterdir()) == []
    lines: Lines = defaultdict(list)
    for text in out.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines[line["kind"]].append(line)
    return lines


@pytest.mark.parametrize(
    ("script", "options", "candidates"),
    [
        (save_load, (), save_load.MAKERS),
        (dcp, (), dcp.MAKERS),
        (one_process, (), one_process.MAKERS),
        (async_save, (), async_save.MAKERS),
        (two_stage, ("--ranks", "3"), two_stage.NAMES),
        (reshard, ("--move", "2 rows to 2 columns"), reshard.MAKERS),
        (local_replicated, (), local_replicated.NAMES),
        (tools, (), tools.NAMES),
        pytest.param(
            *(object_stores, ("--server", object_stores.MOTO), object_stores.MAKERS),
            marks=NEEDS_MOTO,
        ),
    ],
)
def test_every_candidate_is_measured_or_reported_as_missing(
    script: ModuleType, options: tuple[str, ...], candidates: list[str], tmp_path: Path
) -> None:
    lines = lines_of(script, tmp_path, *options)

    assert min(line["values"]["seconds"] for line in lines["sample"]) > 0
    reported = lines["sample"] + lines["skipped"]
    assert {line["candidate"] for line in reported} == {*candidates}


@pytest.mark.parametrize(
    ("script", "kind", "takes_directory"),
    [
        (growth, "growth", True),
        (walk, "walk", True),
        (planning, "planning", False),
        (pack_format, "range", True),
        (recovery_overhead, "summary", False),
    ],
)
def test_a_script_writes_its_lines_and_leaves_nothing(
    script: ModuleType, kind: str, takes_directory: bool, tmp_path: Path
) -> None:
    assert lines_of(script, tmp_path, takes_directory=takes_directory)[kind]


def test_the_campaign_of_recovery_finds_no_violation(tmp_path: Path) -> None:
    lines = lines_of(recovery_faults, tmp_path, "--faults", "40", "--seed", "4")

    assert len(lines["recovery"]) == 2
    assert [line["faults"] for line in lines["campaign"]] == [2]
    assert lines["violation"] == []
