"""The manager of all tiers, in training loops that are killed, preempted, and doubled."""

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.utils.data import DataLoader

from dist_ckpt_strategies import (
    ManagerOptions,
    SaveMetrics,
    SavePolicy,
    TieredCheckpointManager,
    load_latest,
    prune,
    save,
)
from dist_ckpt_strategies.config import JOB
from dist_ckpt_strategies.errors import CheckpointChangedError, PlanError, StorageError
from dist_ckpt_strategies.local import LazyCliqueReplicationStrategy, LocalCheckpointManager
from dist_ckpt_strategies.manager.candidates import Loaded, Tier
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.local.clique_worlds import once
from tests.support.entries import Failure, logged, outcome
from tests.support.memory_provider import MemoryProvider
from tests.support.processes import finished, run_script, until
from tests.support.ranks import RankDiedError, allow_processes, forkserver, run_processes
from tests.support.restarts import Wrappers, join_group, run_restartable
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

NUM_STEPS = 120
TRACKER = "latest_checkpointed_iteration.txt"
OPTIONS = ManagerOptions(timeout_s=40.0, lease_s=8.0)


class Training:
    """Two ranks, each with its rows of a matrix; a step mixes in noise and what the other has."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rows = torch.zeros(8, 16)
        self.num_done = 0

    def state_dict(self) -> dict[str, Any]:
        rows = ShardedTensor.from_rank_offsets("rows", self.rows, (0, self.rank, self.size))
        return {"rows": rows, "num_done": self.num_done}

    def resume(self, manager: TieredCheckpointManager) -> Loaded | None:
        loaded = manager.load_latest(self.state_dict)
        if loaded is not None:
            assert loaded.state["rows"].data_ptr() == self.rows.data_ptr()
            self.num_done = loaded.state["num_done"]
            assert self.num_done == loaded.iteration
        return loaded

    def step(self) -> None:
        noise = torch.Generator().manual_seed(100 * self.num_done + self.rank)
        mean = self.rows.mean()
        if self.size > 1:
            dist.all_reduce(mean)
        self.rows.mul_(0.99).add_(torch.randn(8, 16, generator=noise)).add_(mean)
        self.num_done += 1


def in_threads() -> None:
    """Writer processes take seconds to start, in each attempt again."""
    os.environ["DIST_CKPT_WRITER_PROCESS"] = "0"
    os.environ["DIST_CKPT_TIMEOUT_S"] = "40"


def trains(rank: int, root: str, kill: tuple[int, int, float] | None) -> Any:
    """Body of a rank: go on from what there is; one is killed after so many steps and seconds."""
    in_threads()
    training = Training()
    node = LocalCheckpointManager(
        Path(root) / f"node{rank}", repl_strategy=LazyCliqueReplicationStrategy(1, 2)
    )
    policy = SavePolicy(every_steps=20, local_every_steps=6, keep_last=2)
    with TieredCheckpointManager(
        Path(root) / "global", local=node, policy=policy, options=OPTIONS
    ) as manager:
        loaded = training.resume(manager)
        first = training.num_done
        while training.num_done < NUM_STEPS:
            if kill is not None and kill[:2] == (rank, training.num_done - first):
                threading.Timer(kill[2], os.kill, (os.getpid(), signal.SIGKILL)).start()
            training.step()
            time.sleep(0.004)
            manager.save(training.num_done, training.state_dict)
    return training.rows, loaded and (loaded.tier, loaded.iteration)


def test_a_training_killed_at_random_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    rng = random.Random(23)
    after = [65, *rng.choices(range(40), k=3)]  # steps; by the first time there are saves
    for num_steps in after:
        victim = rng.randrange(2)
        run_processes(2, trains, str(tmp_path), (victim, num_steps, rng.uniform(0, 0.1)))
        if rng.random() < 0.5:  # the node is lost, too
            shutil.rmtree(tmp_path / f"node{victim}", ignore_errors=True)
    results = run_processes(2, trains, str(tmp_path), None)
    whole = run_processes(2, trains, str(tmp_path / "undisturbed"), None)

    assert [where for _, where in whole] == [None, None]
    for (rows, where), (expected, _) in zip(results, whole, strict=True):
        assert torch.equal(rows, expected)
        assert where is not None
    steps = TieredCheckpointManager(tmp_path / "global").all_steps()
    assert steps == [NUM_STEPS - 20, NUM_STEPS]
    assert not list((tmp_path / "global").glob(".dist-ckpt-lock-*"))


class Shared:
    """Trainings of several roots, with one directory on each node."""

    def __init__(self, root: str) -> None:
        in_threads()
        self.rank, self.root = dist.get_rank(), Path(root)
        self.node = self.root / f"node{self.rank}"

    def manager(
        self, name: str, local: LocalCheckpointManager | None = None
    ) -> TieredCheckpointManager:
        local = local or LocalCheckpointManager(self.node)
        policy = SavePolicy(local_every_steps=1)
        return TieredCheckpointManager(
            self.root / name, local=local, policy=policy, options=OPTIONS
        )

    def save(self, manager: TieredCheckpointManager, step: int, *, force: bool = False) -> None:
        assert manager.save(step, self.state(float(step)), force=force)
        manager.wait()

    def found_by(self, manager: TieredCheckpointManager) -> Any:
        """Tier and step of what it loads, or the Failure."""
        state = self.state(0.0)
        found = outcome(lambda: manager.load_latest(state))
        if found is None or isinstance(found, Failure):
            return found
        assert state["w"].data.tolist() == [float(found.iteration)] * 4
        return found.tier, found.iteration

    def state(self, value: float) -> dict[str, Any]:
        where = (0, self.rank, dist.get_world_size())
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value), where)}

    def files(self) -> set[Path]:
        return set(self.node.rglob("iter_*"))


def shares_a_local_directory(rank: int, root: str) -> None:
    """Body of a rank."""
    shared = Shared(root)
    with shared.manager("one") as one:
        shared.save(one, 6)
        of_one = shared.files()
        with shared.manager("two") as two:
            refused = shared.found_by(two)
            assert "StorageError" in refused.kinds
            assert "CheckpointNotFoundError" not in refused.kinds
            for name in ("one", "two"):
                assert (shared.root / name / ".dist-ckpt-training").read_text()[:16] in refused.text
            for step in (2, 3):
                shared.save(two, step)
            assert (of_one < shared.files(), len(shared.files())) == (True, 2)
            assert shared.found_by(one) == (Tier.LOCAL, 6)
            assert shared.found_by(two) == (Tier.LOCAL, 3)
            shared.save(two, 5, force=True)
            for path in shared.files() - of_one:
                path.unlink()
            dist.barrier()
            assert shared.found_by(two) == (Tier.GLOBAL, 5)
        both = outcome(lambda: shared.manager("two", one.local))
        assert str(shared.root / "one") in both.text
    once(rank, lambda: (shared.root / "one").rename(shared.root / "moved"))
    with shared.manager("moved") as moved, shared.manager("one", one.local) as anew:
        assert shared.found_by(moved) == (Tier.LOCAL, 6)
        assert isinstance(shared.found_by(anew), Failure)
    for bound, kind in ((None, Failure), ("moved", Loaded), ("one", Failure)):
        local = LocalCheckpointManager(shared.node)
        if bound is not None:
            local.bind(shared.root / bound)
        found = outcome(partial(load_latest, local, [shared.root / "moved"]))
        assert isinstance(found, kind), (bound, found)


def test_a_training_neither_loads_nor_removes_local_checkpoints_of_another(tmp_path: Path) -> None:
    assert run_processes(2, shares_a_local_directory, str(tmp_path)) == [None] * 2


def goes_back_by_files(rank: int, root: str) -> None:
    """Body of a rank: the tracker names an earlier step, then the root is copied."""
    shared = Shared(root)
    one, copy = (shared.root / name for name in ("one", "copy"))

    def found(name: str, *steps: int) -> Any:
        with shared.manager(name) as manager:
            loaded = shared.found_by(manager)
            for step in steps:
                shared.save(manager, step, force=step % 4 == 0)
        dist.barrier()
        return loaded

    found("one", 4, 5, 8, 9)
    once(rank, lambda: (one / TRACKER).write_text("4"))
    assert found("one") == (Tier.GLOBAL, 4)
    assert found("one", 5, 6) == (Tier.GLOBAL, 4)
    assert found("one", 7) == (Tier.LOCAL, 6)
    once(rank, lambda: shutil.copytree(one, copy))
    assert found("one", 8, 11) == (Tier.LOCAL, 7)
    assert found("copy", 5) == (Tier.GLOBAL, 4)
    assert (found("one"), found("copy")) == ((Tier.LOCAL, 11), (Tier.LOCAL, 5))


def test_an_edited_tracker_and_a_copied_root_go_back_in_the_local_tier_too(tmp_path: Path) -> None:
    assert run_processes(2, goes_back_by_files, str(tmp_path)) == [None] * 2


def is_refused(rank: int, root: str) -> str:
    """Body of a rank: of a second job."""
    with pytest.raises(CheckpointChangedError) as caught:
        TieredCheckpointManager(root, options=OPTIONS).load_latest(Training().state_dict())
    return str(caught.value)


def test_a_second_job_at_one_root_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with TieredCheckpointManager(tmp_path / "run", options=OPTIONS) as first:
        found = run_processes(2, is_refused, str(tmp_path / "run"))
        assert first.save(1, Training().state_dict(), force=True)
    with TieredCheckpointManager(tmp_path / "run", options=OPTIONS) as next_one:
        loaded = next_one.load_latest(Training().state_dict())

    assert all(f"process {os.getpid()} of host " in text for text in found), found
    assert loaded is not None
    assert loaded.iteration == 1


def test_a_holder_of_another_host_has_its_lease_until_it_runs_out(tmp_path: Path) -> None:
    root, options = tmp_path / "run", ManagerOptions(timeout_s=40.0, lease_s=3.0)
    with TieredCheckpointManager(root, options=options) as first:
        first.save(1, Training().state_dict(), force=True)
        (lock,) = root.glob(".dist-ckpt-lock-*")
        holder = json.loads(lock.read_text())
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert holder["process"].startswith(boot_id)
    lock.write_text(json.dumps({**holder, "process": "elsewhere/pid:[1] 2 3", "job": "another"}))
    began = time.monotonic()
    with TieredCheckpointManager(root, options=options) as manager:
        assert manager.load_latest(Training().state_dict()) is not None
    assert time.monotonic() - began > 3.0


def is_stopped(root: str, answer: str) -> None:
    """A process that holds the lock and is stopped for longer than its lease."""
    in_threads()
    options = ManagerOptions(lease_s=1.0)
    manager = TieredCheckpointManager(root, options=options)
    manager.save(1, Training().state_dict(), force=True)
    manager.wait()
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        manager.save(2, Training().state_dict(), force=True)
    except CheckpointChangedError as error:
        Path(answer).write_text(str(error))


def test_a_job_that_was_silent_for_its_lease_loses_the_root_and_its_save(tmp_path: Path) -> None:
    root, answer = tmp_path / "run", tmp_path / "answer"
    process = forkserver().Process(target=is_stopped, args=(str(root), str(answer)))
    process.start()
    try:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        with TieredCheckpointManager(root, options=OPTIONS) as manager:
            assert process.pid is not None
            manager.save(2, Training().state_dict(), force=True)
            os.kill(process.pid, signal.SIGCONT)
            process.join(60)
        assert manager.all_steps() == [1, 2]
    finally:
        process.kill()
        process.join()

    assert f"process {os.getpid()} of host" in answer.read_text()
    assert "silent for 1 s" in answer.read_text()


def ignore_sigterm(_worker_id: int) -> None:
    """As quickstart has it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()

    def wait() -> None:
        while parent and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def is_preempted(rank: int, root: str) -> None:
    """Body of a rank: one of them gets a signal, and so do its processes, from their start on."""
    allow_processes()
    training = Training()
    options = {"num_workers": 1, "worker_init_fn": ignore_sigterm}
    samples = iter(DataLoader(range(100), **options))  # type: ignore[arg-type]
    next(samples)
    (worker,) = psutil.Process().children()

    def end_writer() -> None:
        while training.num_done < 9:
            for child in {*psutil.Process().children()} - {worker}:
                child.terminate()

    ending = threading.Thread(target=end_writer, daemon=True)
    if rank == 1:
        ending.start()
    with TieredCheckpointManager(
        root, policy=SavePolicy(every_steps=4), options=OPTIONS
    ) as manager:
        for _ in samples:
            training.step()
            if rank == 1 and training.num_done == 9:
                ending.join()
                finished("kill", str(worker.pid))
                os.kill(os.getpid(), signal.SIGTERM)
            manager.save(training.num_done, training.state_dict)


