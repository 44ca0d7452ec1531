"""The stand-ins hold inside their block only."""

from __future__ import annotations

import contextlib
import math

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random as megatron_random

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import FusedLayoutAdam, cpu_stand_ins


def patched_objects() -> tuple[object, ...]:
    return (
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.manual_seed,
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
        vars(megatron_random)["_get_cuda_rng_state"],
        vars(megatron_random)["_set_cuda_rng_state"],
        megatron_optimizer.Adam,
        megatron_optimizer.USING_PYTORCH_OPTIMIZER,
        distrib_optimizer.Adam,
        distrib_optimizer.HAVE_APEX_OR_TE,
        distrib_optimizer.USING_APEX_OPTIMIZER,
    )


def test_everything_is_as_before_after_the_block_even_when_it_fails() -> None:
    before = patched_objects()

    inside: tuple[object, ...] = ()
    with contextlib.suppress(KeyError), cpu_stand_ins():
        inside = patched_objects()
        raise KeyError

    assert all(a is not b for a, b in zip(before, inside, strict=True))
    assert all(a is b for a, b in zip(before, patched_objects(), strict=True))
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_inside_the_block_cuda_means_the_cpu() -> None:
    with cpu_stand_ins():
        made = torch.zeros(2, dtype=torch.bfloat16, device="cuda")
        moved = made.cuda()

        assert made.device.type == "cpu"
        assert moved is made
        assert made.type() == "torch.cuda.BFloat16Tensor"
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"


def test_the_fused_layout_adam_makes_the_same_steps_as_torchs_adamw() -> None:
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    fused = FusedLayoutAdam([ours], **options)  # type: ignore[arg-type]
    adamw = torch.optim.AdamW([theirs], **options)  # type: ignore[arg-type]

    for step in range(5):
        for param in (ours, theirs):
            param.grad = torch.sin(start * (step + 1))
        fused.step()
        adamw.step()

    torch.testing.assert_close(ours, theirs)
    assert fused.param_groups[0]["step"] == 5
    assert set(fused.state[ours]) == {"exp_avg", "exp_avg_sq"}
    assert math.isfinite(float(ours.detach().sum()))
