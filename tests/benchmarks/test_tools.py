from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders.plain_files import copy_files, read_files
from benchmarks.contenders.roster import TOOL_PACKAGES
from benchmarks.tools import SOURCES
from tests.support.scripts import Results, results_of

slow = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("tools.py", tmp_path_factory.mktemp("run"), limit_s=240)


class TestScript:
    pytestmark = slow

    def test_every_tool_is_measured_on_its_source_beside_both_floors(
        self, results: Results
    ) -> None:
        tools = {tool for of_source in SOURCES.values() for tool in of_source}
        floors = set(TOOL_PACKAGES) - tools
        for source, own in SOURCES.items():
            samples = [x for x in results.of_kind("sample") if x["case"]["source"] == source]
            assert {x["contender"] for x in samples} == {*own, *floors}

    def test_the_peak_of_memory_is_not_below_what_was_taken_before(self, results: Results) -> None:
        for sample in results.of_kind("sample"):
            values = sample["values"]
            assert 0 < values["before_nbytes"] <= values["peak_nbytes"]
            assert values["nbytes_per_second"] > 0

    def test_nothing_is_left_behind(self, results: Results) -> None:
        assert results.left == []


def test_plain_reads_and_copies_take_every_byte(tmp_path: Path) -> None:
    contents = {f"d{number}/file": bytes([number]) * 5_000_000 * number for number in range(4)}
    source, target = tmp_path / "source", tmp_path / "target"
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True)
        (source / name).write_bytes(content)
    total = sum(map(len, contents.values()))
    assert read_files(source, 2) == total
    assert copy_files(source, target, 2) == total
    assert {name: (target / name).read_bytes() for name in contents} == contents