def test_after_a_signal_to_one_rank_all_save_and_end_with_the_stated_code(tmp_path: Path) -> None:
    found = run_processes(2, is_preempted, str(tmp_path))

    assert [isinstance(one, RankDiedError) and one.exit_code for one in found] == [143, 143]
    assert TieredCheckpointManager(tmp_path).all_steps() == [4, 8, 9]


def test_an_attempt_that_fails_after_the_signal_does_not_forget_it(tmp_path: Path) -> None:
    """A block that is run again makes a manager in each attempt."""
    manager = partial(TieredCheckpointManager, tmp_path, options=OPTIONS)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    with suppress(ValueError), manager() as first:
        first.save(1, state)
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("on purpose")

    with pytest.raises(SystemExit, match="143"), manager() as second:
        second.save(2, state)

    with manager() as third:
        third.save(3, state)
        assert third.all_steps() == [2]


def is_told_to_end_between_attempts(
    rank: int, wrappers: Wrappers, root: str, is_kept: bool
) -> list[int]:
    """Body of a rank: one fails; then another gets a signal before the next attempt's manager.

    With ``is_kept`` that is the one of the attempt before.
    """
    kept = TieredCheckpointManager(root, options=OPTIONS)
    attempts: list[int] = []

    @wrappers()
    def train() -> None:
        attempts.append(len(attempts) + 1)
        if attempts[-1] == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        join_group()
        made = kept if is_kept else TieredCheckpointManager(root, options=OPTIONS)
        with made as manager:
            weights = torch.full((4,), float(attempts[-1]))
            replica = ShardedTensor.from_rank_offsets("w", weights, replica_id=rank)
            manager.save(attempts[-1], {"w": replica})
            if rank == 0:
                raise ValueError("on purpose")
            dist.barrier()

    with pytest.raises(SystemExit, match="143"):
        train()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return attempts


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_signal_between_attempts_saves_what_the_next_one_has(
    tmp_path: Path, is_kept: bool
) -> None:
    body = is_told_to_end_between_attempts
    assert run_restartable(2, body, str(tmp_path), is_kept) == [[1, 2], [1, 2]]
    assert TieredCheckpointManager(tmp_path).all_steps() == [2]


