"""``dist-ckpt run`` as a command: what it prints, how it ends, and whom it leaves behind."""

import signal

import pytest

from tests.inprocess.agents import LIMIT_S, Agents
from tests.support.processes import until

pytestmark = pytest.mark.multiprocess

PRINTS = "print('out', *sys.argv[1:])\nprint('err', file=sys.stderr)\n"


def test_lines_come_behind_their_rank_and_the_limit_is_status_1(agents: Agents) -> None:
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
print(*map(os.environ.get, names))
print("no end", end="", file=sys.stderr)
if os.environ["RANK"] == "1": Path("printed").touch()
wait_for("printed")
sys.exit(9 if os.environ["RANK"] == "0" else 0)
"""
    options = ("-n", "2", "--max-restarts", "1")
    agent = agents.start(PRINTS + body, *options, args=("--nproc", "7"), has_pipe=True)
    out, err = agent.communicate(timeout=LIMIT_S)

    assert agent.returncode == 1
    assert "[0] out --nproc 7\n" in out
    assert "[0] err\n" in err
    assert "[1] 1 1 2 2 none\n" in out
    assert "[1] no end\n" in err
    assert "dist-ckpt: rank 0 is gone: exit code 9; a new process takes its place" in err
    assert "error: 2 workers have died (rank 0 2x), 1 restarts are allowed" in err


def test_torchruns_other_options_and_variables_have_their_meaning(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
print("role", os.environ["ROLE_NAME"])
Path(f"up.{os.getpid()}").touch()
wait_for("never")
"""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_ROLE", "trainer")
    options = ("--standalone", "--nnodes=1:1", "--rdzv_backend=static", "--monitor-interval", "1")
    agent = agents.start(body, *options, "--local-ranks-filter=1", "--signals-to-handle=SIGUSR1")
    until(lambda: len(agents.pids("up")) == 2)

    agent.send_signal(signal.SIGUSR1)

    assert agents.code(agent) == 128 + signal.SIGUSR1
    assert "[1] role trainer" in agents.output(agent)
    assert "[0]" not in agents.output(agent)


@pytest.mark.parametrize("redirection", [">/dev/full", ">&- 2>&-"])
def test_no_job_ends_for_a_line_that_cannot_be_written(redirection: str, agents: Agents) -> None:
    body = f"{PRINTS}Path('ran').touch()"
    agent = agents.start(body, "-n", "1", launcher=f'"$@" {redirection}')

    assert agents.code(agent) == 0
    assert (agents.directory / "ran").exists()
    assert "unexpected" not in agents.output(agent)


def test_a_reader_that_goes_ends_the_job_with_all_that_it_started(agents: Agents) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if not child: Path(f"child.{os.getpid()}").touch()
while not Path("go").exists() or child == 0 or not print("line"): time.sleep(0.01)
"""
    agent = agents.start(body, "-n", "2", has_pipe=True)
    until(lambda: len(agents.pids()) == 4)
    assert agent.stdout is not None
    agent.stdout.close()
    agents.go()

    assert agent.wait(LIMIT_S) == 141
    agents.require_ended()


def test_under_nohup_a_job_outlives_its_terminal(agents: Agents) -> None:
    launcher = 'trap "" HUP; exec "$@"'
    agent = agents.start("wait_for('go')", "-n", "2", launcher=launcher)
    until(lambda: len(agents.pids()) == 2)
    agent.send_signal(signal.SIGHUP)
    agents.go()

    assert agents.code(agent) == 0
    assert "SIGHUP" not in agents.output(agent)
