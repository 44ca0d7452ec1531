"""What a save and a load have in common: ranks, options and strategy of a call."""

from contextlib import suppress
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup, is_distributed
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment, rank_from_environment
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.formats.locations import PACKS
from dist_ckpt_strategies.formats.objects import Allowed, allowing
from dist_ckpt_strategies.megatron.types import StrategyAction
from dist_ckpt_strategies.strategies.registry import Configured, StrategyChoice, resolve


def inner_strategy(strategy: Any) -> Any:
    """The strategy inside of a wrapper; one that is in none itself."""
    has_base = hasattr(strategy, "base_strategy")
    return inner_strategy(strategy.base_strategy) if has_base else strategy


def _require_process_group() -> None:
    size = 1
    with suppress(StrategyError):  # it is not set as torchrun sets it
        size = 1 if is_distributed() else rank_from_environment()[1]
    if size > 1:
        raise StrategyError(
            f"torch.distributed is not initialised, but WORLD_SIZE says that there are {size} "
            "ranks: each would save alone; call torch.distributed.init_process_group first"
        )


def opened_call(
    action: StrategyAction,
    choice: StrategyChoice,
    detail: str,
    timeout_s: float | None,
    allow: Allowed,
    process_group: ProcessGroup | None = None,
) -> tuple[Communicator, Options, Any, Any, Exception | None]:
    """The ranks and options of a call, its strategy, and that inside of wrappers. Rank-local.

    Ranks and options are those of the strategy, where it is one of this package. An error is
    returned too, for the first collective to raise.
    """
    options, group, found, base, invalid = None, None, None, None, None
    purpose = action.value.partition("_")[0]
    try:
        if purpose == "save":
            _require_process_group()
        options = options_from_environment()  # reported if invalid, whatever the strategy's are
        with allowing(allow):
            found = resolve(action, choice, PACKS.sharded_format, timeout_s, process_group)
        base = inner_strategy(found) if hasattr(found, "base_strategy") else found
        if isinstance(base, Configured):
            options, group = base.options, base.group
        if timeout_s is not None:
            options = options.with_changes(timeout_s=timeout_s)
        group = process_group or group
    except Exception as error:  # noqa: BLE001 - raised in the first collective
        invalid = error
    options = options or Options()
    comm = open_communicator(group, timeout_s=options.timeout_s, purpose=purpose, detail=detail)
    return comm, options, found, base, invalid