def test_an_error_outside_of_attempts_gives_the_signals_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    with suppress(ValueError), TieredCheckpointManager(tmp_path, options=OPTIONS) as manager:
        manager.save(1, state)
        assert signal.getsignal(signal.SIGTERM) is not before
        raise ValueError("on purpose")

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_reaches_all_open_managers_of_a_process(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    managers = [TieredCheckpointManager(tmp_path / str(n), options=OPTIONS) for n in range(3)]
    for manager in managers:
        manager.save(1, Training().state_dict(), force=True)
    first, second, third = managers
    second.close()

    os.kill(os.getpid(), signal.SIGTERM)

    assert [manager.is_preempted() for manager in managers] == [True, False, True]
    for manager in (first, third):
        with pytest.raises(SystemExit, match="143"):
            manager.save(2, Training().state_dict())
        assert manager.all_steps() == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_give_back_the_lock_of_its_parent(tmp_path: Path) -> None:
    with TieredCheckpointManager(tmp_path, options=OPTIONS) as manager:
        child = os.fork()
        if child == 0:
            manager.release()  # as at the end of a script
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

        assert manager.save(1, Training().state_dict(), force=True)


def test_a_root_that_is_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.symlink_to("scratch")
    state, options = Training().state_dict(), OPTIONS

    for act in (
        lambda: TieredCheckpointManager(root, options=options).save(1, state, force=True),
        lambda: save(state, root / "iter_0000001"),
    ):
        with pytest.raises(StorageError, match=r"checkpoints: is a symbolic link to scratch, "):
            act()


def test_relative_paths_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, metrics="events.jsonl")
    with TieredCheckpointManager("run", options=options) as manager:
        monkeypatch.chdir("/")
        manager.save(1, Training().state_dict(), force=True)

    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "run"}


