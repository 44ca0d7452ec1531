"""Which process groups this process sends over behind training."""

from __future__ import annotations

import weakref
from typing import Protocol
from weakref import WeakKeyDictionary

from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_itself


class GroupUser(Protocol):
    """Work on a thread of its own that sends over a process group."""

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout_s: float, what: str) -> None:
        """Return when it has ended, well or not; at once where that thread itself asks.

        Args:
            timeout_s: longest wait, in seconds.
            what: it is, for the message.

        Raises:
            SaveTimeoutError: it goes on for longer.
        """
        ...


class GroupUsers:
    """The work behind training that has last been given each process group.

    Messages of two that use a group at once would be taken for each other: gloo ends the process
    then. A work is not kept alive for this: its own thread does that, as long as it runs.
    """

    def __init__(self) -> None:
        self._works: WeakKeyDictionary[ProcessGroup, weakref.ref[GroupUser]] = WeakKeyDictionary()

    def note(self, group: ProcessGroup | None, work: GroupUser) -> None:
        """Have ``wait`` wait for it. Rank-local."""
        itself = group_itself(group)
        if itself is not None:
            self._works[itself] = weakref.ref(work)

    def wait(self, group: ProcessGroup | None, timeout_s: float) -> None:
        """Return when nothing behind training sends over a group any more. Rank-local.

        Raises:
            SaveTimeoutError: it goes on for longer.
        """
        work = self._user(group)
        if work is not None:
            work.wait(timeout_s, "a save behind training over the same process group")

    def is_used(self, group: ProcessGroup | None) -> bool:
        """Whether ``wait`` would wait. Rank-local."""
        work = self._user(group)
        return work is not None and not work.is_done()

    def _user(self, group: ProcessGroup | None) -> GroupUser | None:
        itself = group_itself(group)
        held = self._works.get(itself) if itself is not None else None
        return held() if held is not None else None


GROUP_USERS = GroupUsers()
"""Those of this process."""
