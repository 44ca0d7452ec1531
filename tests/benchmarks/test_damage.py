"""A twentieth of the campaign against files: nothing but what was saved is ever loaded."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks.damage import (
    Case,
    ViolationError,
    format2_case,
    judge_format2,
)
from dist_ckpt_strategies.errors import CorruptCheckpointError
from tests.faults.files import Fault, Files, Kind
from tests.faults.oracle import Place
from tests.support.checkpoints import LARGE, write_format2
from tests.support.scripts import results_of

CHUNK = f"arrays/{LARGE}/c.0.0"
PACK = "objects/rank-00000.bin"


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_twentieth_of_the_campaign_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("damage.py", tmp_path, "--seed", "3", "--cases", "6000", limit_s=280)
    counts: Counter[str] = Counter()
    hit: dict[str, set[str]] = {"format 2": set(), "local": set()}
    for line in found.of_kind("class"):
        counts[line["of"]] += line["cases"]
        hit[line["of"]].add(line["what"])
        if line["result"] == "what was saved":
            assert line["harmless"]

    assert counts == {"format 2": 300, "local": 300}
    assert hit == {"format 2": set(Kind), "local": {*Place, "end cut off"}}
    assert (found.of_kind("violation"), found.left) == ([], [])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a whole checkpoint."""
    return Files.below(write_format2(tmp_path_factory.mktemp("files") / "c"))


def changed(files: Files, fault: Fault, name: str, content: bytes | None, at: int = 0) -> Case:
    return format2_case(files, 0, fault, {name: content}, files.kind_at(name, at))


def loads(_root: Path) -> None:
    """A load that notices nothing."""


def refuses(name: str, root: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{root / name} is damaged")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (Fault.FLIP, CHUNK),
        (Fault.TRUNCATE, "common.pt"),
        (Fault.DELETE, PACK),
        (Fault.EXTEND, "manifest/index.json"),
    ],
)
def test_every_other_end_than_an_error_that_names_the_file_is_a_violation(
    fault: Fault, name: str, files: Files
) -> None:
    content = {Fault.DELETE: None, Fault.EXTEND: files.contents[name] + b"\0"}.get(fault, b"")
    case = changed(files, fault, name, content)

    assert judge_format2(files.root, partial(refuses, name), case) == "an error that names it"
    for bad in (loads, partial(refuses, "manifest/save.json")):
        with pytest.raises(ViolationError):
            judge_format2(files.root, bad, case)
    assert Files.below(files.root).contents == files.contents
