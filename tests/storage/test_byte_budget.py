"""Bytes under way are bounded, and a demand above the bound is let through alone."""

from __future__ import annotations

import random
import threading

from dist_ckpt_strategies.storage.io_pool import ByteBudget


def test_what_several_threads_hold_stays_within_the_bound() -> None:
    budget = ByteBudget(100)
    held: list[int] = []
    seen: list[list[int]] = []
    lock = threading.Lock()
    chance = random.Random(1)
    demands = [chance.choice([1, 30, 60, 100, 250]) for _ in range(200)]

    def work(share: list[int]) -> None:
        for nbytes in share:
            with budget.held(nbytes):
                with lock:
                    held.append(nbytes)
                    seen.append(list(held))
                with lock:
                    held.remove(nbytes)

    threads = [threading.Thread(target=work, args=(demands[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(seen) == len(demands)
    assert all(sum(together) <= 100 or len(together) == 1 for together in seen)
    assert held == []