ENDING = """
import atexit, sys, torch, torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager

root, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(root + ".store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, rank, size))}
plain = BasicTensorAwareStateDict({"w": torch.ones(4)})
request = LocalCheckpointManager(root).save(plain, 1, is_async=True)
manager = TieredCheckpointManager(root, policy=SavePolicy(keep_last=1))
atexit.register(manager.release)
manager.save(1, state, force=True)
if size == 2:
    sys.exit(3)
with TieredCheckpointManager(root + ".raises") as other:
    other.save(1, state, force=True)
    raise KeyError("on purpose")
"""


def test_a_process_alone_that_ends_amid_saves_finishes_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    done = run_script(script, str(tmp_path / "alone"), "0", "1")
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert LocalCheckpointManager(tmp_path / "alone").find_latest() == 1
    for name in ("alone", "alone.raises"):
        assert TieredCheckpointManager(tmp_path / name).all_steps() == [1]
    assert not list(tmp_path.glob("alone*/.dist-ckpt-lock-*"))


def test_ranks_that_end_amid_a_save_say_that_it_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING)

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        return run_script(script, str(tmp_path / "both"), str(rank), "2")

    with ThreadPool(2) as pool:
        both = pool.map(run, range(2))
    for done in both:
        assert done.returncode == 3, done.stderr
        assert (
            "the global save of step 1 had not ended when its manager was released" in done.stderr
        )
        assert "iteration 1 is lost: the script ended" in done.stderr


