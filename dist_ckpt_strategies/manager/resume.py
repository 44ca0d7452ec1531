"""Whether the state with which a training goes on is the one that was loaded."""

import copy
import logging
from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Message, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.packs import default_local_allowed
from dist_ckpt_strategies.manager.candidates import Loaded, Tier
from dist_ckpt_strategies.megatron.shards import shard_data, shard_spec
from dist_ckpt_strategies.megatron.types import ShardedTensor, StrictHandling
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.strategies.compare import (
    State,
    compare,
    is_ignored,
    kept_common,
    name_of,
    object_differences,
    split_state,
)
from dist_ckpt_strategies.strategies.compare_report import (
    CompareReport,
    Found,
    missing_from,
    report_of,
    unknown_of,
)
from dist_ckpt_strategies.tools.diff import ArrayDifference, element_difference, is_equal

logger = logging.getLogger(__name__)

_NAME = "value"


def check_resume(
    loaded: Loaded,
    state: State,
    local: LocalCheckpointManager | None,
    ignore: Sequence[str],
    allow: Allowed,
    timeout_s: float,
) -> CompareReport | None:
    """Compare a state with what was loaded; None if that came from memory. Collective.

    The first rank logs the report: as a warning if they differ.
    """
    comm = open_communicator(None, timeout_s=timeout_s, purpose="check of the resume")
    if loaded.tier is Tier.MEMORY:
        logger.log(comm.report_level, "resume from memory: nothing to compare the state with")
        return None
    if loaded.tier is Tier.LOCAL and local is not None:
        report = _compared_with_local(local, loaded.iteration, state, ignore, allow, timeout_s)
    else:
        report = compare(state, loaded.name, ignore=ignore, allow=allow)
    if comm.rank == 0:
        logger.log(logging.INFO if report.is_equal else logging.WARNING, "%s", report)
    return report


def _compared_with_local(
    local: LocalCheckpointManager,
    step: int,
    state: State,
    ignore: Sequence[str],
    allow: Allowed,
    timeout_s: float,
) -> CompareReport:
    """Like ``compare``, with a local checkpoint, which is read a second time. Collective."""
    comm = open_communicator(None, timeout_s=timeout_s, purpose="check of the resume")
    stored, _ = local.load(at_least=step, at_most=step, on_host=True)
    values, common = run_collectively(comm, lambda: split_state(state, ignore))
    wanted = {f"{_NAME} {number}": _bare(value) for number, value in enumerate(values)}
    how = StrictHandling.RETURN_ALL
    loaded, absent, _ = stored.to_state_dict(wanted, strict=how, return_mismatch_keys=True)
    named = dict(zip(wanted, values, strict=True))
    pairs = [(named[name], loaded.pop(name)) for name in wanted if name in loaded]
    unknown = [value for name, value in named.items() if all(value is not v for v, _ in pairs)]

    def describe() -> Message:
        allowed = default_local_allowed(allow)
        lacking = unknown_of(unknown)
        arrays = chain.from_iterable(starmap(_unlike_tensor, pairs))
        objects = [*lacking.objects]
        for value, expected in pairs:
            if not isinstance(value, ShardedTensor):
                objects += object_differences(name_of(value), expected, value.data, allowed)
        objects += object_differences(COMMON_NAME, kept_common(loaded, ignore), common, allowed)
        nbytes = sum(e.numel() * e.element_size() for _, e in pairs if isinstance(e, torch.Tensor))
        return Found([*arrays, *lacking.arrays], objects, (), nbytes, nbytes).to_message()

    answers = run_and_gather(comm, describe)
    is_kept = [name for name in sorted(absent) if not is_ignored(name, ignore)]
    names = {name_of(value): isinstance(value, ShardedTensor) for value, _ in pairs}
    nums = sum(names.values()), len(names) - sum(names.values())
    where = f"the local checkpoint of iteration {step}"
    return report_of(where, comm.global_ranks, answers, missing_from(is_kept, is_kept), *nums)


def _bare(value: Any) -> Any:
    """A sharded value without its data."""
    if isinstance(value, ShardedTensor):
        return value.without_data()
    value = copy.copy(value)
    value.data = None
    return value


def _unlike_tensor(value: Any, expected: Any) -> Iterator[ArrayDifference]:
    if not isinstance(value, ShardedTensor):
        return
    region = shard_spec(value).id.region
    hosts = to_host([shard_data(value), expected])
    current, stored = (host.reshape(region.shape) for host in hosts)
    if not is_equal(stored, current):
        yield element_difference(value.key, region, stored, current)
