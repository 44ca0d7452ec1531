"""What a manager's caller chooses: a step to load, what is saved and kept, what is reported."""

import errno
import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager, prune
from dist_ckpt_strategies.errors import CheckpointNotFoundError, PlanError
from dist_ckpt_strategies.local import LocalCheckpointManager
from dist_ckpt_strategies.manager.candidates import Loaded, Tier
from tests.local.clique_worlds import once
from tests.manager.test_manager import OPTIONS, Training, in_threads
from tests.support.checkpoints import flip_at, header_of
from tests.support.entries import Failure, logged, outcome
from tests.support.ranks import done_by
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

NAN = math.nan


def state_of(value: float) -> dict[str, Any]:
    """Rows of a matrix, and the value as the common state."""
    training = Training()
    training.rows.fill_(value)
    training.num_done = int(value)
    return training.state_dict()


def save(manager: TieredCheckpointManager, step: int, **how: Any) -> None:
    assert manager.save(step, state_of(float(step)), **how)
    manager.wait()


def loaded_by(load: Callable[[Any], Loaded | None]) -> Any:
    """Tier and step of what is loaded, which is all there; or the Failure."""
    wanted = state_of(0.0)
    found = outcome(lambda: load(wanted))
    if not isinstance(found, Loaded):
        return found
    assert found.state["num_done"] == found.iteration
    assert torch.equal(wanted["rows"].data, torch.full((8, 16), float(found.iteration)))
    return found.tier, found.iteration


def content_of(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, but the lock, which its holder renews."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in files
        if "lock" not in path.name
    }


def goes_back(manager: TieredCheckpointManager) -> None:
    """To an own copy of a state, without a load."""
    save(manager, 12)
    save(manager, 4)
    assert manager.course().left == {8, 12}
    assert loaded_by(manager.load_latest) == (Tier.GLOBAL, 4)


def loads_steps(rank: int, root: str) -> None:
    """Body of a rank: of each step the local save or the global one, and no other."""
    in_threads()
    node = LocalCheckpointManager(f"{root}/node{rank}", keep=3)
    policy = SavePolicy(every_steps=4, local_every_steps=1)
    run = Path(root, "run")
    with TieredCheckpointManager(run, local=node, policy=policy, options=OPTIONS) as manager:
        for step in (3, 4, 5, 8):
            save(manager, step)

        def load(step: int) -> Any:
            return loaded_by(partial(manager.load, step))

        assert [load(step) for step in (3, 4, 5, 8)] == [
            *((Tier.LOCAL, 3), (Tier.GLOBAL, 4), (Tier.LOCAL, 5), (Tier.GLOBAL, 8))
        ]
        missing = load(6)
        assert CheckpointNotFoundError.__name__ in missing.kinds
        assert "no checkpoint of step 6" in missing.text
        assert "local 3, 5; global 4, 8" in missing.text
        differ = load(4 + 4 * rank)
        assert (PlanError.__name__ in differ.kinds, "[4, 8]" in differ.text) == (True, True)

        def damage() -> None:
            (pack, *_) = sorted(run.glob("iter_0000008/packs/*/*"))
            flip_at(pack, header_of(pack)[1])

        once(rank, damage)
        damaged = load(8)
        assert "StorageError" in damaged.kinds
        assert "CheckpointNotFoundError" not in damaged.kinds
        assert ".safetensors" in damaged.text
        assert "local 3, 5; global 4, 8" in damaged.text
        assert load(4) == (Tier.GLOBAL, 4)
        save(manager, 6)  # from step 4 on: what came later was left
        assert manager.course().left == {8}
        assert loaded_by(manager.load_latest) == (Tier.LOCAL, 6)
        assert "local 3, 6; global 4, 8" in load(5).text
        goes_back(manager)


def test_just_the_step_that_was_asked_for_is_loaded_from_either_tier(tmp_path: Path) -> None:
    assert done_by(2, loads_steps, str(tmp_path)) == [None] * 2


def opens_with_rules_of_its_own(rank: int, root: str) -> Any:
    manager = TieredCheckpointManager(root, policy=SavePolicy(every_steps=1 + rank))
    return outcome(lambda: manager.save(2, state_of(2.0)))


def test_rules_that_differ_between_ranks_are_refused_on_all(tmp_path: Path) -> None:
    for failure in done_by(2, opens_with_rules_of_its_own, str(tmp_path)):
        assert PlanError.__name__ in failure.kinds
        assert (
            "every_steps: expected the same on all ranks, found 1 on rank 0 and 2 on rank 1"
            in failure.text
        )


