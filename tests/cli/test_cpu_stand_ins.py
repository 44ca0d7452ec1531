"""The stand-ins hold inside their block only."""

from __future__ import annotations

import contextlib
import math

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random as megatron_random

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import FusedLayoutAdam, cpu_stand_ins


def test_everything_is_as_before_after_the_block_even_when_it_fails() -> None:
    owners = (torch.cuda, megatron_random, megatron_optimizer, distrib_optimizer)
    before = [dict(vars(owner)) for owner in owners]

    with contextlib.suppress(KeyError), cpu_stand_ins():
        inside = [dict(vars(owner)) for owner in owners]
        raise KeyError

    changed = sum(old[name] is not new[name] for old, new in zip(before, inside, strict=True)
                  for name in old)  # fmt: skip
    assert changed == 12
    assert [dict(vars(owner)) for owner in owners] == before
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
