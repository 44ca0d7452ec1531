"""Files of a whole checkpoint that change: every load brings what was saved, or says which file.

Format 2: one process loads all that four ranks have saved, after a byte of some file is changed, or
a file is cut, removed, made longer, or swapped with another. Local checkpoints: two saves of four
ranks lie on the disks, each shard in two copies; a byte is changed or a file cut in one copy, in
both, or in both of both saves. ``dist-ckpt verify`` has to see what a load need not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from torch._C._distributed_c10d import HashStore

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import check_shard
from tests.faults.files import HARMLESS, Fault, Files, Kind, file_map, kind_of_file, local_copies
from tests.faults.oracle import CopyKey, Ledger, Place
from tests.faults.schedule import NUM_RANKS
from tests.local.clique_worlds import described, run_threads
from tests.support.ranks import run_processes
from tests.support.sharding import (
    Cut,
    Part,
    in_runs,
    on_grid,
    part_of,
    same_bits,
    sharded,
    state_of,
)

_TIMEOUT_S = 60.0
_ITERATIONS = (1, 2)
_FLIP_SHARE = 5 / 6
_VERIFY_EVERY = 10
"""Of the changes that a load has noticed."""

_SAME = "nothing that counts has changed"
_CUTS = (
    on_grid("decoder/weight", (1024, 512), (4, 1)),  # several inner chunks to a file
    on_grid("embedding.weight", (1024, 64), (4, 1), dtype=torch.bfloat16),
    in_runs("optimizer.flat", [291, 568, 845, 1137]),
    on_grid("scale", (64, 8), (4, 1), dtype=torch.float8_e4m3fn),
    on_grid("mask", (32,), (4,), dtype=torch.bool),
)
_COMMON = {"iteration": 1, "args": {"lr": 1e-4}, "groups": [{"step": torch.tensor(1)}]}


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to files together.

    Attributes:
        number: of the change.
        fault: what is done.
        what: the kind of file or bytes.
        contents: what the files hold then; None: the file is gone.
        expected: of local checkpoints, the iteration that has to be loaded; None: none can be.
        harmless: of format 2, why a load need not notice; empty: it has to.
    """

    number: int
    fault: Fault
    what: str
    contents: Mapping[Path, bytes | None]
    expected: int | None = None
    harmless: str = ""

    def __str__(self) -> str:
        """How to find it in a campaign of the same seed."""
        return f"change {self.number}: {self.fault} of {self.what}, {list(map(str, self.contents))}"


Judged = Iterator[tuple[Change, list[str]]]
"""Each change, and what was wrong."""


@contextmanager
def made(contents: Mapping[Path, bytes | None]) -> Iterator[None]:
    """Change the files for the block."""
    before = {path: path.read_bytes() for path in contents}
    try:
        for path, content in contents.items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def _flipped(content: bytes, byte_offset: int, chance: random.Random) -> bytes:
    change = bytes([content[byte_offset] ^ chance.randrange(1, 256)])
    return content[:byte_offset] + change + content[byte_offset + 1 :]


def _objects(rank: int) -> dict[str, Any]:
    """One that the manifest holds, and two that a file of objects does."""
    return {
        "rerun/state": {"rank": rank, "name": "text"},
        "rng": {"tensor": torch.arange(300) * (rank + 1), "seeds": (rank, 7)},
        "history": f"{rank} 7 " * 1500,
    }


def save_format2(rank: int, root: Path) -> None:
    """Body of a rank."""
    objects = {
        name: ShardedObject(name, value, (NUM_RANKS,), (rank,))
        for name, value in _objects(rank).items()
    }
    state = state_of(rank, _CUTS) | objects | _COMMON
    dist_ckpt_strategies.save(state, root, ("zarr", 2), timeout_s=_TIMEOUT_S)


