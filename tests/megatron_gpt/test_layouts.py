"""Models of Megatron-Core go to another parallel layout bit for bit.

Megatron cuts the distributed optimizer's state of the form ``dp_reshardable`` along its flat
buffers: shards of every length, no regular grid, and other cuts for every data-parallel size. The
sizes here give parameters whose length is no multiple of 64, so that the buffers hold padding
between them as well.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.main import (
    ModelSize,
    ParallelLayout,
    RankTask,
    Training,
    compare_digests,
)
from tests.support.checkpoints import header_of
from tests.support.demo_ranks import run_task_forked
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_EXPERTS = 4
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


def build(kind: str, tp: int, pp: int, ep: int, fill: float) -> Any:
    """A model of that kind in the present layout, every weight known by its position."""
    experts = {} if kind == "bert" else {"num_moe_experts": NUM_EXPERTS, **SWIGLU}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        add_bias_linear=kind == "bert",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        **experts,
    )
    common = {
        "vocab_size": 64,
        "max_sequence_length": 4,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if kind == "bert":
        model = BertModel(config, 0, bert_layer_local_spec, **common)
    else:
        model = GPTModel(config, get_gpt_layer_local_spec(num_experts=NUM_EXPERTS), **common)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(number)
            parameter.random_().add_(fill)
    return model


def reshard(_rank: int, kind: str, backend: tuple[str, int], root: Path) -> list[str]:
    """Save at one layout, load and save at another; the keys whose arrays then differ."""
    dist_ckpt_strategies.register()
    layouts = ((1, 2, 2), (2, 1, 2)) if kind == "moe" else ((2, 2, 1), (4, 1, 1))
    for number, (tp, pp, ep) in enumerate(layouts):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        model = build(kind, tp, pp, ep, 100.0 * number)
        if number:
            wanted = model.sharded_state_dict()
            loaded, missing, unexpected = dist_checkpointing.load(
                wanted, str(root / "0"), strict="return_all"
            )
            assert (missing, unexpected) == (set(), set())
            model.load_state_dict(loaded)
        if dist.get_rank() == 0:
            (root / str(number)).mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(root / str(number)), backend)
    first, second = (dist_checkpointing.load_plain_tensors(str(root / name)) for name in "01")
    assert len(first) > 5
    assert first.keys() == second.keys()
    return [key for key, tensor in first.items() if not torch.equal(tensor, second[key])]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("moe", ("zarr", 1)), ("moe", ("safetensors", 1)), ("bert", ("safetensors", 1))],
)
def test_a_model_is_the_same_in_another_layout(
    kind: str, backend: tuple[str, int], tmp_path: Path
) -> None:
    assert run_processes(4, reshard, kind, backend, tmp_path, timeout_s=100.0) == [[]] * 4


TRAINING = Training(
    size=ModelSize(2, 40, num_heads=4, num_query_groups=2, ffn_hidden=72, sequence_length=16),
    global_batch=8,
    num_before_save=3,
    num_after_save=2,
    sharding_type="dp_reshardable",
    backend="safetensors",
)


@pytest.mark.parametrize(
    ("saved", "loaded", "training"),
    [
        (ParallelLayout(tp=1, dp=4), ParallelLayout(tp=1, dp=2), TRAINING),
        (ParallelLayout(tp=2, dp=1), ParallelLayout(tp=2, dp=2), TRAINING),
    ],
    ids=str,
)
def test_optimizer_state_is_bit_identical_at_another_data_parallel_size(
    saved: ParallelLayout, loaded: ParallelLayout, training: Training, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    before = run_task_forked(RankTask(saved, training, checkpoint))
    after = run_task_forked(RankTask(loaded, training, checkpoint, resumes=True))

    kinds = ("weights", "exp_avg", "exp_avg_sq", "fp32 master")
    assert compare_digests(before.digests, after.digests) == dict.fromkeys(kinds, (17, []))
    assert sorted(after.losses) == [3, 4]
    assert all(abs(loss - before.losses[n]) < 0.02 for n, loss in after.losses.items())
    packs = checkpoint.glob("packs/*/*.safetensors")
    stored = {name for pack in packs for name in header_of(pack)[0]}
    assert any(name.startswith("optimizer.distributed.dp_group_idx_0.gbuf") for name in stored)
