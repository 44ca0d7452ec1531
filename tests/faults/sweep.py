"""Let one rank of four fail, again and again, and see whether the others learn of it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dist_ckpt_strategies.errors import CheckpointError
from tests.faults.injection import (
    TARGETS,
    Calls,
    failing_call,
)
from tests.faults.scenarios import LIMIT_S, SCENARIOS, Action
from tests.support.ranks import allow_processes, run_processes

CULPRIT = 2
MAX_S = LIMIT_S / 2
"""Who learns of a failure does so sooner."""

_GOOD_EVERY = 8
"""After how many faults an attempt without one has to come to a good end."""

OK = "ok"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of one attempt."""

    text: str
    is_ours: bool
    global_rank: int | None
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.text == OK


@dataclass(frozen=True, slots=True)
class Fault:
    """The n-th call of a function fails on the culprit; with ``for_ever`` all later ones too."""

    target: str
    number: int
    for_ever: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.target} call {self.number}{' and all later' if self.for_ever else ''}"

    def put(self) -> AbstractContextManager[Any]:
        """Within the block the call fails."""
        return failing_call(TARGETS[self.target], self.number, for_ever=self.for_ever)


def seen_of(action: Callable[[], Any]) -> Seen:
    """What comes of it."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it is looked at
        seconds = time.monotonic() - began
        rank = getattr(error, "global_rank", None)
        text = f"{type(error).__name__}: {error}"
        return Seen(text, isinstance(error, CheckpointError), rank, seconds)
    return Seen(OK, is_ours=True, global_rank=None, seconds=time.monotonic() - began)


def complaints(name: str, attempts: Sequence[Seen], again: Sequence[Seen]) -> list[str]:
    """What is wrong with the ranks' views of one attempt, and of the good one that followed."""
    found = []
    bad = [seen for seen in attempts if not seen.is_good]
    if bad and len(bad) < len(attempts):
        found.append("only some ranks raise")
    if any(seen.seconds > MAX_S for seen in attempts):
        found.append("some rank learns of it late")
    if any(not seen.is_ours for seen in bad):
        found.append("some error is not ours")
    if any(seen.global_rank != CULPRIT for seen in bad):
        found.append("some error names another rank, or none")
    if not all(seen.is_good for seen in again):
        found.append("the next attempt fails")
    if not found:
        return []
    lines = [f"{name}: {', '.join(found)}"]
    lines += [
        f"    rank {rank}: {seen.seconds:.1f} s {seen.text[:300]}"
        for rank, seen in enumerate(attempts)
    ]
    lines += [
        f"    again, rank {rank}: {seen.text[:300]}"
        for rank, seen in enumerate(again)
        if not seen.is_good
    ]
    return lines


class Ranks:
    """One rank's side of many attempts."""

    def __init__(self, rank: int, scenario: str, root: str) -> None:
        os.environ["DIST_CKPT_TIMEOUT_S"] = str(LIMIT_S)
        allow_processes()
        self.rank = rank
        self.root = Path(root)
        self._meeting: Any = dist.new_group(timeout=timedelta(seconds=4 * LIMIT_S))
        self._number = 0
        self.action: Action = SCENARIOS[scenario].prepare(rank, self.root / "shared")
        self.attempt()
        self.attempt()

    def attempt(self, fault: AbstractContextManager[Any] | None = None) -> Seen:
        """One attempt, in a new directory."""
        self._number += 1
        root = self.root / f"attempt{self._number}"
        root.mkdir(parents=True, exist_ok=True)
        self.meet()
        with fault or nullcontext():
            seen = seen_of(lambda: self.action(root))
        self.meet()
        if self.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
        return seen

    def meet(self) -> None:
        dist.barrier(group=self._meeting)

    def gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._meeting)
        return found


def try_faults(
    rank: int, scenario: str, root: str, faults: Sequence[Fault], seconds: float
) -> list[str]:
    """What is wrong. Body of a rank; ends with the first fault that the group does not survive."""
    ranks = Ranks(rank, scenario, root)
    return _tried(ranks, faults, time.monotonic() + seconds)


def _tried(ranks: Ranks, faults: Sequence[Fault], deadline: float) -> list[str]:
    found: list[str] = []
    for number, fault in enumerate(faults):
        is_late = ranks.gathered(time.monotonic() > deadline)
        if any(is_late):
            return [*found, f"time is up after {number} of {len(faults)} faults"]
        if ranks.rank == CULPRIT:
            (ranks.root / "fault").write_text(f"{number} {fault.name}")
            if number % 20 == 0:
                sys.stderr.write(f"COMPLAINT-FREE up to {number} of {len(faults)}\n")
        try:
            attempts = ranks.gathered(ranks.attempt(fault.put() if ranks.rank == CULPRIT else None))
            is_due = number % _GOOD_EVERY == 0 or number == len(faults) - 1
            again = ranks.gathered(ranks.attempt()) if is_due else []
        except RuntimeError as error:
            return [*found, f"{fault.name}: the ranks are lost: {error}"]
        wrong = complaints(fault.name, attempts, again)
        found += wrong
        if wrong and ranks.rank == CULPRIT:
            sys.stderr.writelines(f"COMPLAINT {line}\n" for line in wrong)
        if any("the next attempt fails" in line for line in wrong):
            return [*found, f"left after {number + 1} of {len(faults)} faults"]
    return found


def try_selection(
    rank: int, root: str, selection: Sequence[tuple[str, Sequence[Fault]]]
) -> dict[str, list[str]]:
    """What is wrong, by scenario, one after the other. Body of a rank."""
    found = {}
    for number, (scenario, faults) in enumerate(selection):
        ranks = Ranks(rank, scenario, f"{root}/{number}")
        found[scenario] = _tried(ranks, faults, time.monotonic() + 3600)
    return found


def count_calls(rank: int, scenario: str, root: str) -> dict[str, int]:
    """How often each of the functions is called. Body of a rank."""
    ranks = Ranks(rank, scenario, root)
    counted = {}
    for name, target in TARGETS.items():
        calls = Calls(0)
        if rank == CULPRIT:
            with failing_call(target, 1 << 60) as calls:
                ranks.attempt()
        else:
            ranks.attempt()
        counted[name] = calls.seen
    return counted


def sweep(scenario: str, root: Path, faults: Sequence[Fault], seconds: float = 300.0) -> list[str]:
    """What is wrong with a scenario, whatever the fault; each complaint once."""
    found = run_processes(
        4, try_faults, scenario, str(root), faults, seconds, timeout_s=seconds + 60
    )
    for result in found:
        if isinstance(result, Exception):
            number, name = (root / "fault").read_text().split(" ", 1)
            notes = getattr(result, "__notes__", [])
            return [
                f"{name}: {type(result).__name__}: {result}",
                *notes,
                f"left after {int(number) + 1} of {len(faults)} faults",
            ]
    lines: list[str] = found[0]
    return lines
