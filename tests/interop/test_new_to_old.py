"""Megatron-Core 0.15.3 loads what we save, bit for bit, whatever the layout."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest
from megatron.core import dist_checkpointing

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.task import ParallelLayout
from dist_ckpt_strategies.config import Engine
from tests.golden.gpt import Trainee, parallel
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.golden.sets import RESHARDABLE, GoldenSet
from tests.interop.cases import Case, irregular_case, regular_case, resharded
from tests.interop.conftest import RunOld
from tests.interop.peer import state_of
from tests.support.ranks import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


class Writer(Enum):
    """Who saves, with which engine."""

    MEGATRON = (dist_checkpointing.save, Engine.TENSORSTORE)
    MEGATRON_ZARR = (dist_checkpointing.save, Engine.ZARR)
    OURS = (dist_ckpt_strategies.save, Engine.TENSORSTORE)


def save_case(rank: int, case: Case, checkpoint: Path, writer: str) -> None:
    save, engine = Writer[writer].value
    begin_rank(engine)
    state = state_of(case.job("save"), rank, case.tensors, case.objects)
    save({**state, **case.common}, str(checkpoint), ("zarr", 1))


def save_on_ranks(case: Case, checkpoint: Path, writer: Writer) -> None:
    require_done(run_processes(case.size, save_case, case, checkpoint, writer.name))


@pytest.mark.parametrize("writer", list(Writer), ids=lambda writer: writer.name)
def test_what_we_save_loads_with_every_strategy_of_the_old_version(
    writer: Writer, checkpoint: Path, run_old: RunOld
) -> None:
    case = regular_case()
    save_on_ranks(case, checkpoint, writer)

    assert run_old(case, case.job("load")) == []


def test_what_we_save_loads_in_the_old_version_at_another_layout_and_whole(
    checkpoint: Path, run_old: RunOld
) -> None:
    case = regular_case()
    save_on_ranks(case, checkpoint, Writer.MEGATRON)

    other = resharded(case)
    assert run_old(other, other.job("load")) == []
    # The old version lists the arrays of the directory itself only.
    top = other.without("group/inner.weight")
    assert run_old(top, top.job("load_whole")) == []


def test_the_comparison_in_the_old_version_sees_a_single_bit(
    checkpoint: Path, run_old: RunOld
) -> None:
    """If this fails, the other tests show nothing."""
    case = regular_case()
    save_on_ranks(case, checkpoint, Writer.MEGATRON)
    chunk = checkpoint / "dtypes.bfloat16" / "0.1"
    content = bytearray(chunk.read_bytes())
    content[-2] ^= 1
    chunk.write_bytes(content)

    findings = run_old(case, case.job("load"))

    names = ["default", "in place", "tensorstore", "zarr"]
    assert sorted(findings) == [f"{name}: tensors dtypes.bfloat16" for name in names]


@pytest.mark.parametrize("writer", list(Writer), ids=lambda writer: writer.name)
def test_irregular_shards_load_whole_in_the_old_version(
    writer: Writer, checkpoint: Path, run_old: RunOld
) -> None:
    case = irregular_case()
    save_on_ranks(case, checkpoint, writer)

    assert run_old(case, case.job("load_whole")) == []


def save_golden(_rank: int, golden: GoldenSet, layout: ParallelLayout, checkpoint: Path) -> None:
    begin_rank(Engine.TENSORSTORE)
    with parallel(layout):
        trainee = Trainee.build(layout, 128)
        state = load_along(Route.MEGATRON, trainee.state(is_loading=True), golden.checkpoint)
        trainee.take_over(state)
        saved = trainee.state(is_loading=False)
        dist_checkpointing.save(saved, str(checkpoint), ("zarr", 1))


def test_a_gpt_and_its_optimizer_saved_by_us_load_in_the_old_version(
    checkpoint: Path, run_old: RunOld, tmp_path: Path
) -> None:
    golden = GoldenSet.unpack(RESHARDABLE, tmp_path)
    layout = ParallelLayout(tp=2, pp=2)
    require_done(run_processes(4, save_golden, golden, layout, checkpoint, timeout_s=120))
    objects = {k: v for k, v in golden.objects.items() if "_extra_state" in k}
    case = Case(2, golden.tensors, [[], []], objects)

    assert run_old(case, case.job("load_whole")) == []
    assert run_old(case, case.job("load_gpt", tp=1, pp=2)) == []
    assert run_old(case, case.job("load_gpt", tp=2, pp=1)) == []
