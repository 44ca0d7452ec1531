"""The command line around the commands: help, versions, failures, exit status."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.cli.status import reported_failures
from dist_ckpt_strategies.errors import CorruptCheckpointError
from tests.support.checkpoints import (
    WEIGHT,
    write_checkpoint,
    write_foreign_checkpoint,
    write_format2,
)


def console_script() -> list[str]:
    """The installed script; where the package is not installed, what the script would do."""
    script = Path(sys.executable).parent / "dist-ckpt"
    return [str(script)] if script.exists() else [sys.executable, "-m", "dist_ckpt_strategies.cli"]


def run(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [*console_script(), *map(str, args)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.multiprocess
def test_a_reader_that_goes_away_is_no_failure_worth_a_traceback(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "ckpt")
    for number in range(3000):
        (root / f"array{number}").symlink_to(root / WEIGHT)

    for flags in ([], ["--json"]):
        with subprocess.Popen(
            [*console_script(), "inspect", str(root), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(10)
            process.stdout.close()
            assert process.stderr.read() == b""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints whole, damaged and unfinished of both formats, and an empty directory."""
    root = tmp_path_factory.mktemp("places")
    for write, name in ((write_checkpoint, "one"), (write_format2, "two")):
        for state in ("whole", "damaged", "unfinished"):
            write(root / f"{name}-{state}")
        (root / f"{name}-unfinished" / "metadata.json").unlink()
        chunk = next(p for p in (root / f"{name}-damaged").rglob("*") if is_chunk(p))
        chunk.unlink()
    (root / "empty").mkdir()
    write_foreign_checkpoint(root / "foreign")
    return root


def is_chunk(path: Path) -> bool:
    return path.is_file() and re.fullmatch(r"(c\.)?[0-9.]+", path.name) is not None


STATUS_OF_PLACE = {
    "one-whole": 0,
    "two-whole": 0,
    "one-damaged": 1,
    "two-damaged": 1,
    "one-unfinished": 1,
    "two-unfinished": 1,
    "empty": 1,
    "nowhere": 3,
    "foreign": 3,
}
LOOKING = [
    (f"{command} {{}}/{name}{flag}", status)
    for command in ("inspect", "verify")
    for name, status in STATUS_OF_PLACE.items()
    for flag in ("", " --json")
]


@pytest.mark.parametrize(
    ("args", "status"),
    [
        *LOOKING,
        ("convert {}/one-whole {}/new --to zarr2", 2),
        ("convert {}/one-whole {}/two-whole --to zarr@2", 2),
        ("convert {}/one-whole s3:/bucket --to zarr@2", 2),
        ("convert {}/one-unfinished {}/new --to zarr@2", 1),
        ("convert {}/nowhere {}/new --to zarr@2", 3),
        ("upgrade {}/one-whole {}/new", 2),
        ("upgrade {}/nowhere {}/new", 3),
        ("diff {}/one-whole {}/one-whole --json", 0),
        ("diff {}/one-whole {}/two-whole --json", 1),
        ("diff {}/one-whole {}/two-unfinished", 1),
        ("diff {}/one-whole {}/nowhere", 3),
        ("diff {}/one-whole {}/two-whole --keys nothing", 2),
        ("prune {}", 2),
        ("prune {} --keep-last 1 --json", 2),
        ("prune {} --keep-last 0 --dry-run", 2),
        ("prune {} --unfinished --older-than soon", 2),
        ("prune {}/one-whole --keep-last 1", 2),
        ("prune {}/nowhere --keep-last 1", 3),
        ("prune {} --unfinished --dry-run --json", 0),
        ("bench {}/nowhere", 3),
        ("demo --keep {}", 2),
        ("inspect {}/one-whole --keys nothing", 2),
        ("run -n 1 {}/nowhere.py", 2),
        ("--version", 0),
        ("", 2),
        ("inspect", 2),
        ("verify a b", 2),
        ("conquer", 2),
        ("--keep", 2),
    ],
)
def test_each_command_has_the_same_exit_statuses(args: str, status: int, places: Path) -> None:
    result = CliRunner().invoke(app, args.replace("{}", str(places)).split())

    assert result.exit_code == status, result.output
    if result.stdout and "--json" in args:
        assert json.loads(result.stdout)["command"] == args.partition(" ")[0]
    assert not (places / "new" / "metadata.json").exists()


STORE_COMMANDS = [
    ["inspect", "s3://bucket/c"],
    ["verify", "s3://bucket/c"],
    ["prune", "s3://bucket/c", "--keep-last", "1"],
    ["diff", "s3://bucket/c", "s3://bucket/d"],
    ["convert", "{}/one-whole", "s3://bucket/c", "--to", "zarr@2"],
]


@pytest.mark.multiprocess
def test_a_store_that_does_not_answer_is_reported_within_15_seconds_in_one_line(
    places: Path, tmp_path: Path
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "DIST_CKPT_"))
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment |= {"HOME": str(tmp_path), "DIST_CKPT_S3_ENDPOINT": endpoint}
        environment |= {"AWS_EC2_METADATA_DISABLED": "true"}
        began = time.monotonic()
        running = [
            subprocess.Popen(
                [*console_script(), *(word.replace("{}", str(places)) for word in words)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for words in STORE_COMMANDS
        ]
        try:
            for process in running:
                _, said = process.communicate(timeout=90)
                assert process.returncode == 3, said
                assert re.fullmatch(r"error: s3://bucket/c: the object store .*\n", said), said
        finally:
            for process in running:
                process.kill()
                process.wait()
    assert time.monotonic() - began < 60  # 120 s is a request's limit


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (CorruptCheckpointError("w: \x1b[1mbroken\nfile"), 1, "error: w: \\x1b[1mbroken\\nfile"),
        (KeyError("w"), 3, "error: unexpected KeyError: 'w' (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DIST_CKPT_DEBUG", raising=False)
    with pytest.raises(typer.Exit) as caught, reported_failures(debug=False):
        raise error

    assert caught.value.exit_code == status
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.multiprocess
def test_a_traceback_is_shown_where_asked_for(tmp_path: Path) -> None:
    quiet = run("verify", tmp_path / "nowhere", DIST_CKPT_DEBUG="")
    by_option = run("verify", tmp_path / "nowhere", "--debug")
    by_variable = run("verify", tmp_path / "nowhere", DIST_CKPT_DEBUG="1")

    assert (quiet.returncode, quiet.stderr.count("\n")) == (3, 1)
    for loud in (by_option, by_variable):
        assert loud.returncode == 3
        assert "Traceback" in loud.stderr
        assert "CheckpointNotFoundError" in loud.stderr