def load_format2(root: Path) -> str:
    """Load everything, by one rank, into memory that holds something else; the error's text."""
    wholes = {cut.key: _whole(cut) for cut in _CUTS}
    state: dict[str, Any] = {
        key: sharded(cut, part, _poisoned(cut)) for key, (cut, part) in wholes.items()
    }
    owned = [(name, owner) for owner in range(NUM_RANKS) for name in _objects(owner)]
    for name, owner in owned:
        state[f"{name} {owner}"] = ShardedObject(name, None, (NUM_RANKS,), (owner,))
    try:
        found: Any = dist_ckpt_strategies.load(state, root, timeout_s=_TIMEOUT_S)
    except CheckpointError as error:
        return str(error)
    expected = _COMMON | {f"{name} {owner}": _objects(owner)[name] for name, owner in owned}
    assert all(described(found[key]) == described(value) for key, value in expected.items())
    assert all(same_bits(found[key], part_of(cut, part)) for key, (cut, part) in wholes.items())
    return ""


def _whole(cut: Cut) -> tuple[Cut, Part]:
    ones = tuple(1 for _ in cut.shape) if cut.grid else None
    return replace(cut, grid=ones), Part(0, (0,) * len(cut.shape), cut.shape)


def _poisoned(cut: Cut) -> torch.Tensor:
    tensor = torch.empty(cut.shape, dtype=cut.dtype)
    tensor.view(torch.uint8).fill_(0 if cut.dtype is torch.bool else 0xA5)
    return tensor


def draw_format2(files: Files, chance: random.Random, number: int) -> Change:
    """A byte mostly; else another fault."""
    if chance.random() < _FLIP_SHARE:
        name, at = files.any_byte(chance)
        flipped = {name: _flipped(files.contents[name], at, chance)}
        return format2_change(files, number, Fault.FLIP, flipped, files.kind_at(name, at))
    fault = chance.choice([one for one in Fault if one is not Fault.FLIP])
    kind = chance.choice([one for one in Kind if one is not Kind.CHUNK_INDEX])
    name = chance.choice(files.of_kind(kind))
    content = files.contents[name]
    contents: dict[str, bytes | None] = {name: None}
    if fault is Fault.TRUNCATE:
        contents = {name: content[: chance.randrange(len(content))]}
    elif fault is Fault.EXTEND:
        more = chance.choice([b"\0", b" ", b"}", chance.randbytes(chance.randrange(1, 5000))])
        contents = {name: content + more}
    elif fault is Fault.SWAP:
        alike = [one for one in files.of_kind(kind) if one != name]
        others = chance.choice([alike, []]) or [one for one in files.contents if one != name]
        other = chance.choice(others)
        contents = {name: files.contents[other], other: content}
    return format2_change(files, number, fault, contents, kind)


def format2_change(
    files: Files, number: int, fault: Fault, contents: Mapping[str, bytes | None], kind: Kind
) -> Change:
    """The change, and whether a load need not notice it; ``kind`` is that of the first file."""
    kinds = {kind} if len(contents) == 1 else set(map(kind_of_file, contents))
    reasons = {HARMLESS.get((fault, one), "") for one in kinds}
    harmless = "; ".join(sorted(reasons)) if all(reasons) else ""
    if all(_is_same(files.contents[name], content, name) for name, content in contents.items()):
        harmless = _SAME
    by_path = {files.root / name: content for name, content in contents.items()}
    return Change(number, fault, kind, by_path, harmless=harmless)


def _is_same(before: bytes, after: bytes | None, name: str) -> bool:
    """Whether nothing that counts has changed: equal bytes, or spaces of the marker."""
    if before == after or after is None or kind_of_file(name) is not Kind.MARKER:
        return before == after
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


def check_format2(root: Path, load: Callable[[Path], str], change: Change) -> Iterator[str]:
    """What is wrong with how a load and ``verify`` take a change."""
    with made(change.contents):
        error = load(root)
        if not error and not change.harmless:
            yield "a load did not notice"
        if error and not any(str(path) in error for path in change.contents):
            yield f"the error does not name the file: {error}"
        if error and change.number % _VERIFY_EVERY:
            return
        issues = verify(scan(root))
    named = {root / issue.path for issue in issues if issue.path}
    names = {path.name for path in change.contents}
    if change.harmless == _SAME or names == {"save.json"}:
        yield from (f"dist-ckpt verify reports {issue}" for issue in issues)
    elif not named & set(change.contents):
        yield f"dist-ckpt verify does not report it: {issues}"


