"""``dist-ckpt prune``: shows what it removes, asks, and removes it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app
from tests.support.checkpoints import write_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints and an unfinished one."""
    for number in range(1, 5):
        write_checkpoint(tmp_path / f"iter_{number:07d}")
    marker = tmp_path / "iter_0000004" / "metadata.json"
    marker.rename(marker.with_name(".removed-metadata.json"))
    return tmp_path


def pruned(*args: str | Path, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["prune", *map(str, args)], input=answer)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_it_shows_what_it_removes_and_asks(root: Path) -> None:
    declined = pruned(root, "--keep-last", "1", answer="n\n")

    assert declined.exit_code == 0
    lines = [line.split(maxsplit=2) for line in declined.stdout.splitlines()]
    assert lines[1][:2] == ["iter_0000001", "remove"]
    assert lines[1][2].endswith("complete, and not to be kept")
    assert lines[3] == ["iter_0000003", "keep", "the newest"]
    assert lines[4] == ["iter_0000004", "keep", "unfinished; kept without --unfinished"]
    assert len(names_in(root)) == 4

    agreed = pruned(root, "--keep-last", "1", answer="y\n")
    assert agreed.exit_code == 0
    assert "removed 2 checkpoints of 4" in agreed.stdout
    assert names_in(root) == ["iter_0000003", "iter_0000004"]


def test_without_an_answer_nothing_is_removed_and_yes_is_named(root: Path) -> None:
    unanswered = pruned(root, "--keep-last", "1", answer="")

    assert unanswered.exit_code == 2
    assert unanswered.stderr.splitlines()[-1] == (
        "error: nothing was removed: the shell is not interactive; add --yes, or --dry-run"
    )
    assert len(names_in(root)) == 4


def test_an_interrupt_at_the_question_is_an_interrupt(root: Path) -> None:
    command = [sys.executable, "-m", "dist_ckpt_strategies.cli", "prune", str(root)]
    with subprocess.Popen(
        [*command, "--keep-last", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        assert any("to remove" in line for line in asking.stdout)
        asking.send_signal(signal.SIGINT)
        _, said = asking.communicate(timeout=60)

    assert (asking.returncode, said.splitlines()[-1]) == (130, "interrupted")
    assert len(names_in(root)) == 4


def test_yes_does_not_ask_and_unfinished_ones_go_by_age(root: Path) -> None:
    assert "may still be written" in pruned(root, "--unfinished", "--yes").stdout
    assert len(names_in(root)) == 4

    assert pruned(root, "--unfinished", "--older-than", "0s", "--yes").exit_code == 0
    assert names_in(root) == ["iter_0000001", "iter_0000002", "iter_0000003"]


def test_a_dry_run_only_shows(root: Path) -> None:
    result = pruned(root, "--keep-every", "2", "--dry-run", "--json")

    found = json.loads(result.stdout)
    assert (result.exit_code, found["dry_run"]) == (0, True)
    assert [one["name"] for one in found["removed"]] == ["iter_0000001"]
    assert {one["name"]: one["status"] for one in found["kept"]}["iter_0000004"] == "unfinished"
    assert len(names_in(root)) == 4
