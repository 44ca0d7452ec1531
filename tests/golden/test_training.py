"""Training goes on from the sets, at other layouts; from the flat one once it is upgraded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies import open as open_checkpoint
from dist_ckpt_strategies import upgrade
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import FusedLayoutAdam
from dist_ckpt_strategies.cli.demo.main import ParallelLayout
from dist_ckpt_strategies.errors import CheckpointError, StrategyError
from dist_ckpt_strategies.formats.objects import dump_object, load_content
from dist_ckpt_strategies.tools.upgrade import upgraded_common
from tests.golden.gpt import Trainee, parallel, whole_tensors
from tests.golden.sets import (
    FLAT,
    RESHARDABLE,
    TP4,
    GoldenSet,
    Route,
    differing,
    load_along,
    register,
)
from tests.support.ranks import done_by, run_processes

NUM_ROWS = 128
AS_IT_IS = "as it is"
STATES = ("param", "exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state."


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace(f"{PREFIX}fp32_param.", f"{PREFIX}param."): t for key, t in tensors.items()}


def gradient(weight: torch.Tensor) -> torch.Tensor:
    """Some gradient, small enough not to be clipped, the same whatever the layout."""
    return weight.detach().float() * 1e-3 + 1e-5


def step_of(trainee: Trainee) -> list[float]:
    """Take one step; the number of steps that each group of parameters had taken before."""
    groups = trainee.optimizer.param_groups
    before = [group["step"] for group in groups]
    for weight in trainee.model.parameters():
        weight.main_grad.copy_(gradient(weight))
    succeeded, norm, _ = trainee.optimizer.step()
    assert succeeded
    assert 0 < norm < 1
    return before


def train_on(
    _rank: int, checkpoint: str, layout: ParallelLayout, route: Route
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Body of a rank: the whole state as loaded, and after one step."""
    register()
    with parallel(layout):
        trainee = Trainee.build(layout, NUM_ROWS)
        loaded = load_along(route, trainee.state(is_loading=True), checkpoint)
        trainee.take_over(loaded)
        resumed = whole_tensors(trainee.state(is_loading=False))
        steps = step_of(trainee)
        return resumed, whole_tensors(trainee.state(is_loading=False)), steps


