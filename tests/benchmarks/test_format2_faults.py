"""A twentieth of the campaign against format 2: nothing but what was saved is ever loaded."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults.campaign import ViolationError
from benchmarks.faults.format2_damage import (
    HARMLESS,
    Damage,
    Fault,
    Files,
    Kind,
    draw_flip,
    draw_other,
)
from benchmarks.faults.outcomes import Ending, Outcome
from benchmarks.format2_faults import run_damage
from tests.support.format2_checkpoints import LARGE, write_format2
from tests.support.scripts import results_of

CHUNK = f"arrays/{LARGE}/c.0.0"
LOADED = Outcome(Ending.LOADED, 1)


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_twentieth_of_the_campaign_finds_no_violation(tmp_path: Path) -> None:
    found = results_of("format2_faults.py", tmp_path, "--seed", "3", limit_s=280)
    counts: Counter[str] = Counter()
    flipped = set()
    for line in found.of_kind("class"):
        counts[line["fault"]] += line["cases"]
        if line["fault"] == Fault.FLIP:
            flipped.add(line["what"])
        if line["result"] == "what was saved":
            assert line["why"] in {*HARMLESS.values(), "nothing that counts has changed"} or (
                line["fault"] == Fault.SWAP
            )

    assert flipped == set(Kind)
    assert (counts["flip"], counts["kill"]) == (500, 15)
    assert sum(counts.values()) == 500 + 15 + 100
    assert (found.of_kind("violation"), found.left) == ([], [])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a whole checkpoint."""
    return Files.below(write_format2(tmp_path_factory.mktemp("files") / "c"))


def judged(files: Files, damage: Damage, outcome: Outcome) -> str:
    return run_damage(lambda: outcome, files, damage).result


def refused(files: Files, name: str) -> Outcome:
    return Outcome(Ending.REFUSED, text=f"CorruptCheckpointError: {files.root / name} is damaged")


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        (Fault.FLIP, Kind.CHUNK, CHUNK),
        (Fault.TRUNCATE, Kind.COMMON, "common.pt"),
        (Fault.DELETE, Kind.PACK, "objects/rank-00000.bin"),
        (Fault.EXTEND, Kind.INDEX, "manifest/index.json"),
    ],
)
def test_every_other_end_than_an_error_that_names_the_file_is_a_violation(
    fault: Fault, kind: Kind, name: str, files: Files
) -> None:
    damage = Damage(0, fault, kind, (name,), 10, b"\1")

    assert judged(files, damage, refused(files, name)) == "an error that names it"
    for bad in (LOADED, Outcome(Ending.DIFFERENT, 1), refused(files, "manifest/save.json")):
        with pytest.raises(ViolationError):
            judged(files, damage, bad)
    assert Files.below(files.root).contents == files.contents


def test_what_no_load_needs_may_pass(files: Files) -> None:
    index = files.index_starts[CHUNK]
    for damage in (
        Damage(0, Fault.FLIP, Kind.CHUNK_INDEX, (CHUNK,), index, b"\1"),
        Damage(0, Fault.DELETE, Kind.ZARR, (f"arrays/{LARGE}/zarr.json",)),
        Damage(0, Fault.EXTEND, Kind.PACK, ("objects/rank-00000.bin",), 0, b"x"),
        Damage(0, Fault.EXTEND, Kind.MARKER, ("metadata.json",), 0, b" "),
        Damage(0, Fault.FLIP, Kind.SAVE, ("manifest/save.json",), 50, b"\1"),
    ):
        assert judged(files, damage, LOADED) == "what was saved"
        with pytest.raises(ViolationError, match="something else was loaded"):
            judged(files, damage, Outcome(Ending.DIFFERENT, 1))


def test_a_load_that_raises_what_is_no_error_of_ours_is_a_violation(files: Files) -> None:
    def load() -> Outcome:
        raise MemoryError

    damage = Damage(0, Fault.FLIP, Kind.CHUNK, (CHUNK,), 0, b"\1")
    with pytest.raises(ViolationError, match="MemoryError"):
        run_damage(load, files, damage)


def test_every_kind_of_byte_and_fault_is_drawn(files: Files) -> None:
    chance = random.Random(1)
    flips = [draw_flip(files, chance, n) for n in range(300)]
    others = [draw_other(files, chance, n) for n in range(300)]

    assert {damage.kind for damage in flips} == set(Kind)
    assert {damage.fault for damage in others} == set(Fault) - {Fault.FLIP}
    assert {damage.kind for damage in others} == set(Kind) - {Kind.CHUNK_INDEX}
    assert all(files.kind_at(d.names[0], d.byte_offset) is d.kind for d in flips)
