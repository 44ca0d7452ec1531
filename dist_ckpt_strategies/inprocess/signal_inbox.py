"""Signals as events that a selector can wait for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While entered, signals to end are noted in ``received`` and have no other effect.

    In another thread than the main one nothing is noted: Python lets only that one hear signals.
    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._ours, self._theirs = -1, -1
        self.received: list[int] = []

    def __enter__(self) -> Self:
        """Hear signals from now on."""
        self._ours, self._theirs = os.pipe()
        for number in _SIGNALS if _is_main() else ():
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave signals to whoever heard them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._ours)
        os.close(self._theirs)

    def fileno(self) -> int:
        """Readable as long as something has been received."""
        return self._ours

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        os.write(self._theirs, b".")


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
