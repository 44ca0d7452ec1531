"""The simulated job is one that can be saved, and the paper counts what the planner plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale.job import TRILLION, Job, smaller
from benchmarks.scale.paper import ASSUMED, GB, Sheet, node_times_of, sheet_of, times_of
from benchmarks.scale.rehearsals import REHEARSALS, Planner
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.sharded.plan_save import build_save_plan

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_planners.py"
SMALL = Job(layers=6, hidden=512, vocabulary=1024, tensor=2, pipeline=3, data=4)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    out = tmp_path_factory.mktemp("run") / "results.jsonl"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--plan", Planner.LOCAL.value, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.multiprocess
def test_the_script_writes_what_it_measured_and_what_follows_on_paper(
    lines: list[dict[str, object]],
) -> None:
    kinds = [line["kind"] for line in lines]

    assert kinds[0] == "run"
    assert kinds[1:] == ["planner", "sheet", *["times"] * 6, "node times"]


@pytest.mark.parametrize("planner", Planner)
def test_every_planner_plans_for_a_part_of_the_job(planner: Planner) -> None:
    job = smaller(16)
    rehearsal = REHEARSALS[planner]

    tally = rehearsal.plan(job, rehearsal.describe(job))

    assert tally.num_items > 0
    # Half the ranks are those of nodes that have a copy of everything: nothing travels.
    assert (tally.num_steps > 0) is (planner is not Planner.RESHARD)


@pytest.mark.parametrize("chunk_layout", [ChunkLayout.WHOLE, ChunkLayout.INNER])
def test_the_paper_counts_what_the_planner_plans_for_all_ranks(chunk_layout: ChunkLayout) -> None:
    requests = [SMALL.shards_of(rank) for rank in range(SMALL.num_ranks)]
    plan = build_save_plan(requests, chunk_layout=chunk_layout)
    sheet = sheet_of(SMALL)
    by_rank = [sum(w.nbytes for w in plan.writes_of(r)) for r in range(SMALL.num_ranks)]

    num_files = sheet.num_files_1 if chunk_layout is ChunkLayout.WHOLE else sheet.num_files_2
    assert len(plan.writes) == num_files
    assert len(plan.creations) == sheet.num_arrays
    assert sum(by_rank) == sheet.nbytes
    assert max(by_rank) == sheet.most_written_nbytes
    assert sum(len(request.shards) for request in requests) == sheet.num_shards
    # Biases and norms are on all tensor-parallel ranks; each keeps their optimizer state.
    assert 1 < sheet.nbytes / SMALL.num_parameters / (2 + 3 * 4) < 1.01


def test_the_job_has_a_trillion_parameters_on_as_many_ranks_as_it_says() -> None:
    assert TRILLION.num_ranks == 16_384
    assert 1.0e12 < TRILLION.num_parameters < 1.02e12
    assert [smaller(n).num_ranks for n in (16, 64, 256, 1024, 16_384)] == [
        16,
        64,
        256,
        1024,
        16_384,
    ]
    assert smaller(16_384) == TRILLION


SHEET = Sheet(10, 1, 1, 1, 1, 100 * GB, 0, 4 * GB, 2 * GB, 6 * GB, 1 * GB)


def test_a_save_takes_as_long_as_storage_or_the_busiest_rank() -> None:
    assert times_of(SMALL, SHEET, 10 * GB).save == 10.0
    assert times_of(SMALL, SHEET, 1000 * GB).save == 2.0


def test_a_two_stage_load_reads_once_what_all_ranks_would_read_alone() -> None:
    times = times_of(SMALL, SHEET, 10 * GB)

    assert times.load_alone == SMALL.num_ranks * 7 / 10
    assert times.load_two_stage == 10.0 + 6 * GB / ASSUMED.rank_to_rank


def test_a_node_recovers_without_shared_storage() -> None:
    times = node_times_of(SHEET, copies=2)

    assert times.local_save == 2 * times.local_load == 8 * 2 * 2 / 10
    assert times.recover_nbytes == 8 * 8 * GB
    assert times.recover == 8 / 20
