"""Files of a whole checkpoint that change: every load brings what was saved, or says which file.

Packs: one process loads all that four ranks have saved. Local checkpoints: two saves of four
ranks lie on the disks, each part in two copies. ``dist-ckpt verify`` has to see what a load need
not.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch._C._distributed_c10d import HashStore

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import check_shard
from tests.faults.files import SAME, Damage, Fault, Files, Kind, damaged_copies, local_copies
from tests.faults.oracle import NUM_RANKS, CopyKey, Ledger, Place
from tests.local.clique_worlds import described, run_threads
from tests.support.ranks import done_by
from tests.support.sharding import (
    in_runs,
    on_grid,
    same_bits,
    state_of,
    whole,
)

_TIMEOUT_S = 60.0
_ITERATIONS = (1, 2)
_VERIFY_EVERY = 10  # of the changes that a load has noticed
_CUTS = (
    on_grid("decoder/weight", (1024, 512), (4, 1)),  # several ranges to a block
    on_grid("embedding.weight", (1024, 64), (4, 1), dtype=torch.bfloat16),
    in_runs("optimizer.flat", [291, 568, 845, 1137]),
    on_grid("scale", (64, 8), (4, 1), dtype=torch.float8_e4m3fn),
    on_grid("mask", (32,), (4,), dtype=torch.bool),
)
_COMMON = {"iteration": 1, "args": {"lr": 1e-4}, "groups": [{"step": torch.tensor(1)}]}


@dataclass(frozen=True, slots=True)
class Change:
    """The damage of a number, to a checkpoint of a kind."""

    number: int
    checkpoint: str
    damage: Damage

    def __str__(self) -> str:
        """How to find it in a campaign of the same seed."""
        damage = self.damage
        return f"change {self.number}: {damage.fault} of {damage.what}, {list(damage.contents)}"


@contextmanager
def made(damage: Damage, root: Path) -> Iterator[None]:
    """Change the files for the block."""
    before = {root / name: (root / name).read_bytes() for name in damage.contents}
    try:
        for name, content in damage.contents.items():
            if content is None:
                (root / name).unlink()
            else:
                (root / name).write_bytes(content)
        yield
    finally:
        for path, old in before.items():
            path.write_bytes(old)


def _objects(rank: int) -> dict[str, Any]:
    """A small one, one with a tensor, and one of some KiB."""
    return {
        "rerun/state": {"rank": rank, "name": "text"},
        "rng": {"tensor": torch.arange(300) * (rank + 1), "seeds": (rank, 7)},
        "history": f"{rank} 7 " * 1500,
    }


def save_packs(rank: int, root: Path) -> None:
    objects = {
        name: ShardedObject(name, value, (NUM_RANKS,), (rank,))
        for name, value in _objects(rank).items()
    }
    state = state_of(rank, _CUTS) | objects | _COMMON
    dist_ckpt_strategies.save(state, root, ("safetensors", 1), timeout_s=_TIMEOUT_S)


def load_packs(root: Path) -> str:
    """Load everything, by one rank, into memory that holds something else; the error's text."""
    state: dict[str, Any] = {}
    for cut in _CUTS:
        other = (whole(cut).view(torch.uint8) ^ 1).view(cut.dtype)
        state[cut.key] = ShardedTensor.from_rank_offsets(cut.key, other)
    owned = [(name, owner) for owner in range(NUM_RANKS) for name in _objects(owner)]
    for name, owner in owned:
        state[f"{name} {owner}"] = ShardedObject(name, None, (NUM_RANKS,), (owner,))
    try:
        found: Any = dist_ckpt_strategies.load(state, root, timeout_s=_TIMEOUT_S)
    except CheckpointError as error:
        return str(error)
    expected = _COMMON | {f"{name} {owner}": _objects(owner)[name] for name, owner in owned}
    assert all(described(found[key]) == described(value) for key, value in expected.items())
    assert all(same_bits(found[cut.key], whole(cut)) for cut in _CUTS)
    return ""


def check_packs(root: Path, change: Change) -> Iterator[str]:
    """What is wrong with how a load and ``verify`` take a change."""
    damage = change.damage
    with made(damage, root):
        error = load_packs(root)
        if not error and not damage.harmless:
            yield "a load did not notice"
        if error and not any(str(root / name) in error for name in damage.contents):
            yield f"the error does not name the file: {error}"
        if error and change.number % _VERIFY_EVERY:
            return
        issues = verify(scan(root))
    is_lost = (damage.fault, damage.what) == (Fault.DELETE, Kind.MARKER)  # packs count without
    if damage.harmless == SAME or is_lost:
        yield from (f"dist-ckpt verify reports {issue}" for issue in issues)
    elif not {issue.path for issue in issues} & set(damage.contents):
        yield f"dist-ckpt verify does not report it: {issues}"


Judged = Iterator[tuple[Change, list[str]]]  # each change, and what was wrong


def run_packs(root: Path, chance: random.Random, count: int) -> Judged:
    done_by(NUM_RANKS, save_packs, root)
    files = Files.below(root)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for number in range(count):
            change = Change(number, "packs", files.damaged(chance))
            yield change, list(check_packs(root, change))
    finally:
        dist.destroy_process_group()


def check_local(root: Path, copies: Mapping[CopyKey, Path], damage: Damage) -> Iterator[str]:
    """What is wrong with what all ranks load, and with what ``verify`` says of each file."""
    ledger = Ledger(len(_ITERATIONS)).with_copies(copies)
    for key, path in copies.items():
        if str(path) in damage.contents:
            ledger = ledger.damaged_copy(key, Place(damage.what))
    with made(damage, root):
        paths = list(map(Path, damage.contents))
        noticed = [any(True for _ in check_shard(path.parent, path.name)) for path in paths]
        found = run_threads(NUM_RANKS, lambda node: node.load(node.manager(0)), root)
    if any(one is bool(damage.harmless) for one in noticed):
        yield f"dist-ckpt verify: {noticed}"
    expected = ledger.newest_whole()
    if expected is None and {kind for kind, _ in found} != {"NoReplicasAvailableError"}:
        yield f"no copy is left, and the ranks come to {found}"
    if expected is not None and found != [("ok", str(expected.iteration))] * NUM_RANKS:
        yield f"expected {expected} on every rank, found {found}"


def run_local(root: Path, chance: random.Random, count: int) -> Judged:
    for iteration in _ITERATIONS:
        run_threads(
            NUM_RANKS,
            lambda node: node.save(node.manager(keep=len(_ITERATIONS)), iteration),  # noqa: B023
            root,
        )
    copies = local_copies(root)
    for number in range(count):
        change = Change(number, "local", damaged_copies(copies, chance))
        yield change, list(check_local(root, copies, change.damage))


def run_changes(seed: int, count: int, root: Path) -> Judged:
    for run in (run_packs, run_local):
        place = root / run.__name__
        place.mkdir()
        yield from run(place, random.Random(f"{run.__name__} {seed}"), count)
