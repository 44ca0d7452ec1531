"""How much of the package runs in a save and a load of regular shards, and how many collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.walk import AIMS, STRATEGIES
from tests.support.scripts import results_of

pytestmark = pytest.mark.multiprocess

BOUNDS = {
    (1, "save"): (138, 25),
    (1, "load"): (120, 25),
    (2, "save"): (157, 27),
    (2, "load"): (139, 25),
}
"""Functions and files at most, by version and call: what was reached on the way to the aims."""


def test_a_second_save_and_load_take_no_more_than_was_reached(tmp_path: Path) -> None:
    lines = results_of("walk.py", tmp_path).of_kind("walk")

    assert len(lines) == len(STRATEGIES) * len(AIMS)
    for line in lines:
        (_, version), call = line["strategy"], line["call"]
        functions, files = BOUNDS[version, call]
        assert 0 < len(line["functions"]) <= functions, (version, call)
        assert 0 < len(line["files"]) <= files, (version, call)
        assert 0 < sum(line["collectives"].values()) <= AIMS[call][2], (version, call)
