"""docs/measured.md is what the committed results amount to, and so is README's table."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.page.figures import BarFigure, CurveFigure, TimelineFigure, digest_of
from benchmarks.page.page import STEMS, build_page
from benchmarks.page.readme_table import build_readme_table
from benchmarks.page.results import (
    ResultsError,
    Spread,
    find_results,
    spread_of,
    summarise_rounds,
    with_longest,
)

DOCS = report.ROOT / "docs"
FIGURES = DOCS / "measured"
MAX_NBYTES = 100_000
RUN = {
    "kind": "run",
    "commit": "0123456789abcdef",
    "has_local_changes": False,
    "command": "python benchmarks/x.py",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "safetensors": None},
    "machine": {
        "processor": "P",
        "num_cores": 2,
        "memory_nbytes": 8 * 10**9,
        "kernel": "6",
        "load_average": 0.5,
    },
}
CASE = {"file_system": "ext4", "nbytes": 10**9, "num_arrays": 3, "num_ranks": 2, "num_replicas": 1}


def sample(contender: str, repetition: int, seconds: float, **more: Any) -> dict[str, Any]:
    about = {"contender": contender, "repetition": repetition, "case": CASE}
    return {"kind": "sample", "step": "save", **about, "seconds": seconds, **more}


def measure(contender: str, step: str, seconds: float, **values: float) -> dict[str, Any]:
    about = {"kind": "sample", "step": step, "contender": contender, "repetition": 1}
    return {**about, "values": {"seconds": seconds, **values}, "case": CASE}


def write(directory: Path, stem: str, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in [RUN, *lines])
    (directory / f"{stem}.jsonl").write_text(text)


def test_the_page_is_what_the_committed_results_amount_to() -> None:
    made = build_page(report.RESULTS)

    assert (DOCS / report.PAGE_NAME).read_text(encoding="utf-8") == made.text


def test_every_figure_is_drawn_from_the_committed_results() -> None:
    made = build_page(report.RESULTS)

    assert {path.stem for path in FIGURES.iterdir()} == {figure.name for figure in made.figures}
    for figure in made.figures:
        path = FIGURES / f"{figure.name}.svg"
        assert f">{digest_of(figure)}<" in path.read_text(encoding="utf-8"), path
        assert path.stat().st_size <= MAX_NBYTES, path


def test_the_table_of_the_readme_is_what_the_committed_results_amount_to() -> None:
    readme = (report.ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Measured speed\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))

    assert table == build_readme_table(find_results(report.RESULTS, "save_load"))


def test_a_benchmark_without_results_is_said_to_be_missing(tmp_path: Path) -> None:
    write(tmp_path, "save_load_here", [sample("raw write", 1, 2.0, durable_seconds=None)])

    text = build_page(tmp_path).text

    (missing,) = re.findall(r"\*\*Not measured yet.*", text)
    assert set(re.findall(r"`(\w+)\.py`", missing)) == set(STEMS) - {"save_load"}
    assert "## Saves and loads" in text
    assert "## Loads in another layout" not in text


def test_a_page_of_nothing_names_all_benchmarks(tmp_path: Path) -> None:
    made = build_page(tmp_path)

    assert all(f"`{stem}.py`" in made.text for stem in STEMS)
    assert made.figures == ()


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "save_load.jsonl").write_text('{"kind": "run"}\n{"kin')

    with pytest.raises(ResultsError, match=r"save_load\.jsonl: line 2 is not JSON"):
        find_results(tmp_path, "save_load")


def test_ratios_are_taken_within_a_round_and_only_of_rounds_that_both_have() -> None:
    floor = [sample("raw write", n, s) for n, s in ((1, 1.0), (2, 2.0), (3, 4.0))]
    ours = [sample("zarr 1", n, s) for n, s in ((1, 3.0), (2, 4.0))]

    first, second = summarise_rounds([*ours, *floor], ("raw write", "nobody"))

    assert (first.contender, first.num_rounds, first.seconds) == ("raw write", 3, Spread(2, 1, 4))
    assert second.ratios == {"raw write": Spread(2.5, 2.0, 3.0)}


def test_the_floor_of_a_group_is_the_longer_of_its_parts_in_each_round() -> None:
    read = [sample("raw read", 1, 1.0), sample("raw read", 2, 5.0), sample("raw read", 3, 1.0)]
    send = [sample("gloo exchange", 1, 2.0), sample("gloo exchange", 2, 3.0)]

    found = with_longest([*read, *send], ("raw read", "gloo exchange"), "floor")

    floor = {line["repetition"]: line["seconds"] for line in found if line["contender"] == "floor"}
    assert floor == {1: 2.0, 2: 5.0}


def test_a_spread_of_one_value_is_that_value() -> None:
    assert spread_of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_a_violation_is_on_the_page(tmp_path: Path) -> None:
    violation = {"kind": "violation", "why": "job 3: rank 1 hangs", "seed": 7}
    write(tmp_path, "recovery_faults", [violation])
    write(tmp_path, "local_faults", [violation])

    text = build_page(tmp_path).text

    assert "**A violation**, seed 7: job 3: rank 1 hangs" in text
    assert "| local checkpoints | stopped by a violation | 7 | 1 |" in text


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """Results of every benchmark, of few lines each."""
    for stem, lines in LINES.items():
        write(tmp_path, stem, lines)
    return tmp_path


def test_every_benchmark_has_its_place_on_the_page(everything: Path) -> None:
    made = build_page(everything)

    assert set(LINES) == set(STEMS)
    assert "Not measured yet" not in made.text
    titles = re.findall(r"^## (.*)$", made.text, re.MULTILINE)
    assert titles == [
        *(
            "Where and with what",
            "Goals",
            "Saves and loads",
            "Two-stage loads",
            "Loads in another layout",
        ),
        *("Local checkpoints", "Saves behind training", "Verify and convert", "Object stores"),
        *("Recovery", "Scaling", "Timelines", "Planning", "Damage"),
    ]
    assert {type(figure) for figure in made.figures} == {BarFigure, CurveFigure, TimelineFigure}
    for text in SHOWN:
        assert text in made.text, text


def test_every_image_of_the_page_is_a_figure(everything: Path) -> None:
    made = build_page(everything)

    names = re.findall(r"\]\(measured/(\w+)\.svg\)", made.text)
    assert names == [figure.name for figure in made.figures]
    assert len(set(names)) == len(names)


def test_a_figure_is_known_by_all_that_is_drawn(everything: Path) -> None:
    before = {figure.name: digest_of(figure) for figure in build_page(everything).figures}
    write(everything, "object_stores", [measure("tensorstore put", "save", 1.5)])

    after = {figure.name: digest_of(figure) for figure in build_page(everything).figures}

    assert [name for name in after if after[name] != before[name]] == ["object_stores"]


def test_figures_are_drawn_to_the_same_bytes(everything: Path, tmp_path: Path) -> None:
    drawing = pytest.importorskip("benchmarks.page.drawing", exc_type=ModuleNotFoundError)
    figures = build_page(everything).figures
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    for figure in figures:
        first, second = (drawing.draw(figure, tmp_path / name) for name in ("one", "two"))

        content = first.read_bytes()
        assert content == second.read_bytes()
        assert f">{digest_of(figure)}<".encode() in content
        assert b"dc:date" not in content


def test_a_run_goes_on_when_a_benchmark_fails_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def start(command: Sequence[str]) -> int:
        commands.append(command)
        if "two_stage.py" in command[1]:
            return 3
        Path(command[-1]).write_text(json.dumps(RUN) + "\n")
        return 0

    is_fine = report.run_all(report.BENCHMARKS[:3], tmp_path / "out", smoke=True, start=start)

    assert not is_fine
    assert [Path(command[1]).stem for command in commands] == ["save_load", "two_stage", "reshard"]
    assert all("--smoke" in command for command in commands)
    printed = capsys.readouterr()
    assert "failed: two_stage" in printed.err
    assert "failed with status 3" in printed.out
    page = (tmp_path / "out" / report.PAGE_NAME).read_text()
    assert "`two_stage.py`" in page
    assert "`save_load.py`" not in page.partition("## ")[0]


@pytest.mark.parametrize("benchmark", report.BENCHMARKS, ids=lambda benchmark: benchmark.stem)
def test_a_script_knows_the_options_that_it_gets(benchmark: report.Benchmark) -> None:
    main = import_module(f"benchmarks.{benchmark.stem}").main

    command = benchmark.command(Path("out.jsonl"), smoke=True)
    options = {text[2:].replace("-", "_") for text in command if text.startswith("--")}
    assert {"out", "smoke"} <= options <= set(inspect.signature(main).parameters)


def test_all_benchmarks_of_the_page_are_run_and_are_there() -> None:
    stems = [benchmark.stem for benchmark in report.BENCHMARKS]
    assert len(set(stems)) == len(stems)
    assert set(STEMS) <= set(stems)
    for stem in stems:
        assert (report.ROOT / "benchmarks" / f"{stem}.py").is_file()
        assert (Path(__file__).parent / f"test_{stem}.py").is_file()


TOOL = {"nbytes_per_second": 2e9, "peak_nbytes": 300 << 20, "before_nbytes": 200 << 20}
READS = {"read_by_calls": 1.25, "read_from_device": 0.5}
STEPS = {"slowdown": 1.02, "worst": 1.5, "worst_idle": 1.25}


def of_case(lines: Sequence[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return [{**line, "case": {**line["case"], **more}} for line in lines]


def recovery(kind: str, num_spares: int, seconds: float) -> dict[str, Any]:
    fault = {"kind": kind}
    return {"kind": "recovery", "fault": fault, "num_spares": num_spares, "seconds": seconds}


def timeline(rank: int, kind: str) -> dict[str, Any]:
    span = {"lane": "main thread", "kind": kind, "begin": 0.0, "end": 0.75}
    about = {"kind": "timeline", "call": "save, zarr 2", "rank": rank, "case": CASE}
    return {**about, "seconds": 0.75, "spans": [span], "totals": {kind: 0.75}}


LINES: dict[str, list[dict[str, Any]]] = {
    "save_load": [
        sample("raw write", 1, 1.0, durable_seconds=None),
        sample("raw write+fsync", 1, 2.0, durable_seconds=2.0),
        sample("zarr 1", 1, 2.5, durable_seconds=2.5),
        {"kind": "skipped", "contender": "safetensors", "reason": "safetensors is not installed"},
    ],
    "two_stage": [
        sample(name, 1, seconds)
        for name, seconds in (
            ("raw read", 1.0),
            ("gloo exchange", 0.5),
            ("two-stage, zarr 1", 1.375),
            ("fully parallel", 3.0),
        )
    ],
    "reshard": of_case(
        [
            measure(name, "load cold", seconds, **READS)
            for name, seconds in (("raw read", 1.0), ("zarr 2", 1.125), ("torch_dist", 4.0))
        ],
        move="TP2 to TP4",
    ),
    "local_replicated": [
        {**sample(name, 1, seconds), "case": {"file_system": "ext4", "rank_nbytes": 1 << 20,
                                              "num_ranks": 4, "num_copies": 2}}
        for name, seconds in (("floor", 1.0), ("local manager", 1.75), ("nvrx", 4.0))
    ],
    "async_save": [
        *of_case(
            [
                measure(name, "blocking", seconds, until_there=5.0)
                for name, seconds in (("memcpy", 1.0), ("zarr 2", 1.625))
            ],
            part="blocking", step_seconds=0.0, shares_core=False,
        ),
        *of_case(
            [measure("zarr 2", "training", 0.07, **STEPS)],
            part="training", step_seconds=0.07, shares_core=True,
        ),
    ],
    "tools": of_case(
        [
            measure(name, "warm", seconds, **TOOL)
            for name, seconds in (("raw read", 1.0), ("verify", 1.875))
        ],
        source="zarr 2",
    ),
    "object_stores": [
        measure(name, "save", seconds)
        for name, seconds in (("tensorstore put", 1.0), ("boto3 put", 2.0), ("zarr 2", 2.125))
    ],
    "recovery_faults": [
        recovery("SIGKILL", 0, 2.25),
        recovery("SIGKILL", 1, 0.125),
        {"kind": "campaign", "faults": 2, "violations": 0, "seed": 0},
    ],
    "recovery_overhead": [
        {"kind": "summary", "contender": "recovery", "ms_per_step": 4.5, "share": 0.009,
         "mirrored_nbytes": 100, "vote_nbytes": 8},
    ],
    "scaling": of_case(
        [
            sample("raw write+fsync", 1, 1.0, durable_seconds=1.0),
            sample("zarr 1", 1, 1.0625, durable_seconds=1.0625),
        ],
        sweep="bytes",
    ),
    "timeline": [timeline(0, "writing"), timeline(1, "waiting for ranks")],
    "format2_faults": [
        {"kind": "campaign", "seed": 5, "violations": 0, "cases": {"flip": 1000, "cut": 7}}
    ],
    "local_faults": [],
    "scale_model": [
        {"kind": "cost", "seconds": 1.5, "memory_nbytes": 3 << 20, "gathered_nbytes": 1 << 20,
         "case": {"num_ranks": 1024, "shards_per_rank": 1000, "shape": "shared"}},
    ],
}  # fmt: skip
SHOWN = (
    "safetensors (safetensors is not installed)",
    "| zarr 1 | 2.500 (2.500-2.500) | 1.25 (1.25-1.25) | 1 |",
    "| two-stage, zarr 1 | 1.375 (1.375-1.375) | 1.38 (1.38-1.38) | 0.46 (0.46-0.46) | 1 |",
    "| zarr 2 | 1.125 (1.125-1.125) | 1.12 | 0.28 | 1.25 | 0.50 |",
    "| local manager | 1.750 (1.750-1.750) | 1.75 (1.75-1.75) | 0.44 (0.44-0.44) | 1 |",
    "| zarr 2 | 1.625 (1.625-1.625) | 1.62 (1.62-1.62) | - | 5.000 (5.000-5.000) |",
    "Steps of about 70 ms. Both cores are threads of one.",
    "| zarr 2 | 1.02 (1.02-1.02) | 1.50 | 1.25 |",
    "| verify | 1.875 (1.875-1.875) | 2.00 | 1.88 | - | 300 MiB |",
    "| zarr 2 | 2.125 (2.125-2.125) | 2.12 (2.12-2.12) | 1.06 (1.06-1.06) | 1 |",
    "| SIGKILL | 1 | 1 | 0.125 | 0.125 | 0.125 |",
    "2 faults, no violation: weights, moments",
    "| recovery | 4.50 | 0.90 % | 100 | 8 |",
    "| zarr 1 | 1.062 |",
    "| rank 1 | 0.000 | 0.750 | 0.750 |",
    "| format 2 | 7 cut, 1,000 flip | 5 | 0 |",
    "| shared | 1,024 | 1,000 | 1.50 | 3.0 MiB | 1.0 MiB |",
)


def test_goals_say_where_they_are_met_and_where_and_why_they_are_not(tmp_path: Path) -> None:
    quick = [sample("raw write", 1, 1.0, durable_seconds=None)]
    lines = [*quick, sample("zarr 1", 1, 1.6, durable_seconds=None)]
    in_memory = [{**line, "case": {**CASE, "file_system": "tmpfs"}} for line in lines]
    write(tmp_path, "save_load", [*lines, *in_memory])

    text = build_page(tmp_path).text.partition("## Goals")[2].partition("\n## ")[0]

    rows = [line for line in text.splitlines() if line.startswith("| zarr")]
    assert rows == ["| zarr 1: save to memory, of raw write | 1.25 | 1.60 | **0 of 1** |"]
    assert "- zarr 1: save to memory, of raw write: 1.60 (1 GB, 3 arrays, 2 ranks, tmpfs)" in text
    assert "**Missed.** Megatron-Core's own checks" in text


def test_a_goal_that_is_met_has_no_reasons(tmp_path: Path) -> None:
    values = {"nbytes_per_second": 1.0, "peak_nbytes": 1 << 20}
    lines = [measure("raw read", "warm", 1.0, **values), measure("verify", "warm", 1.1, **values)]
    case = {**CASE, "source": "zarr 2", "file_nbytes": 1, "num_threads": 2}
    write(tmp_path, "tools", [{**line, "case": case} for line in lines])

    text = build_page(tmp_path).text.partition("## Goals")[2].partition("\n## ")[0]

    assert "| verify, of raw read | 1.43 | 1.10 | 1 of 1 |" in text
    assert "Missed" not in text
