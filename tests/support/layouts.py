"""Arrays in one parallel layout and in another, for what has to come back in any."""

import random

import torch

from tests.support.sharding import ALL_DTYPES, Cut, Part, at_random, in_runs, on_grid, replicated


def scattered() -> list[Cut]:
    """Scalars, stacked layers, arrays of many dims, replicas."""
    return [
        on_grid("scalar", (), (), num_replicas=4),
        on_grid("scalar.bfloat16", (), (), dtype=torch.bfloat16, num_replicas=4),
        on_grid("one.element", (1, 1, 1), (1, 1, 1), num_replicas=2),
        on_grid("several.on.one.rank", (8, 6), (4, 3), size=2),
        on_grid("stacked.layers", (4, 3, 5), (4, 1, 1), num_prepended=1),
        on_grid("stacked.twice", (4, 2, 6), (4, 2, 3), num_prepended=2),
        on_grid("stacked.scalars", (4,), (4,), num_prepended=1),
        on_grid("five.dims", (2, 2, 3, 2, 4), (2, 1, 1, 2, 4)),
        replicated(on_grid("held.by.all", (8, 4), (2, 2))),
    ]


def scattered_otherwise() -> list[Cut]:
    """The same arrays in other layouts."""
    return recut(scattered())


def irregular() -> list[Cut]:
    """Flat buffers with pads between, as ``dp_reshardable`` cuts them; regions in 2-D and 3-D."""
    pads = [100, 128, 411, 448, 512, 513, 1000, 1024]
    return [
        in_runs("buffer", pads),
        in_runs("buffer.of.primes", [7, 11, 13, 17, 19, 23, 29, 31, 37]),
        in_runs("buffer.on.three.ranks", [5, 6, 20], size=3),
        Cut("all.on.rank.2", (50,), torch.float32, (Part(2, (0,), (13,)), Part(2, (13,), (37,)))),
        Cut(
            "interleaved",
            (40,),
            torch.bfloat16,
            (
                *(Part(n % 4, (a,), (n + 1,)) for n, a in enumerate((0, 1, 3, 6, 10, 15, 21, 28))),
                Part(0, (36,), (4,)),
            ),
        ),
        at_random("regions", (23, 17), 9),
        at_random("regions.of.bytes", (40, 30), 13, dtype=torch.uint8, seed=1),
        at_random("regions.in.3d", (9, 8, 7), 12, dtype=torch.float64, seed=2),
        at_random("regions.in.4d", (3, 4, 5, 6), 10, dtype=torch.complex64, seed=3),
        replicated(at_random("regions.held.by.all", (16, 16), 6, seed=4)),
    ]


def irregular_otherwise() -> list[Cut]:
    """The same arrays, cut elsewhere and as irregularly; the first for two ranks only."""
    others = enumerate(irregular()[1:])
    return [
        in_runs("buffer", [300, 700, 1024], size=2),
        *(at_random(c.key, c.shape, 3 + n, dtype=c.dtype, seed=50 + n) for n, c in others),
    ]


def empties() -> list[Cut]:
    """Arrays without an element, and ranks that have none of one."""
    return [
        Cut("nothing", (0,), torch.float32, tuple(Part(n, (0,), (0,)) for n in range(4))),
        Cut("no.rows", (0, 4), torch.int64, tuple(Part(n, (0, n), (0, 1)) for n in range(4))),
        Cut(
            "one.rank.has.none",
            (6, 4),
            torch.float32,
            (*(Part(n, (2 * n, 0), (2, 4)) for n in range(3)), Part(3, (6, 0), (0, 4))),
        ),
    ]


def random_layouts(seed: int) -> tuple[list[Cut], list[Cut]]:
    """Arrays of random shape, in one parallel layout and in another."""
    chance = random.Random(seed)
    saved = []
    for number in range(6):
        shape = tuple(chance.choice((1, 2, 4, 8, 12)) for _ in range(chance.randint(1, 3)))
        saved.append(random_cut(f"a{number}", shape, chance.choice(ALL_DTYPES), chance))
    return saved, recut(saved, seed)


def recut(cuts: list[Cut], seed: int = 0) -> list[Cut]:
    """The same arrays, each cut otherwise."""
    return [random_cut(c.key, c.shape, c.dtype, random.Random(f"{seed} {c.key}")) for c in cuts]


def random_cut(key: str, shape: tuple[int, ...], dtype: torch.dtype, chance: random.Random) -> Cut:
    """An array on a grid, or in regions of any size."""
    if chance.random() < 0.3:
        return at_random(key, shape, chance.randint(1, 10), dtype=dtype, seed=chance.randrange(99))
    grid = tuple(chance.choice([g for g in (1, 2, 3, 4) if n % g == 0]) for n in shape)
    can_lack = grid[:1] == shape[:1] and chance.random() < 0.5
    return on_grid(
        key,
        shape,
        grid,
        dtype=dtype,
        num_replicas=chance.choice((1, 2, 4)),
        num_prepended=int(bool(shape) and can_lack),
    )
