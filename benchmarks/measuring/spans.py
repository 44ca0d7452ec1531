"""Who did what when: spans recorded at the seams of the package, which itself records nothing.

Three lanes: what the main thread does or waits for, when storage threads are at work, and when
bytes travel between ranks. Recording takes two readings of the clock for each span.
"""

from __future__ import annotations

import pkgutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest.mock import patch

MAIN: Final = "main thread"
STORAGE: Final = "storage"
NETWORK: Final = "network"
LANES: Final = (MAIN, STORAGE, NETWORK)

READING, WRITING, FLUSHING = "reading", "writing", "flushing"
BROADCASTING, EXCHANGING, REST = "broadcasting", "exchanging", "the rest"

_PACKAGE = "dist_ckpt_strategies"
_MAIN_SEAMS: Final[Mapping[str, str]] = {
    f"{_PACKAGE}.comm.torch_communicator.TorchCommunicator.all_gather": "waiting for ranks",
    f"{_PACKAGE}.comm.torch_communicator.TorchCommunicator.exchange": "sending",
    f"{_PACKAGE}.storage.io_pool.Transfer.wait": "waiting for storage",
    f"{_PACKAGE}.two_stage.broadcast.copy_into": "copying",
    f"{_PACKAGE}.sharded.save.build_save_plan": "planning",
    f"{_PACKAGE}.two_stage.load.build_group_plan": "planning",
}
"""Functions of the main thread, and what it does in them; the outermost counts."""
_JOBS: Final = f"{_PACKAGE}.storage.io_pool._failure"
_BEGIN_EXCHANGE: Final = f"{_PACKAGE}.comm.torch_communicator.TorchCommunicator.begin_exchange"
_FLUSHES: Final = ("sync", "flush")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank did, from begin to end, in seconds of one clock of this machine."""

    lane: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Call:
    """What is recorded.

    Attributes:
        name: of the call.
        contender: who makes it.
        is_load: what was saved before is loaded, by replicas of each other; else it is saved.
    """

    name: str
    contender: str
    is_load: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """One call on one rank, in seconds of a clock that all ranks share.

    Attributes:
        begin: of the call.
        end: of the call.
        spans: what was done in between.
    """

    begin: float
    end: float
    spans: tuple[Span, ...]


class Recorder:
    """Collects spans while it records; one at a time in a process."""

    def __init__(self, *, is_load: bool) -> None:
        """Prepare to record a load by a group of ranks, or a save."""
        self._storage_kind = READING if is_load else WRITING
        self._network_kind = BROADCASTING if is_load else EXCHANGING
        self._spans: list[Span] = []
        self._depth = 0
        self._main = threading.get_ident()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in this block."""
        with ExitStack() as stack:
            for place, kind in _MAIN_SEAMS.items():
                stack.enter_context(_wrapped(place, partial(self._on_main, kind)))
            stack.enter_context(_wrapped(_JOBS, self._on_storage))
            stack.enter_context(_wrapped(_BEGIN_EXCHANGE, self._on_exchange))
            yield

    def spans(self) -> list[Span]:
        """Everything so far."""
        return list(self._spans)

    def _on_main(self, kind: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if threading.get_ident() != self._main or self._depth:
            return function(*args, **options)
        self._depth += 1
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            self._depth -= 1
            self._spans.append(Span(MAIN, kind, began, time.perf_counter()))

    def _on_storage(self, function: Callable[..., Any], job: Any) -> Any:
        name = getattr(job.run, "func", job.run)
        name = getattr(name, "__qualname__", "").lower()
        kind = FLUSHING if any(word in name for word in _FLUSHES) else self._storage_kind
        began = time.perf_counter()
        try:
            return function(job)
        finally:
            self._spans.append(Span(STORAGE, kind, began, time.perf_counter()))

    def _on_exchange(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return _TimedExchange(function(*args, **options), self)

    def travelled(self, began: float, waited_from: float) -> None:
        """Bytes have travelled until now, and the main thread has waited for them at the end."""
        now = time.perf_counter()
        self._spans.append(Span(NETWORK, self._network_kind, began, now))
        self._spans.append(Span(MAIN, "sending", waited_from, now))


class _TimedExchange:
    """An Exchange that tells a recorder when it has ended."""

    def __init__(self, exchange: Any, recorder: Recorder) -> None:
        self._exchange = exchange
        self._recorder = recorder
        self._began = time.perf_counter()

    def wait(self) -> None:
        """See Exchange."""
        waited_from = time.perf_counter()
        try:
            self._exchange.wait()
        finally:
            self._recorder.travelled(self._began, waited_from)


def joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans of one lane and kind that overlap, or lie closer than ``gap``, as one."""
    by_place: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        own = by_place[span.lane, span.kind]
        if own and span.begin <= own[-1].end + gap:
            last = own.pop()
            span = Span(span.lane, span.kind, last.begin, max(last.end, span.end))  # noqa: PLW2901
        own.append(span)
    found = [span for own in by_place.values() for span in own]
    return sorted(found, key=lambda span: (LANES.index(span.lane), span.begin, span.kind))


def with_rest(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """The spans, and what the main thread did between them."""
    found, at = list(spans), begin
    for span in sorted((s for s in spans if s.lane == MAIN), key=lambda span: span.begin):
        if span.begin > at:
            found.append(Span(MAIN, REST, at, span.begin))
        at = max(at, span.end)
    if at < end:
        found.append(Span(MAIN, REST, at, end))
    return found


def totals_of(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each kind; of storage threads and travelling, those in which any was at work."""
    found: dict[str, float] = {}
    for span in joined(spans, 0.0):
        found[span.kind] = found.get(span.kind, 0.0) + span.end - span.begin
    return found


def _wrapped(place: str, around: Callable[..., Any]) -> Any:
    """A function of a module or class, called through another for a while.

    Args:
        place: its dotted name.
        around: is called with the function and its arguments.
    """
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    return patch.object(owner, name, called)