def outlasts_failures(rank: int, root: str) -> list[str]:
    """Body of a rank: of step 2 rank 1 cannot write its files, of step 3 it has no state."""
    in_threads()
    training, errors = Training(), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def state_dict() -> dict[str, Any]:
        if rank == 1 and training.num_done == 3:
            raise ValueError("no state here")
        return training.state_dict()

    options = ManagerOptions(timeout_s=40.0, is_async=False)
    with TieredCheckpointManager(
        root, policy=SavePolicy(every_steps=1), options=options
    ) as manager:
        for _ in range(4):
            training.step()
            is_full = rank == 1 and training.num_done == 2
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]) if is_full else limits)
            found = outcome(lambda: manager.save(training.num_done, state_dict))
            if isinstance(found, Failure):
                assert found.seconds < 20
                errors.append(found.text)
                assert rank or not list(Path(root).glob("*/.partial-*")), "its space is not free"
        steps = manager.all_steps()
        loaded = training.resume(manager)
    assert loaded is not None
    errors += outlasts_failures_in_background(rank, root)
    return [*errors, f"{steps} {loaded.iteration} {manager.all_steps()}"]


def outlasts_failures_in_background(rank: int, root: str) -> list[str]:
    """Of step 6 rank 1 cannot write its files; of step 8 no rank can, each for its own reason."""
    training, policy = Training(), SavePolicy(every_steps=1)

    def refuse(_name: str, path: str) -> None:
        if rank == 1 and "iter_0000006/packs/" in path:
            raise OSError(errno.EIO, "a disk that fails in the background")
        if "iter_0000008/packs/" in path:
            raise OSError(errno.EIO, "a disk") if rank else PlanError("no disk at all")

    with (
        before_calls(refuse, ["open"]),
        TieredCheckpointManager(root, policy=policy, options=OPTIONS) as manager,
    ):
        assert manager.save(6, training.state_dict)
        failed = outcome(lambda: manager.save(7, training.state_dict))
        assert isinstance(failed, Failure)
        assert manager.save(8, training.state_dict)
        assert isinstance(outcome(lambda: manager.save(9, training.state_dict)), Failure)
        assert manager.save(10, training.state_dict)  # all ranks have left step 9's save alike
    return [failed.text]


def test_a_failed_save_of_one_rank_costs_that_step_and_no_other(tmp_path: Path) -> None:
    for too_large, without_state, in_background, rest in run_processes(
        2, outlasts_failures, str(tmp_path)
    ):
        assert re.search("rank 1: .*too large", too_large)
        assert re.search("rank 1: .*no state here", without_state)
        assert re.search("rank 1: .*a disk that fails in the background", in_background)
        assert rest == "[1, 4] 4 [1, 4, 7, 10]"


def begins_anew(rank: int, root: str) -> list[Any]:
    """Body of a rank: an attempt ends with a save under way, and rank 1 makes a new manager."""
    in_threads()
    training = Training()
    found: list[Any] = []
    events: list[SaveMetrics] = []
    options = replace(OPTIONS, metrics=events.append)
    manager = TieredCheckpointManager(root, options=options)
    manager.save(1, training.state_dict, force=True)
    manager.wait()
    manager.save(2, training.state_dict, force=True)
    manager.release()  # as after an exception
    dist.barrier()
    if rank == 1:
        manager = TieredCheckpointManager(root, options=OPTIONS)
    with manager:
        loaded = manager.load_latest(training.state_dict)
        found += [loaded and loaded.iteration, manager.save(2, training.state_dict, force=True)]
        (failure,) = [one for one in events if one.kind == "failure"] if rank == 0 else [None]
        assert failure is None or (failure.step, failure.tier) == (2, "global")
        different = outcome(lambda: manager.save(3 + rank, training.state_dict, force=True))
        assert isinstance(different, Failure)
        found.append(different.text)
    return [*found, manager.all_steps()]


def test_a_save_under_way_is_given_up_where_one_rank_is_new(tmp_path: Path) -> None:
    for loaded, is_saved, different, steps in run_processes(2, begins_anew, str(tmp_path)):
        assert (loaded, is_saved, steps) == (1, True, [1, 2])
        assert "found [3, 4]" in different


