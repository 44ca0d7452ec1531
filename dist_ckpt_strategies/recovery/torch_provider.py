"""The state of a plain torch training: a module, an optimizer, a schedule."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.recovery.provider import ReplicatedState, StepBuffers

_ZERO_AT_FIRST = frozenset({"Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta", "SGD"})
"""Optimizers of torch whose state before the first step, where they make it then, is zeros."""


class TorchStateProvider(ReplicatedState):
    """A StateProvider where every rank holds everything, as with DistributedDataParallel.

    There is one part, of the parameters and buffers of the module and all tensors of the optimizer.
    Most optimizers make their state in the first step; here it is made at once, as zeros, which is
    what it is then, so that a fresh rank has a place for what it receives. Where what the optimizer
    begins with is not known here it is a StrategyError: make its state first.

    Gradients are reduced before the step commit, by DistributedDataParallel or otherwise; the
    update is ``apply_update()``, which asks no peer. It also steps the scheduler, which is anything
    with ``step``, ``state_dict`` and ``load_state_dict``.

    Buffers that forward changes, such as the running statistics of BatchNorm, are those of the
    step's beginning until the update: ``set_step`` copies them, before forward waits for those of
    others. Fill the tensors of ``parts()`` before it, or call ``load_objects`` after it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        step: int = 0,
    ) -> None:
        super().__init__(step)
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._names = {param: name for name, param in module.named_parameters()}
        self._buffers = StepBuffers(lambda: dict(module.named_buffers()))
        _make_state(optimizer)

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        super().set_step(step)
        self.keep_buffers()

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider."""
        named = {**dict(self._module.named_parameters()), **self._buffers.tensors()}
        found: dict[str, torch.Tensor] = {f"module/{name}": held for name, held in named.items()}
        for param, name in self._optimized():
            for key, value in self._optimizer.state[param].items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{name}/{key}"] = value
        return {"model": found}

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        found = {
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in self._optimizer.param_groups
            ],
            "state": {
                name: values
                for param, name in self._optimized()
                if (
                    values := {
                        k: v for k, v in self._optimizer.state[param].items() if not _is_tensor(v)
                    }
                )
            },
            "scheduler": self._scheduler and self._scheduler.state_dict(),
        }
        return copy.deepcopy(found)

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        self._buffers.restore()
        for group, values in zip(self._optimizer.param_groups, objects["groups"], strict=True):
            _take_over(group, values)
        for param, name in self._optimized():
            if name in objects["state"]:
                _take_over(self._optimizer.state[param], objects["state"][name])
        if self._scheduler:
            self._scheduler.load_state_dict(copy.deepcopy(objects["scheduler"]))

    def apply_update(self) -> None:
        """See StateProvider; the block calls it too."""
        self._optimizer.step()
        if self._scheduler:
            self._scheduler.step()
        self._buffers.accept()

    def keep_buffers(self) -> None:
        """Take the live buffers for those of the state, and copy them: the next forward is near."""
        self._buffers.keep()

    def _optimized(self) -> list[tuple[torch.Tensor, str]]:
        found = [param for group in self._optimizer.param_groups for param in group["params"]]
        return [
            (param, self._names.get(param, f"parameter {number}"))
            for number, param in enumerate(found)
        ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _take_over(mine: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set what is in ``values``; a tensor, such as a rate on a device, stays the one it is."""
    for key, value in values.items():
        if _is_tensor(mine.get(key)) and _is_tensor(value):
            mine[key].copy_(value)
        else:
            mine[key] = copy.deepcopy(value)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer have its state before the first step, which is zeros.

    Another one of its class makes it, in a step of a stand-in for each parameter.
    """
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for param in group["params"]:
            if not param.requires_grad or optimizer.state.get(param):
                continue
            if group.get("dampening") or kind.__name__ not in _ZERO_AT_FIRST:
                raise StrategyError(
                    f"{kind.__name__}: its state before the first step is not known; "
                    "make it first, and give the optimizer with it"
                )
            stand_in = nn.Parameter(torch.zeros_like(param))
            stand_in.grad = torch.zeros_like(param)
            other = kind([{"params": [stand_in], **options}])
            other.step()
            optimizer.state[param] = {
                key: value.zero_() if _is_tensor(value) else value
                for key, value in other.state[stand_in].items()
            }