def stepped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The expected tensors after the same step, without Megatron-Core, array by array."""
    found: dict[str, torch.Tensor] = {}
    for key, weight in tensors.items():
        if key.startswith(PREFIX):
            continue
        master = torch.nn.Parameter(tensors[f"{PREFIX}param.{key}"].clone())
        adam = FusedLayoutAdam([master], lr=0.001, eps=1e-8, weight_decay=0.01)
        adam.param_groups[0]["step"] = 3
        adam.state[master] = {
            name: tensors[f"{PREFIX}{name}.{key}"].clone() for name in STATES if name != "param"
        }
        master.grad = gradient(weight)
        adam.step()
        state: dict[str, Any] = {"param": master.detach(), **adam.state[master]}
        found |= {f"{PREFIX}{name}.{key}": state[name] for name in STATES}
        found[key] = master.detach().to(weight.dtype)
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("to", "layout", "route"),
    [
        (AS_IT_IS, ParallelLayout(tp=4, pp=1, dp=1), Route.OURS_WRAPPED),
        (AS_IT_IS, ParallelLayout(tp=1, pp=2, dp=2), Route.WRAPPED),
        (None, ParallelLayout(tp=1, pp=1, dp=2), Route.MEGATRON),
        ("pack", ParallelLayout(tp=2, pp=2, dp=1), Route.OURS),
        ("torch_dist", ParallelLayout(tp=2, pp=1, dp=1), Route.MEGATRON),
    ],
    ids=str,
)
def test_the_state_and_the_next_step_are_those_of_the_expected_tensors(
    unpacked: Callable[[str], GoldenSet],
    tmp_path: Path,
    to: str | None,
    layout: ParallelLayout,
    route: Route,
) -> None:
    golden = unpacked(RESHARDABLE if to == AS_IT_IS else FLAT)
    checkpoint = golden.checkpoint
    if to != AS_IT_IS:
        checkpoint = str(tmp_path / "upgraded")
        report = upgrade(golden.checkpoint, checkpoint, to)
        assert (report.num_arrays, report.num_objects) == (68, 20)
        assert to is not None or open_checkpoint(checkpoint).format == ("zarr", 1)

    results = done_by(layout.num_ranks, train_on, checkpoint, layout, route)

    resumed, trained, steps = results[0]
    expected = renamed(golden.tensors)
    assert set(steps) == {3}
    assert differing(resumed, expected) == []
    after = stepped(expected)
    assert set(differing(after, expected)) == after.keys()
    assert differing(trained, after) == []


@pytest.mark.multiprocess
def test_without_the_upgrade_the_optimizer_cannot_be_loaded(flat: GoldenSet) -> None:
    task = (flat.checkpoint, ParallelLayout(), Route.OURS)
    (result,) = run_processes(1, train_on, *task)

    assert isinstance(result, CheckpointError), result
    assert f"{PREFIX}param." in str(result)


def test_a_checkpoint_of_the_present_form_is_not_upgraded(
    unpacked: Callable[[str], GoldenSet], tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=r"nothing to upgrade.*fully_reshardable"):
        upgrade(unpacked(RESHARDABLE).checkpoint, tmp_path / "upgraded")
    assert not (tmp_path / "upgraded" / "metadata.json").exists()


def test_steps_that_only_the_parameters_have_go_to_the_groups() -> None:
    old: dict[str, Any] = {
        "optimizer_states": [
            {
                "optimizer": {"param_groups": [{"lr": 1.0}, {"lr": 2.0, "step": 5}]},
                "param_state": {0: {"step": torch.tensor(4.0)}, 1: {"step": torch.tensor(4.0)}},
                "param_state_sharding_type": "fully_sharded_model_space",
            }
        ]
    }
    content = upgraded_common(dump_object(old, name="c"), "common.pt", ())

    (found,) = load_content(content, "common.pt", "c", ())["optimizer_states"]
    assert found == {
        "optimizer": {"param_groups": [{"lr": 1.0, "step": 4.0}, {"lr": 2.0, "step": 5}]},
        "param_state_sharding_type": "fully_reshardable",
    }

    old["optimizer_states"][0]["param_state"][1]["step"] = torch.tensor(3.0)
    with pytest.raises(StrategyError, match="different numbers of steps"):
        upgraded_common(dump_object(old, name="c"), "common.pt", ())


def load_weights(
    _rank: int, golden: GoldenSet, layout: ParallelLayout, num_rows: int
) -> dict[str, torch.Tensor]:
    register()
    with parallel(layout):
        model = Trainee.build(layout, num_rows).model
        asked: dict[str, Any] = {"model": model.sharded_state_dict()}
        loaded = load_along(Route.MEGATRON, asked, golden.checkpoint)
        model.load_state_dict(loaded["model"], strict=True)
        return whole_tensors(model.sharded_state_dict())


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "tp", "num_rows"), [(TP4, 2, 104), (FLAT, 4, 256)])
def test_weights_are_bit_identical_whatever_the_vocabularys_padding(
    unpacked: Callable[[str], GoldenSet], name: str, tp: int, num_rows: int
) -> None:
    golden = unpacked(name)
    found = done_by(tp, load_weights, golden, ParallelLayout(tp=tp), num_rows)[0]

    expected = {k: t for k, t in golden.tensors.items() if not k.startswith("optimizer.")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        resized = torch.zeros((num_rows, 64), dtype=torch.bfloat16)
        num_kept = min(num_rows, NUM_ROWS)
        resized[:num_kept] = expected[key][:num_kept]
        expected[key] = resized
    assert differing(found, expected) == []