def reads_beside_a_training(rank: int, root: str) -> None:
    """Body of a rank: 0 and 1 train and evaluate; the evaluator is a manager beside the trainer's.

    The same processes serve: the lock knows managers apart.
    """
    in_threads()
    evaluator = TieredCheckpointManager(f"{root}/run", options=OPTIONS, read_only=True)
    assert (evaluator.latest_step(), evaluator.all_steps()) == (None, [])
    assert loaded_by(evaluator.load_latest) is None
    dist.barrier()
    assert not Path(root, "run").exists()
    with TieredCheckpointManager(f"{root}/run", options=OPTIONS) as trainer:
        save(trainer, 4, force=True, metrics={"loss": 2.5})
        dist.barrier()
        before = content_of(Path(root))
        dist.barrier()
        with evaluator:
            assert evaluator.latest_step() == 4
            assert evaluator.metrics(4) == {"loss": 2.5}
            assert loaded_by(partial(evaluator.load, 4)) == (Tier.GLOBAL, 4)
            assert loaded_by(partial(evaluator.load_latest, at_most=4)) == (Tier.GLOBAL, 4)
            for refused in (evaluator.save, evaluator.begin):
                found = outcome(partial(refused, 5, state_of(5.0)))
                assert PlanError.__name__ in found.kinds
                assert "read_only" in found.text
        dist.barrier()
        assert content_of(Path(root)) == before
        save(trainer, 8, force=True)  # which still has the lock
        dist.barrier()
        assert evaluator.latest_step() == 8
        assert loaded_by(evaluator.load_latest) == (Tier.GLOBAL, 8)
    own: Any
    for own in ({"local": LocalCheckpointManager(f"{root}/node")}, {"recovery": object()}):
        with pytest.raises(PlanError, match="read_only"):
            TieredCheckpointManager(f"{root}/run", read_only=True, **own)


def test_an_evaluator_reads_beside_a_training_and_changes_nothing(tmp_path: Path) -> None:
    assert done_by(2, reads_beside_a_training, str(tmp_path)) == [None] * 2


def keeps_the_best(rank: int, root: str, policy: SavePolicy, losses: dict[int, Any]) -> Any:
    """Body of a rank: a job that saves steps with these losses; rank 1 has others."""
    in_threads()
    with TieredCheckpointManager(root, policy=policy, options=OPTIONS) as manager:
        manager.load_latest(state_of(0.0))
        for step, loss in losses.items():
            metrics = None if loss is None else {"loss": loss if rank == 0 else -step, "n": step}
            save(manager, step, force=True, metrics=metrics)
    dist.barrier()
    return manager.all_steps()


JOBS: list[dict[int, Any]] = [
    {10: 3.0, 20: torch.tensor(1.0), 30: NAN, 40: None, 50: 2.0},
    {60: 5.0, 70: 1.0, 80: 4.0, 90: None},
]


@pytest.mark.parametrize(
    ("rules", "first", "second"),
    [
        ({"keep_last": 2, "keep_best": ("loss", "min", 2)}, [20, 40, 50], [20, 70, 80, 90]),
        ({"keep_best": ("loss", "max", 1)}, [10, 50], [60, 90]),
        ({"keep_last": 1, "keep_best": ("accuracy", "max", 3)}, [50], [90]),
    ],
)
def test_the_best_are_kept_by_later_jobs_too(
    tmp_path: Path, rules: Any, first: list[int], second: list[int]
) -> None:
    policy = SavePolicy(**rules)
    assert done_by(2, keeps_the_best, str(tmp_path), policy, JOBS[0]) == [first] * 2
    assert done_by(2, keeps_the_best, str(tmp_path), policy, JOBS[1]) == [second] * 2

    reader = TieredCheckpointManager(tmp_path, read_only=True)
    found = {step: reader.metrics(step).get("loss") for step in (20, 40, 60, 70, 80, 90)}
    expected = {20: 1.0, 60: 5.0, 70: 1.0, 80: 4.0}
    assert found == {step: expected.get(step) if step in second else None for step in found}
    assert len(list(tmp_path.glob(".dist-ckpt-metrics-*"))) == len(set(second) - {90})
    if rules.get("keep_last") == 2:
        plan = prune(tmp_path, keep_best=("loss", "min", 1), dry_run=True)
        assert [one.iteration for one in plan.removed] == [20, 80]  # of equal ones the newer stays
        plan = prune(tmp_path, keep_last=1, dry_run=True)  # by the manager's rule
        assert [one.iteration for one in plan.removed] == [80]


