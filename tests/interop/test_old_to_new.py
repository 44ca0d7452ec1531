"""We load what Megatron-Core 0.15.3 saves, bit for bit, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt_strategies.config import Engine
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.interop.cases import Case, regular_case, resharded
from tests.interop.conftest import RunOld
from tests.interop.peer import state_of, wrong_of
from tests.support.ranks import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def load_case(rank: int, case: Case, checkpoint: Path, engine: Engine) -> list[str]:
    """Body of a rank: what came out wrong, along every route."""
    begin_rank(engine)
    job = case.job("load")
    expected = state_of(job, rank, case.tensors, case.objects)
    wrong = []
    for route in Route:
        found = load_along(route, state_of(job, rank, None, None), str(checkpoint))
        wrong += [f"{route}: {what}" for what in wrong_of(found, expected, case.common)]
    return wrong


@pytest.mark.parametrize("engine", list(Engine))
def test_what_the_old_version_saves_loads_at_the_same_and_at_another_layout(
    engine: Engine, checkpoint: Path, run_old: RunOld
) -> None:
    case = regular_case()
    assert run_old(case, case.job("save")) == []

    for layout in (case, resharded(case)):
        results = run_processes(layout.size, load_case, layout, checkpoint, engine)
        assert require_done(results) == [[]] * layout.size
