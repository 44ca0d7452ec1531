"""Threads that are there before work is given to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def started_pool(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads all run already: where the system has none left, that shows here.

    A pool on its own starts them one by one as work comes, between two meetings perhaps, where
    nothing may raise on one rank alone. Leaving waits for the work.

    Args:
        num_threads: how many.
        name: what they are called.

    Raises:
        RuntimeError: the system starts no more threads.
    """
    with ThreadPoolExecutor(num_threads, name) as pool:
        all_there = threading.Event()
        try:
            for _ in range(num_threads):
                pool.submit(all_there.wait)  # an idle thread would be taken instead of a new one
        finally:
            all_there.set()
        yield pool