def saves_a_step_again(root: Path) -> None:
    policy = SavePolicy(keep_best=("loss", "min", 1))
    with TieredCheckpointManager(root, policy=policy, options=OPTIONS) as manager:
        save(manager, 1, force=True, metrics={"loss": 0.5})
        save(manager, 2, force=True, metrics={"loss": 0.7})
        manager.load(1, state_of(0.0))
        save(manager, 2, force=True)
        assert manager.metrics(2) == {}
        metrics: Any
        for metrics in ({"loss": "low"}, [("loss", 1.0)], {"loss": torch.zeros(2)}):
            found = outcome(partial(manager.save, 3, state_of(3.0), force=True, metrics=metrics))
            assert PlanError.__name__ in found.kinds, found
        (root / ".dist-ckpt-metrics-0000001.json").write_text("[")
        assert manager.metrics(1) == {}
        save(manager, 3, force=True, metrics={"loss": math.inf})
    assert manager.all_steps() == [3]


def test_metrics_are_those_of_the_last_save_of_a_step(tmp_path: Path) -> None:
    saves_a_step_again(tmp_path)


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_best": ("loss", "least", 1)},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": "loss"},
        {"keep_best": ("loss", "min")},
        {"should_save": 5},
    ],
)
def test_rules_that_make_no_sense_are_refused_at_once(rules: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected"):
        SavePolicy(**rules)
    if "keep_best" in rules:
        with pytest.raises(PlanError, match="expected"):
            prune(tmp_path, **rules)


def asks(rank: int, root: str) -> None:
    """Body of a rank."""
    in_threads()
    asked: list[int] = []
    answers: dict[int, Any] = {
        1: True,
        2: False,
        3: "local",
        4: rank == 0,
        5: rank == 1,
        6: Tier.GLOBAL,
        7: None,
        8: "local",
    }
    texts = logged(".manager")

    def should_save(step: int) -> bool | str | None:
        asked.append(step)
        if step == 9 and rank == 1:
            raise ValueError("no answer here")
        return "memory" if step == 10 else answers.get(step)

    policy = SavePolicy(every_steps=8, should_save=should_save)
    node = LocalCheckpointManager(f"{root}/node{rank}", keep=5)
    with TieredCheckpointManager(
        f"{root}/run", local=node, policy=policy, options=OPTIONS
    ) as manager:
        begun = []
        for step in range(1, 9):
            begun += [step] if manager.save(step, state_of(float(step))) else []
            assert manager.is_saving() is (step in {1, 3, 4, 6, 8})
            manager.wait()
            assert not manager.is_saving()
        assert (asked, begun) == ([*range(1, 9)], [1, 3, 4, 6, 8])
        assert manager.all_steps() == [1, 4, 6, 8]
        assert [text for text in texts if "differs" in text] == [
            f"step {step}: should_save differs between ranks; rank 0's counts"
            for step in ((4, 5) if rank == 0 else ())
        ]
        failed = outcome(partial(manager.save, 9, state_of(9.0)))
        assert failed.text.startswith("rank 1: ")
        assert "no answer here" in failed.text
        assert "'memory'" in outcome(partial(manager.save, 10, state_of(10.0))).text
        assert not manager.save(11, state_of(11.0))
        dist.barrier()
    policy = SavePolicy(should_save=lambda _: "local")
    with TieredCheckpointManager(f"{root}/run", policy=policy, options=OPTIONS) as manager:
        assert "manager has none" in outcome(partial(manager.save, 12, state_of(12.0))).text


def test_a_function_of_the_caller_says_what_is_saved_and_rank_0_has_the_last_word(
    tmp_path: Path,
) -> None:
    assert done_by(2, asks, str(tmp_path)) == [None] * 2


def is_preempted(rank: int, root: str) -> list[bool]:
    """Body of a rank: one of them is preempted, and asks before it saves."""
    in_threads()
    found = []
    with suppress(SystemExit), TieredCheckpointManager(root, options=OPTIONS) as manager:
        found.append(manager.is_preempted())
        if rank == 1:
            manager.preempt()
        found.append(manager.is_preempted())
        manager.save(1, state_of(1.0))
    return [*found, manager.is_preempted(), manager.is_saving()]


def test_a_rank_can_ask_whether_it_was_preempted(tmp_path: Path) -> None:
    found = done_by(2, is_preempted, str(tmp_path))
    assert found == [[False, rank == 1, False, False] for rank in range(2)]


def makes_events(rank: int, root: str, options: ManagerOptions) -> None:
    """A save, a skip, a failure, and loads."""
    in_threads()
    policy, node = SavePolicy(local_every_steps=1), LocalCheckpointManager(f"{root}/node{rank}")
    run = Path(root, "run")

    goes_on = threading.Event()

    def refuse(_name: str, path: str) -> None:
        if "iter_0000002/packs/" in path:
            assert goes_on.wait(60)
        if rank == 1 and "iter_0000004/packs/" in path:
            raise OSError(errno.EIO, "a disk that fails")

    with (
        before_calls(refuse, ["open"]),
        TieredCheckpointManager(run, local=node, policy=policy, options=options) as manager,
    ):
        manager.load_latest(state_of(0.0))  # there is none: nothing to report
        save(manager, 1)
        assert manager.save(2, state_of(2.0), force=True)
        assert not manager.save(3, state_of(3.0))
        goes_on.set()
        manager.wait()
        manager.save(4, state_of(4.0), force=True)
        assert isinstance(outcome(manager.wait), Failure)
        assert loaded_by(manager.load_latest) == (Tier.GLOBAL, 2)
        assert isinstance(loaded_by(partial(manager.load, 7)), Failure)
    dist.barrier()


def reports(rank: int, root: str) -> None:
    """Body of a rank: what the file has of its events."""
    file = Path(root, "events.jsonl")
    makes_events(rank, root, ManagerOptions(timeout_s=40.0, metrics=file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    events = [(line["kind"], line["step"], line["tier"]) for line in lines]
    assert events == [
        ("save", 1, "local"),
        ("skip", 3, "local"),
        ("save", 2, "global"),
        ("failure", 4, "global"),
        ("load", 2, "global"),
        ("failure", 7, ""),
    ]
    reasons = [line["reason"] for line in lines]
    assert "the global save of step 2 is still running" in reasons[1]
    assert "a disk that fails" in reasons[3]
    assert "no checkpoint of step 7" in reasons[5]
    assert (reasons[0], reasons[2]) == ("", "")
    assert all(line["unix_s"] > 0 for line in lines)
    assert (lines[4]["blocking_s"] > 0, lines[2]["nbytes"]) == (True, 2 * 8 * 16 * 4)


def test_loads_skips_and_failures_are_reported_like_saves(tmp_path: Path) -> None:
    assert done_by(2, reports, str(tmp_path)) == [None] * 2


NEXT_CALLS: dict[str, Callable[[TieredCheckpointManager, int], Any]] = {
    "begin": lambda manager, step: manager.begin(step, state_of(float(step))),
    "load_latest": lambda manager, _: manager.load_latest(state_of(0.0)),
    "load": lambda manager, step: manager.load(step - 2, state_of(0.0)),
    "close": lambda manager, _: manager.close(),
}


def fails_on_one_of_four(rank: int, root: str) -> None:
    """Body of a rank: of step 2 rank 2 cannot write; one call raises that, on all ranks."""
    in_threads()

    def refuse(_name: str, path: str) -> None:
        if rank == 2 and "iter_0000002/packs/" in path:
            raise OSError(errno.EIO, "a disk of rank 2 alone")

    for name, call in NEXT_CALLS.items():
        with before_calls(refuse, ["open"]):
            manager = TieredCheckpointManager(f"{root}/{name}", options=OPTIONS)
            save(manager, 1, force=True)
            manager.save(2, state_of(2.0), force=True)
            found = outcome(partial(call, manager, 3))
            assert isinstance(found, Failure), name
            assert found.text.startswith("rank 2: "), (name, found)
            assert "a disk of rank 2 alone" in found.text
            assert "iter_0000002/packs/" in str(found.path)
            assert manager.is_saving() is (name == "begin")
        manager.close()  # the error was raised
        assert manager.all_steps() == ([1, 3] if name == "begin" else [1]), name
        with manager:
            assert loaded_by(manager.load_latest) == (Tier.GLOBAL, manager.latest_step())
            request = manager.begin(4, state_of(4.0))
            request.wait()
            assert not manager.is_saving()
        dist.barrier()


def test_the_error_of_one_rank_of_four_is_raised_by_one_call_on_all(tmp_path: Path) -> None:
    assert done_by(4, fails_on_one_of_four, str(tmp_path)) == [None] * 4
