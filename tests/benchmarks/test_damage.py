"""A twentieth of the campaign against files: nothing but what was saved is ever loaded."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks.damage import (
    Case,
    ViolationError,
    draw_format2,
    format2_case,
    judge_format2,
    judge_local,
    violations,
)
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import CorruptCheckpointError, NoReplicasAvailableError
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from tests.faults.files import Fault, Files, Kind, file_map
from tests.faults.oracle import Place
from tests.local.test_shard_files import PART, written
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


def test_what_no_load_needs_may_pass(files: Files) -> None:
    index, chunk = files.index_start(CHUNK), files.contents[CHUNK]
    flipped = chunk[:index] + bytes([chunk[index] ^ 1]) + chunk[index + 1 :]
    for case in (
        changed(files, Fault.FLIP, CHUNK, flipped, index),
        changed(files, Fault.DELETE, f"arrays/{LARGE}/zarr.json", None),
        changed(files, Fault.EXTEND, PACK, files.contents[PACK] + b"x"),
        changed(files, Fault.EXTEND, "metadata.json", files.contents["metadata.json"] + b" "),
        changed(files, Fault.FLIP, "manifest/save.json", b"?"),
    ):
        assert judge_format2(files.root, loads, case) == "what was saved"


def test_a_load_that_raises_what_is_no_error_of_ours_is_a_violation_that_names_the_case() -> None:
    case = Case(7, Fault.FLIP, Kind.CHUNK, {Path("/c/file"): b""})

    with (
        pytest.raises(ViolationError, match=r"case 7: flip of chunk, [\s\S]*MemoryError"),
        violations(case),
    ):
        raise MemoryError


def test_every_kind_of_byte_and_fault_is_drawn(files: Files) -> None:
    chance = random.Random(1)
    cases = [draw_format2(files, chance, number) for number in range(600)]

    assert {case.fault for case in cases} == set(Fault)
    assert {case.what for case in cases} == set(Kind)


@pytest.mark.parametrize("expected", [2, 1, None])
def test_local_checkpoints_come_back_as_expected_on_every_rank(
    expected: int | None, tmp_path: Path
) -> None:
    path = written(ShardDirectory(tmp_path))
    content = path.read_bytes()
    case = Case(0, "cut", "end cut off", {path: content[:-1]}, expected)

    def load(
        outcome: int | None, odd_rank: int, comm: Communicator
    ) -> int | NoReplicasAvailableError:
        found = expected if comm.rank != odd_rank else outcome
        return NoReplicasAvailableError(None, "none") if found is None else found

    judge_local(partial(load, expected, 0), case)
    for other in {1, 2, None} - {expected}:
        with pytest.raises(ViolationError):
            judge_local(partial(load, other, 2), case)
    with pytest.raises(ViolationError, match="dist-ckpt verify"):
        judge_local(
            partial(load, expected, 0), Case(0, "flip", Place.PADDING, {path: content}, expected)
        )
    assert path.read_bytes() == content


def test_a_map_names_every_byte_of_a_shard(tmp_path: Path) -> None:
    content = written(ShardDirectory(tmp_path)).read_bytes()
    spans = file_map(content)

    assert [(span.place, span.end - span.start) for span in spans] == [
        (Place.TENSOR, PART.buffers[0].nbytes),
        (Place.HEADER, len(content) - PART.buffers[0].nbytes),
    ]
    with pytest.raises(ValueError, match="described as one of 5000"):
        file_map(b"\0" + content)
