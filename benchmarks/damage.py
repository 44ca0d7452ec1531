"""Damage the files of checkpoints: is anything ever loaded that was not saved?

    python benchmarks/damage.py --out damage.jsonl
    python benchmarks/damage.py --smoke

Format 2: four ranks have saved; one process loads all of it, after a byte of some file is changed,
or a file is cut, deleted, made longer, or swapped with another. It has to get every bit that was
saved, or an error that names a damaged file; and where it need not notice, for a reason that is
listed, ``dist-ckpt verify`` has to, but for what has no meaning.

Local checkpoints: two saves of four ranks are on the disks, each shard in two copies. A byte is
changed, or a file cut, in the copy that is read, in both copies, or in both copies of both saves.
Then all ranks load: bit for bit the newest save, the one before, or, where no copy is left, an
error on every rank. ``dist-ckpt verify`` has to notice all changes but those in padding.

Ends with status 1 at the first violation, with the case and the seed. Ranks that are killed in
saves and loads are the events of ``python -m tests.faults``.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track
from torch.distributed import HashStore  # type: ignore[attr-defined]  # bound at run time

from benchmarks.common.command_line import NOWHERE, SMOKE_SHARE, Directory, Out, Smoke, open_output
from benchmarks.common.disks import workspace
from benchmarks.common.processes import quiet_imports

with quiet_imports():
    from megatron.core.dist_checkpointing import ShardedObject

    import dist_ckpt_strategies
    from dist_ckpt_strategies.comm.base import Communicator
    from dist_ckpt_strategies.errors import CheckpointError, NoReplicasAvailableError
    from dist_ckpt_strategies.formats.scan import scan, verify
    from dist_ckpt_strategies.local import (
        BasicTensorAwareStateDict,
        CliqueReplicationStrategy,
        LocalCheckpointManager,
    )
    from dist_ckpt_strategies.local.scan import check_shard
    from dist_ckpt_strategies.local.shard_format import LocalShardId
    from tests.faults.files import (
        HARMLESS,
        Fault,
        Files,
        Kind,
        file_map,
        kind_of_file,
        local_copies,
    )
    from tests.faults.oracle import CopyKey, Ledger, Place
    from tests.local.clique_worlds import bits, described, values_of
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
    from tests.support.thread_ranks import run_ranks

NUM_RANKS = 4
_TIMEOUT_S = 60.0
_NUM_COPIES = 2
_ITERATIONS = (1, 2)
_LOCAL_OPTIONS: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "max_bucket_bytes": 64 << 10}
_FLIP_SHARE = 5 / 6
_VERIFY_SHARE = 10
"""Every so many damages that a load has noticed are shown to ``dist-ckpt verify`` too."""

_SAME = "nothing that counts has changed"
_POISON = 0xA5
CUTS = (
    on_grid("decoder/weight", (1024, 512), (4, 1)),  # several inner chunks to a file
    on_grid("embedding.weight", (1024, 64), (4, 1), dtype=torch.bfloat16),
    in_runs("optimizer.flat", [291, 568, 845, 1137]),
    on_grid("scale", (64, 8), (4, 1), dtype=torch.float8_e4m3fn),
    on_grid("mask", (32,), (4,), dtype=torch.bool),
    on_grid("ids", (16, 4), (4, 1), dtype=torch.int64),
)
COMMON = {
    "iteration": 1,
    "args": {"lr": 1e-4, "name": "run"},
    "groups": [{"step": torch.tensor(1)}],
}


class ViolationError(Exception):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Case:
    """Files that are damaged together.

    Attributes:
        number: of the case.
        fault: what is done.
        what: the file or the bytes that are hit.
        contents: what the files hold then; None: the file is gone.
        expected: of local checkpoints, the iteration that has to be loaded; None: none can be.
        harmless: of format 2, why a load need not notice; empty: it has to.
    """

    number: int
    fault: str
    what: str
    contents: Mapping[Path, bytes | None]
    expected: int | None = None
    harmless: str = ""

    def __str__(self) -> str:
        """How to find it in a campaign of the same seed."""
        return f"case {self.number}: {self.fault} of {self.what}, {list(map(str, self.contents))}"


@contextmanager
def damaged(contents: Mapping[Path, bytes | None]) -> Iterator[None]:
    """Damage the files for the block."""
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
    state = state_of(rank, CUTS) | objects | COMMON
    dist_ckpt_strategies.save(state, root, ("zarr", 2), timeout_s=_TIMEOUT_S)


def load_format2(root: Path) -> CheckpointError | None:
    """Load everything, by one rank, into memory that holds something else.

    Raises:
        ViolationError: it is not what was saved.
    """
    wholes = {cut.key: _whole(cut) for cut in CUTS}
    state = {key: sharded(cut, part, _poisoned(cut)) for key, (cut, part) in wholes.items()}
    for owner in range(NUM_RANKS):
        for name in _objects(owner):
            state[f"{name} {owner}"] = ShardedObject(name, None, (NUM_RANKS,), (owner,))
    try:
        found: Any = dist_ckpt_strategies.load(state, root, timeout_s=_TIMEOUT_S)
    except CheckpointError as error:
        return error
    expected = COMMON | {f"{n} {r}": v for r in range(NUM_RANKS) for n, v in _objects(r).items()}
    if any(described(found[key]) != described(value) for key, value in expected.items()) or any(
        not same_bits(found[key], part_of(cut, part)) for key, (cut, part) in wholes.items()
    ):
        raise ViolationError("something else was loaded")
    return None


def _whole(cut: Cut) -> tuple[Cut, Part]:
    ones = tuple(1 for _ in cut.shape) if cut.grid else None
    return replace(cut, grid=ones), Part(0, (0,) * len(cut.shape), cut.shape)


def _poisoned(cut: Cut) -> torch.Tensor:
    tensor = torch.empty(cut.shape, dtype=cut.dtype)
    tensor.view(torch.uint8).fill_(0 if cut.dtype is torch.bool else _POISON)
    return tensor


def draw_format2(files: Files, chance: random.Random, number: int) -> Case:
    """A byte mostly: of all files, or of a kind, so that all are hit; else another fault."""
    if chance.random() < _FLIP_SHARE:
        kind = chance.choice([None, *Kind])
        name, at = _any_byte(files, kind, chance)
        changed = {name: _flipped(files.contents[name], at, chance)}
        return format2_case(files, number, Fault.FLIP, changed, files.kind_at(name, at))
    fault = chance.choice([one for one in Fault if one is not Fault.FLIP])
    kind = chance.choice([one for one in Kind if one is not Kind.CHUNK_INDEX])
    name = chance.choice(files.of_kind(kind))
    content = files.contents[name]
    changed_to: dict[str, bytes | None] = {name: None}
    if fault is Fault.TRUNCATE:
        changed_to = {name: content[: chance.randrange(len(content))]}
    elif fault is Fault.EXTEND:
        more = chance.choice([b"\0", b" ", b"}", chance.randbytes(chance.randrange(1, 5000))])
        changed_to = {name: content + more}
    elif fault is Fault.SWAP:
        alike = [one for one in files.of_kind(kind) if one != name]
        others = chance.choice([alike, []]) or [one for one in files.contents if one != name]
        other = chance.choice(others)
        changed_to = {name: files.contents[other], other: content}
    return format2_case(files, number, fault, changed_to, kind)


def _any_byte(files: Files, kind: Kind | None, chance: random.Random) -> tuple[str, int]:
    """A file, large ones more often than small ones, and a byte of it."""
    names = list(files.contents) if kind is None else files.of_kind(kind)
    if kind is Kind.CHUNK_INDEX:
        name = chance.choice(files.of_kind(Kind.CHUNK))
        return name, chance.randrange(files.index_start(name), len(files.contents[name]))
    (name,) = chance.choices(names, [len(files.contents[one]) for one in names])
    return name, chance.randrange(len(files.contents[name]))


def format2_case(
    files: Files, number: int, fault: Fault, changed: Mapping[str, bytes | None], kind: Kind
) -> Case:
    """The case, and whether a load need not notice it.

    Args:
        files: as they were saved.
        number: of the case.
        fault: what is done.
        changed: by name, what the files hold then.
        kind: what is hit; of a swap, the first file's.
    """
    kinds = {kind} if len(changed) == 1 else set(map(kind_of_file, changed))
    reasons = {HARMLESS.get((fault, one), "") for one in kinds}
    harmless = "; ".join(sorted(reasons)) if all(reasons) else ""
    if all(_is_same(files.contents[name], content, name) for name, content in changed.items()):
        harmless = _SAME
    contents = {files.root / name: content for name, content in changed.items()}
    return Case(number, fault, kind, contents, harmless=harmless)


def _is_same(before: bytes, after: bytes | None, name: str) -> bool:
    """Whether nothing that counts has changed: equal bytes, or spaces of the marker."""
    if before == after or after is None or kind_of_file(name) is not Kind.MARKER:
        return before == after
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


def judge_format2(root: Path, load: Callable[[Path], CheckpointError | None], case: Case) -> str:
    """Damage the files and load; what came of it.

    Raises:
        ViolationError: a damage was not noticed, or not named.
    """
    with damaged(case.contents):
        error = load(root)
        if error is None and not case.harmless:
            raise ViolationError("a load did not notice")
        if error is not None and not any(str(path) in str(error) for path in case.contents):
            raise ViolationError(f"the error does not name the file: {error}")
        if error is None or case.number % _VERIFY_SHARE == 0:
            _check_verify(root, case)
    return "what was saved" if error is None else "an error that names it"


def _check_verify(root: Path, case: Case) -> None:
    issues = verify(scan(root))
    named = {root / issue.path for issue in issues if issue.path}
    is_meaningless = case.harmless == _SAME or {p.name for p in case.contents} == {"save.json"}
    if is_meaningless and issues:
        raise ViolationError(f"dist-ckpt verify reports {issues}")
    if not is_meaningless and not named & set(case.contents):
        raise ViolationError(f"dist-ckpt verify does not report it: {issues}")


def run_format2(root: Path, chance: random.Random, count: int) -> Iterator[tuple[Case, str]]:
    """Damage a checkpoint of format 2 so many times; each case and what came of it."""
    run_processes(NUM_RANKS, save_format2, root)
    files = Files.below(root)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for number in range(count):
            case = draw_format2(files, chance, number)
            with violations(case):
                yield case, judge_format2(root, load_format2, case)
    finally:
        dist.destroy_process_group()


def _values(rank: int, iteration: int) -> dict[str, Any]:
    large = bits((20 << 10,), torch.float32, 1000 * iteration + rank)
    return values_of(rank, iteration) | {"large": large}


def save_local(rank: int, root: Path) -> None:
    """Body of a rank, which is a node of its own."""
    cliques = CliqueReplicationStrategy.from_replication_params(1, _NUM_COPIES, **_LOCAL_OPTIONS)
    manager = LocalCheckpointManager(
        root / f"node{rank}", repl_strategy=cliques, keep=len(_ITERATIONS), **_LOCAL_OPTIONS
    )
    for iteration in _ITERATIONS:
        manager.save(BasicTensorAwareStateDict(_values(rank, iteration)), iteration)


class _ThreadManager(LocalCheckpointManager):
    """A manager whose ranks are threads of one process: they load ten times as fast."""

    def __init__(self, root: Path, comm: Communicator) -> None:
        super().__init__(root / f"node{comm.rank}", **_LOCAL_OPTIONS)
        self._comm = comm

    def communicator(self, purpose: str, detail: str = "") -> Communicator:  # noqa: ARG002
        """The ranks that it was given."""
        return self._comm


def load_local(
    root: Path, expected: Mapping[tuple[int, int], Any], comm: Communicator
) -> int | CheckpointError:
    """The iteration that a rank has loaded, or why it has not. Collective.

    Raises:
        ViolationError: it is not what was saved.
    """
    try:
        state, text = _ThreadManager(root, comm).load()
    except CheckpointError as error:
        return error
    shard_id = LocalShardId.require(text)
    iteration = shard_id.save.iteration
    key = (comm.rank, iteration)
    if shard_id.global_rank != comm.rank or described(state.state_dict) != expected[key]:
        raise ViolationError(f"{text} is not what rank {comm.rank} saved")
    return iteration


def draw_local(copies: Mapping[CopyKey, Path], chance: random.Random, number: int) -> Case:
    """A byte mostly: of all of a file, or of a kind; else a file that is cut.

    In one copy, in both, or in both of both saves.
    """
    saves = sorted({key.save for key in copies}, reverse=True)
    owner = chance.randrange(NUM_RANKS)
    num_saves, is_one = chance.choice([(1, True), (1, False), (2, False)])
    place = chance.choice([None, *Place]) if chance.random() < _FLIP_SHARE else "end cut off"
    ledger = Ledger(NUM_RANKS, len(saves)).with_copies(copies)
    contents: dict[Path, bytes | None] = {}
    for save in saves[:num_saves]:
        keys = [key for key in copies if (key.save, key.owner) == (save, owner)]
        keys = [key for key in keys if key.holder == owner] if is_one else keys
        content = copies[keys[0]].read_bytes()
        if place == "end cut off":
            new = content[: chance.randrange(len(content))]
        else:
            spans = [one for one in file_map(content) if place in {None, one.place}]
            (span,) = chance.choices(spans, [one.end - one.start for one in spans])
            new, place = (
                _flipped(content, chance.randrange(span.start, span.end), chance),
                span.place,
            )
        for key in keys:
            contents[copies[key]] = new
            if place != Place.PADDING:
                ledger = ledger.damaged_copy(key, Place.TENSOR)
    found = ledger.newest_whole()
    fault = "cut" if place == "end cut off" else "flip"
    return Case(number, fault, str(place), contents, found.iteration if found else None)


def judge_local(load: Callable[[Communicator], int | CheckpointError], case: Case) -> str:
    """Damage the files, load on all ranks, and have each file checked; what came of it.

    Raises:
        ViolationError: not the newest whole save, or a damage that ``verify`` does not report.
    """
    with damaged(case.contents):
        noticed = [any(True for _ in check_shard(p.parent, p.name)) for p in case.contents]
        outcomes = run_ranks(NUM_RANKS, load, timeout_s=_TIMEOUT_S)
    if any(one is (case.what == Place.PADDING) for one in noticed):
        raise ViolationError(f"dist-ckpt verify: {noticed}")
    if case.expected is None:
        if not all(isinstance(one, NoReplicasAvailableError) for one in outcomes):
            raise ViolationError(f"no copy is left, and the ranks come to {outcomes}")
        return "an error on every rank"
    if outcomes != [case.expected] * NUM_RANKS:
        raise ViolationError(f"expected iteration {case.expected} on every rank, found {outcomes}")
    return "the newest" if case.expected == _ITERATIONS[-1] else "the one before"


def run_local(root: Path, chance: random.Random, count: int) -> Iterator[tuple[Case, str]]:
    """Damage local checkpoints so many times; each case and what came of it."""
    run_processes(NUM_RANKS, save_local, root)
    copies = dict(sorted(local_copies(root).items()))
    places = [(rank, iteration) for rank in range(NUM_RANKS) for iteration in _ITERATIONS]
    expected = {place: described(_values(*place)) for place in places}
    for number in range(count):
        case = draw_local(copies, chance, number)
        with violations(case):
            yield case, judge_local(partial(load_local, root, expected), case)


@contextmanager
def violations(case: Case) -> Iterator[None]:
    """Anything raised in the block is a violation of that case."""
    try:
        yield
    except GeneratorExit:
        raise
    except Exception as error:
        is_ours = isinstance(error, ViolationError)
        why = str(error) if is_ours else "".join(format_exception(error))
        raise ViolationError(f"{case}: {why}") from error


CAMPAIGNS = {"format 2": run_format2, "local": run_local}


def main(
    *,
    cases: Annotated[int, typer.Option(min=1, help="Of each kind of checkpoint.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
) -> None:
    """Damage checkpoints of format 2 and local ones: is anything wrong ever loaded?"""
    torch.set_num_threads(1)
    logging.getLogger("dist_ckpt_strategies").setLevel(logging.ERROR)
    count = max(1, cases // (SMOKE_SHARE if smoke else 1))
    counted: Counter[str] = Counter()
    classes: Counter[tuple[str, ...]] = Counter()
    with open_output(out, "damage.py") as output, workspace(directory) as place:
        try:
            for name, run in CAMPAIGNS.items():
                root = place / name
                root.mkdir()
                found = run(root, random.Random(f"{name} {seed}"), count)  # noqa: S311
                for case, result in track(found, name, count, console=Console(stderr=True)):
                    counted[f"{name}: {case.fault}"] += 1
                    classes[name, case.fault, case.what, result, case.harmless] += 1
        except ViolationError as violation:
            output.write("violation", {"why": str(violation), "seed": seed})
            typer.echo(f"VIOLATION with --seed {seed}: {violation}", err=True)
            raise typer.Exit(1) from violation
        for which, number in sorted(classes.items()):
            names = ("of", "fault", "what", "result", "harmless")
            output.write("class", dict(zip(names, which, strict=True)), cases=number)
        output.write("campaign", {"seed": seed, "violations": 0, "cases": dict(counted)})
        output.console.print(dict(counted))


if __name__ == "__main__":
    typer.run(main)