def restarts(rank: int, root: str, enters: bool, is_pending: bool) -> list[Any]:
    """Body of a rank: three attempts in three worlds; before the second and the third one of the
    ranks is replaced. The manager outlives the attempts, and nobody releases it."""
    in_threads()
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    manager, found, training = TieredCheckpointManager(root, options=OPTIONS), [], Training()
    for attempt in range(3):
        if attempt:
            dist.barrier()
            dist.destroy_process_group()
            own = PrefixStore(f"attempt {attempt}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        if attempt and rank == size - attempt:
            manager = TieredCheckpointManager(root, options=OPTIONS)
        began = time.monotonic()
        with suppress(KeyError), manager if enters else nullcontext():
            loaded = manager.load_latest(training.state_dict)
            found.append(loaded and loaded.iteration)
            manager.begin(attempt + 1, training.state_dict()).wait()
            if is_pending:
                manager.begin(attempt + 10, training.state_dict())
            raise KeyError(attempt)
        assert time.monotonic() - began < 20
    dist.barrier()
    manager.release()
    return [*found, manager.all_steps()]


@pytest.mark.parametrize(("size", "enters", "is_pending"), [(2, False, True), (4, True, False)])
def test_in_a_new_process_group_the_manager_begins_anew_whatever_its_state(
    tmp_path: Path, size: int, enters: bool, is_pending: bool
) -> None:
    expected = [None, 1, 2, [1, 2, 3]]
    assert run_processes(size, restarts, str(tmp_path), enters, is_pending) == [expected] * size


def takes_over(rank: int, root: str) -> Any:
    """Body of a process: 0 is rank 0 until its node is cut off, then 2 is; 3 is another job."""
    in_threads()
    options = ManagerOptions(timeout_s=100.0, lease_s=45.0)
    manager = TieredCheckpointManager(f"{root}/run", options=options)

    def join(name: str, global_rank: int) -> None:
        store = FileStore(f"{root}/{name}", 2)
        dist.init_process_group("gloo", store=store, rank=global_rank, world_size=2)

    if rank < 2:
        join("first", rank)
        manager.load_latest(Training().state_dict)
        Path(root, f"cut{rank}").touch()
    until(lambda: len(list(Path(root).glob("cut*"))) == 2, 60.0)
    if rank == 3:
        return is_refused(rank, f"{root}/run")
    if rank == 0:
        until(Path(root, "saved").exists, 60.0)
        return outcome(manager._root.require_lock).text  # its next save would wait for rank 1
    if rank == 1:
        dist.destroy_process_group()
    began = time.monotonic()
    join("second", 2 - rank)
    training = Training()
    manager.load_latest(training.state_dict)
    seconds = time.monotonic() - began
    manager.save(1, training.state_dict, force=True)
    manager.wait()
    Path(root, "saved").touch()
    return seconds


def test_a_new_rank_0_takes_over_the_lock_of_its_own_job_at_once(tmp_path: Path) -> None:
    cut_off, *seconds, other = run_processes(4, takes_over, str(tmp_path), makes_group=False)

    assert max(seconds) < 20, seconds
    assert "has taken over" in cut_off
    assert "another job saves here" in other


def begins_again(rank: int, root: str) -> float:
    """Body of a process: 1 is all that is left of the job of 0, under ``dist-ckpt run``."""
    os.environ[JOB] = "a job"
    options = ManagerOptions(timeout_s=100.0, lease_s=45.0)
    manager = TieredCheckpointManager(f"{root}/run", options=options)
    if rank == 1:
        until(Path(root, "0").exists, 60.0)
    began = time.monotonic()
    manager.load_latest(Training().state_dict)
    Path(root, f"{rank}").touch()
    until(Path(root, "1").exists, 60.0)
    return time.monotonic() - began if rank else 0.0


def test_new_processes_alone_take_over_the_lock_of_their_job_at_once(tmp_path: Path) -> None:
    assert max(run_processes(2, begins_again, str(tmp_path), makes_group=False)) < 20


def goes_back(rank: int, root: str, backend: tuple[str, int]) -> list[Any]:
    """Body of a rank: courses that end and go on with new managers, as in jobs of their own."""
    in_threads()
    found: list[Any] = []
    training = Training()
    options = ManagerOptions(timeout_s=40.0, strategy=backend)

    def run(*steps: int, at_most: int | None = None, keep: int | None = None) -> Any:
        node = LocalCheckpointManager(f"{root}/node{rank}")
        policy = SavePolicy(keep_last=keep, local_every_steps=5)
        manager = TieredCheckpointManager(f"{root}/run", local=node, policy=policy, options=options)
        loaded = outcome(lambda: manager.load_latest(training.state_dict, at_most=at_most))
        for step in steps:
            training.num_done = step
            manager.save(step, training.state_dict, force=step % 10 == 0)
            manager.wait()
        manager.release()  # as a job that dies, but that the lock is free at once
        is_loaded = isinstance(loaded, Loaded)
        found.append(loaded.iteration if is_loaded else loaded)
        dist.barrier()

    run(50, 90, 100, 105)
    run(at_most=50)  # dies before it saves: the course is the same
    run()
    run(60, at_most=50, keep=2)
    found.append(TieredCheckpointManager(f"{root}/run").all_steps())
    run(65, 70)  # not 105, which is still on the nodes' disks
    run(75, at_most=60)  # a local save comes first
    found.append(Path(root, "run", TRACKER).read_text())
    dist.barrier()
    run(80)
    run(100, at_most=70)  # which had been left
    run()
    run(at_most=40)
    return [*found, TieredCheckpointManager(f"{root}/run").latest_step()]


@pytest.mark.parametrize(("size", "backend"), [(1, ("safetensors", 1)), (2, ("zarr", 1))])
def test_a_training_that_goes_back_stays_in_its_course(
    tmp_path: Path, size: int, backend: tuple[str, int]
) -> None:
    for *found, refused, newest in run_processes(size, goes_back, str(tmp_path), backend):
        assert found == [None, 50, 105, 50, [50, 60], 60, 60, "60", 75, 70, 100]
        assert "CheckpointNotFoundError" not in refused.kinds
        assert re.search("no checkpoint in .* can be loaded.*iter_0000080", refused.text)
        assert newest == 100
    plan = prune(tmp_path / "run", keep_last=2, dry_run=True)
    assert [one.iteration for one in plan.removed] == [80, 50, 60]


@pytest.mark.parametrize(
    ("tracker", "loaded"), [("50", 50), ("70", 60), ("x", 100), ("", 100), (None, 100)]
)
def test_without_a_list_the_tracker_file_says_what_was_left(
    tmp_path: Path, tracker: str | None, loaded: int, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (50, 60, 100):
        save(Training().state_dict() | {"num_done": step}, tmp_path / f"iter_{step:07d}")
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    with TieredCheckpointManager(tmp_path, options=OPTIONS) as manager:
        found = manager.load_latest(Training().state_dict)
        assert found is not None
        assert found.state["num_done"] == manager.latest_step() == loaded
        assert ("of a course that" in caplog.text) is (loaded != 100)
        manager.save(110, Training().state_dict, force=True)
        manager.wait()
        (tmp_path / ".dist-ckpt-course.json").write_text("{" if loaded == 60 else "[3]")
        assert manager.load_latest(Training().state_dict).iteration == 110  # type: ignore[union-attr]
        shutil.rmtree(manager.directory(110))
        (tmp_path / TRACKER).write_text("10")
        refused = outcome(lambda: manager.load_latest(Training().state_dict))
        assert "iter_0000060): of a course that the training has left" in refused.text


def test_checkpoints_of_others_are_neither_loaded_nor_removed(tmp_path: Path) -> None:
    training = Training()
    policy = SavePolicy(every_steps=1, keep_last=1)
    with TieredCheckpointManager(tmp_path, policy=policy, options=OPTIONS) as manager:
        for step in (1, 2, 3):
            manager.save(step, training.state_dict)
            manager.wait()
            if step == 1:
                for name in ("best", "iter_0000009.bad", "pretrained_9000"):
                    shutil.copytree(manager.directory(1), tmp_path / name)
    (tmp_path / "metadata.json").write_text("{}")  # the caller's own
    with TieredCheckpointManager(tmp_path, options=OPTIONS) as manager:
        assert manager.all_steps() == [3]
        loaded = manager.load_latest(training.state_dict)
        with (
            TieredCheckpointManager(tmp_path, options=OPTIONS),
            pytest.raises(CheckpointChangedError, match="with a later manager"),
        ):
            manager.save(4, training.state_dict, force=True)
        with pytest.raises(CheckpointChangedError, match="nobody has: a later manager took it"):
            manager.save(5, training.state_dict, force=True)

    assert loaded is not None
    assert loaded.iteration == 3
    assert {one.name for one in tmp_path.iterdir() if one.is_dir()} == {
        *("best", "iter_0000009.bad", "iter_0000003", "pretrained_9000")
    }


def follows_its_policy(rank: int, root: str) -> dict[str, Any]:
    """Body of a rank: steps, minutes, retention, what is left out, and what is written of it."""
    in_threads()
    training = Training()
    texts = logged(".manager")
    quiet = ManagerOptions(timeout_s=40.0, preemption_signals=(), metrics=f"{root}/metrics.jsonl")
    policy = SavePolicy(every_steps=10, keep_last=1, keep_every=20)
    with TieredCheckpointManager(f"{root}/steps", policy=policy, options=quiet) as manager:
        for step in range(1, 10 if rank == 0 else 1):  # alone: nothing can be due
            assert not manager.save(step, training.state_dict)
        begun = [step for step in range(10, 51) if manager.save(step, training.state_dict)]
        assert not manager.save(50, training.state_dict, force=True)
        nothing = outcome(lambda: manager.load_latest(training.state_dict, at_most=5))
        assert "iter_0000050" in nothing.text and manager.save(50, training.state_dict)  # noqa: PT018
        back = manager.load_latest(training.state_dict(), at_most=49)
        manager.begin(41, training.state_dict, content_metadata={"is": "last"}).wait()
    rates: list[SaveMetrics] = []

    def broken_metrics(metrics: SaveMetrics) -> None:
        rates.append(metrics)
        raise ValueError("no plot today")

    timed = ManagerOptions(timeout_s=40.0, poll_every_steps=5, metrics=broken_metrics)
    policy = SavePolicy(every_minutes=1e-4, keep_last=1)
    with TieredCheckpointManager(f"{root}/minutes", policy=policy, options=timed) as manager:
        for step in range(1, 13):
            manager.save(step, training.state_dict)
            time.sleep(0.01)
    policy = SavePolicy(every_steps=4, local_every_steps=1)
    options = ManagerOptions(timeout_s=40.0, poll_every_steps=100)
    with TieredCheckpointManager(
        f"{root}/both",
        local=LocalCheckpointManager(f"{root}/node{rank}"),
        policy=policy,
        options=options,
    ) as manager:
        both = [manager.save(step, training.state_dict) for step in (3, 4)]
    return {
        "begun": begun,
        "back": back and back.iteration,
        "minutes": [one.step for one in rates],
        "nbytes": {one.nbytes for one in rates},
        "both": both,
        "waited": [text for text in texts if "training waited" in text and "local" in text],
    }


def test_steps_minutes_and_retention_are_as_the_policy_says(tmp_path: Path) -> None:
    first, second = run_processes(2, follows_its_policy, str(tmp_path))
    lines = [json.loads(one) for one in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert first["begun"] == second["begun"] == [10, 20, 30, 40, 50]
    assert [line["kind"] for line in lines] == [*["save"] * 5, "failure", "save", "load", "save"]
    lines = [line for line in lines if line["kind"] == "save"]
    assert [line["step"] for line in lines] == [*first["begun"], 50, 41]
    assert first["back"] == second["back"] == 40
    assert all(line["nbytes"] == 2 * 8 * 16 * 4 and line["gb_per_s"] > 0 for line in lines)
    assert TieredCheckpointManager(tmp_path / "steps").all_steps() == [20, 40, 41]
    assert TieredCheckpointManager(tmp_path / "minutes").all_steps() == [10]
    assert (first["minutes"], first["nbytes"]) == ([5, 10], {2 * 8 * 16 * 4})
    assert second["minutes"] == []  # rank 0 alone knows
    assert first["both"] == [True, True]
    assert first["waited"][0].startswith("step 4: training waited")


def asks_memory_first(rank: int, root: str) -> list[Any]:
    """Body of a rank: memory has the newest state, then none has it, then the disk is asked."""
    in_threads()
    found: list[Any] = []
    recovery = CheckpointManager(timeout_s=30)
    with TieredCheckpointManager(root, recovery=recovery, options=OPTIONS) as manager:
        manager.save(3, Training().state_dict(), force=True)
        recovery.track(MemoryProvider({"m": {"w": torch.full((4,), 7.0)}}, step=5))
        recovery.begin_step()
        if rank == 1:
            recovery.delete_checkpoint()
        for is_kept in (True, False):
            new = MemoryProvider({"m": {"w": torch.zeros(4)}})
            loaded = manager.load_latest(Training().state_dict(), new)
            assert loaded is not None
            found.append((loaded.tier, loaded.iteration, new.parts()["m"]["w"].tolist()))
            assert bool(loaded.attempts) is not is_kept
            recovery.delete_checkpoint()
            found += map(str, loaded.attempts)
    return found


def test_memory_is_tried_before_the_disks_and_its_refusal_is_reported(tmp_path: Path) -> None:
    for memory, disk, attempt in run_processes(2, asks_memory_first, str(tmp_path)):
        assert memory == (Tier.MEMORY, 5, [7.0] * 4)
        assert disk == (Tier.GLOBAL, 3, [0.0] * 4)
        assert "delete_checkpoint was called" in attempt


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ({"every_steps": 0}, {}),
        ({"every_minutes": float("nan")}, {}),
        ({"local_every_steps": 5}, {}),
        ({"every_steps": "5"}, {}),
        ({"every_steps": 5, "keep_last": 0.5}, {}),
        ({"every_steps": 5, "keep_every": 10}, {}),
        ({}, {"lease_s": 0}),
        ({}, {"poll_every_steps": 0}),
        ({}, {"lease_s": 60, "timeout_s": 60}),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(policy: Any, options: Any) -> None:
    with pytest.raises(PlanError, match="expected"):
        TieredCheckpointManager("x", policy=SavePolicy(**policy), options=ManagerOptions(**options))
    if "every_steps" in policy:
        with pytest.raises(PlanError, match="expected"):
            SavePolicy(**policy)


@pytest.mark.parametrize("step", [-1, 2.5, "7", None])
def test_a_step_that_is_no_number_of_steps_is_refused(step: Any, tmp_path: Path) -> None:
    with (
        TieredCheckpointManager(tmp_path, policy=SavePolicy(every_steps=1)) as manager,
        pytest.raises(PlanError, match="step: expected the number of steps done, found"),
    ):
        manager.save(step, {})
