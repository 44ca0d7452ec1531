"""``dist-ckpt prune``: shows what it removes, asks, and removes it."""

import signal
from pathlib import Path

import pytest

from tests.cli.commands import PROGRAM, begun, json_of, run
from tests.support.checkpoints import copied, names_in
from tests.support.processes import ended


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """Three checkpoints and an unfinished one."""
    for number in range(1, 5):
        copied(written, tmp_path / f"iter_{number:07d}")
    marker = tmp_path / "iter_0000004" / "metadata.json"
    marker.rename(marker.with_name(".removed-metadata.json"))
    return tmp_path


def test_it_shows_what_it_removes_and_asks(root: Path) -> None:
    declined = run("prune", root, "--keep-last", "1", answer="n\n")

    assert declined.exit_code == 0
    lines = [line.split(maxsplit=2) for line in declined.stdout.splitlines()]
    assert lines[1][:2] == ["iter_0000001", "remove"]
    assert lines[1][2].endswith("complete, and not to be kept")
    assert lines[3] == ["iter_0000003", "keep", "the newest"]
    assert lines[4] == ["iter_0000004", "keep", "unfinished; kept without --unfinished"]
    assert len(names_in(root)) == 4

    agreed = run("prune", root, "--keep-last", "1", answer="y\n")
    assert agreed.exit_code == 0
    assert "removed 2 checkpoints of 4" in agreed.stdout
    assert names_in(root) == ["iter_0000003", "iter_0000004"]


def test_without_an_answer_nothing_is_removed_and_yes_is_named(root: Path) -> None:
    unanswered = run("prune", root, "--keep-last", "1")

    assert unanswered.exit_code == 2
    assert unanswered.stderr.splitlines()[-1] == (
        "error: nothing was removed: the shell is not interactive; add --yes, or --dry-run"
    )
    assert len(names_in(root)) == 4


@pytest.mark.multiprocess
def test_an_interrupt_at_the_question_is_an_interrupt(root: Path) -> None:
    with begun(*PROGRAM, "prune", root, "--keep-last", "1") as asking:
        assert asking.stdout is not None
        assert any("to remove" in line for line in asking.stdout)
        asking.send_signal(signal.SIGINT)
        _, said = asking.communicate(timeout=60)

    assert (asking.returncode, said.splitlines()[-1]) == (130, "interrupted")
    assert len(names_in(root)) == 4


def test_yes_does_not_ask_and_unfinished_ones_go_by_age(root: Path) -> None:
    assert "may still be written" in run("prune", root, "--unfinished", "--yes").stdout
    assert len(names_in(root)) == 4

    assert run("prune", root, "--unfinished", "--older-than", "0s", "--yes").exit_code == 0
    assert names_in(root) == ["iter_0000001", "iter_0000002", "iter_0000003"]


def test_a_dry_run_only_shows(root: Path) -> None:
    found = json_of("prune", root, "--keep-every", "2", "--dry-run", code=0)

    assert found["dry_run"] is True
    assert [one["name"] for one in found["removed"]] == ["iter_0000001"]
    assert {one["name"]: one["status"] for one in found["kept"]}["iter_0000004"] == "unfinished"
    assert len(names_in(root)) == 4


def test_a_closed_input_is_no_answer(root: Path) -> None:
    done = ended("bash", "-c", f"{' '.join(PROGRAM)} prune {root} --keep-last 1 <&-")

    assert done.returncode == 2
    assert "nothing was removed: the shell is not interactive" in done.stderr
