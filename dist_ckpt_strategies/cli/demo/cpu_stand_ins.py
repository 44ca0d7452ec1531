"""CPU forms of the CUDA calls that Megatron-Core's training makes.

Megatron-Core's checkpointing runs on a CPU; its training loop does not. It asks CUDA for the
current device and the generator's state, writes ``device="cuda"`` in a dozen places, recognises
parameters by the *name* of their CUDA type, and takes its Adam from Apex or Transformer Engine.
Inside ``with cpu_stand_ins():`` each of these has a CPU form. Only the demonstration, the tests
that train, and benchmarks need this.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dist_ckpt_strategies.errors import needs_megatron_core

with needs_megatron_core():
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as megatron_random

_CPU: Final = torch.device("cpu")
_PRODUCTS: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


class FusedLayoutAdam(torch.optim.Optimizer):
    """AdamW that keeps its state where Apex's FusedAdam keeps it.

    torch's own AdamW has a ``step`` tensor beside every parameter; the fused ones have one
    ``step`` per parameter group. Megatron's distributed optimizer can load only the latter:
    ``fully_reshardable`` restores ``exp_avg`` and ``exp_avg_sq`` and nothing else.

    Source: Loshchilov and Hutter 2019; the layout is that of ``apex.optimizers.FusedAdam``.
    """

    def __init__(self, params: Iterable[Any], *, adam_w_mode: bool = True, **options: Any) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode: only decoupled weight decay is here, found False")
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, defaults | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient by one AdamW step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        first_beta, second_beta = group["betas"]
        first_bias = 1 - first_beta ** group["step"]
        second_bias = 1 - second_beta ** group["step"]
        state["exp_avg"].lerp_(grad, 1 - first_beta)
        state["exp_avg_sq"].mul_(second_beta).addcmul_(grad, grad, value=1 - second_beta)
        divisor = state["exp_avg_sq"].sqrt().div_(math.sqrt(second_bias)).add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / first_bias)


class CudaMeansCpu(TorchFunctionMode):
    """Every torch call that names CUDA is made on the CPU instead.

    - ``torch.zeros(..., device="cuda")``, in the gradient norm and the pipeline schedules;
    - ``tensor.cuda()``, in the optimizer's gather: the tensor itself;
    - ``param.type()``, by which the distributed optimizer sorts parameters: the CUDA name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, with CUDA replaced; see the class."""
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = _CPU
        return func(*args, **named)


class _ProductsInFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of bfloat16 matrices are taken in float32 and rounded, in backward passes too.

    Processors without instructions for bfloat16 take 10 to 60 times as long otherwise (measured
    with AVX2 alone, 512 x 512 by 512 x 256).
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, on float32 matrices where it multiplies bfloat16 ones."""
        named = kwargs or {}
        if func in _PRODUCTS and args[0].dtype is torch.bfloat16:
            return func(*(matrix.float() for matrix in args), **named).bfloat16()
        return func(*args, **named)


@contextlib.contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """Within the block Megatron-Core trains on the CPU; on leaving, all is as it was.

    Holds for the thread that enters it (torch function modes are per thread), which is also the
    one that runs the backward pass of CPU tensors.
    """

    def get_rng_state(*_device: object, **_options: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, *_device: object, **_options: object) -> None:
        torch.set_rng_state(new_state)

    replaced = (
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.default_generator.manual_seed),
        (torch.cuda, "get_rng_state", get_rng_state),
        (torch.cuda, "set_rng_state", set_rng_state),
        # Its optimizer with several instances has streams.
        (torch.cuda, "Stream", lambda **_: torch.cpu.Stream()),
        (torch.cuda, "current_stream", torch.cpu.current_stream),
        (torch.cuda, "default_stream", torch.cpu.current_stream),
        (torch.cuda, "stream", torch.cpu.stream),
        (megatron_random, "_get_cuda_rng_state", get_rng_state),
        (megatron_random, "_set_cuda_rng_state", set_rng_state),
        (megatron_optimizer, "Adam", FusedLayoutAdam),
        (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedLayoutAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(CudaMeansCpu())
        stack.enter_context(_ProductsInFloat32())  # type: ignore[no-untyped-call]
        yield