def run_format2(
    root: Path, chance: random.Random, count: int
) -> Iterator[tuple[Change, list[str]]]:
    """Each change and what was wrong."""
    run_processes(NUM_RANKS, save_format2, root)
    files = Files.below(root)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for number in range(count):
            change = draw_format2(files, chance, number)
            yield change, list(check_format2(root, load_format2, change))
    finally:
        dist.destroy_process_group()


Load = Callable[[], list[tuple[str, str]]]
"""What each rank comes to: ``ok`` and the iteration, or the kind of an error and its text."""


def draw_local(copies: Mapping[CopyKey, Path], chance: random.Random, number: int) -> Change:
    """A byte mostly, of all of a file, or of a kind; else a file that is cut."""
    saves = sorted({key.save for key in copies}, reverse=True)
    owner = chance.randrange(NUM_RANKS)
    num_saves, is_one = chance.choice([(1, True), (1, False), (2, False)])
    fault = Fault.FLIP if chance.random() < _FLIP_SHARE else Fault.TRUNCATE
    place: Place | None = chance.choice([None, *Place])
    ledger = Ledger(NUM_RANKS, len(saves)).with_copies(copies)
    contents: dict[Path, bytes | None] = {}
    for save in saves[:num_saves]:
        keys = [key for key in copies if (key.save, key.owner) == (save, owner)]
        keys = [key for key in keys if key.holder == owner] if is_one else keys
        content = copies[keys[0]].read_bytes()
        new = content[: chance.randrange(len(content))]
        if fault is Fault.FLIP:
            spans = [one for one in file_map(content) if place in {None, one.place}]
            (span,) = chance.choices(spans, [one.end - one.start for one in spans])
            new, place = (
                _flipped(content, chance.randrange(span.start, span.end), chance),
                span.place,
            )
        for key in keys:
            contents[copies[key]] = new
            if fault is Fault.TRUNCATE or place is not Place.PADDING:
                ledger = ledger.damaged_copy(key, Place.TENSOR)
    found = ledger.newest_whole()
    what = place if fault is Fault.FLIP and place else "end"
    return Change(number, fault, what, contents, found.iteration if found else None)


def check_local(load: Load, change: Change) -> Iterator[str]:
    """What is wrong with what all ranks load, and with what ``verify`` says of each file."""
    with made(change.contents):
        noticed = [any(True for _ in check_shard(p.parent, p.name)) for p in change.contents]
        found = load()
    if any(one is (change.what == Place.PADDING) for one in noticed):
        yield f"dist-ckpt verify: {noticed}"
    kinds = {kind for kind, _ in found}
    if change.expected is None and kinds != {"NoReplicasAvailableError"}:
        yield f"no copy is left, and the ranks come to {found}"
    if change.expected is not None and found != [("ok", str(change.expected))] * NUM_RANKS:
        yield f"expected iteration {change.expected} on every rank, found {found}"


def run_local(root: Path, chance: random.Random, count: int) -> Judged:
    """Each change and what was wrong."""
    for iteration in _ITERATIONS:
        run_threads(
            NUM_RANKS,
            lambda node: node.save(node.manager(keep=len(_ITERATIONS)), iteration),  # noqa: B023
            root,
        )
    copies = dict(sorted(local_copies(root).items()))

    def load() -> list[tuple[str, str]]:
        return run_threads(NUM_RANKS, lambda node: node.load(node.manager(0)), root)

    for number in range(count):
        change = draw_local(copies, chance, number)
        yield change, list(check_local(load, change))


RUNS = {"format 2": run_format2, "local": run_local}


def run_changes(seed: int, count: int, root: Path) -> Iterator[tuple[str, Change, list[str]]]:
    """Changes of checkpoints of both kinds, and what was wrong with each."""
    for name, run in RUNS.items():
        place = root / name
        place.mkdir()
        for change, wrong in run(place, random.Random(f"{name} {seed}"), count):
            yield name, change, wrong
