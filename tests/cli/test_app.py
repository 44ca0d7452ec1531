"""The command line around the commands: help, versions, failures, exit status."""

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from tests.cli.commands import PROGRAM, begun, run
from tests.support.checkpoints import (
    WEIGHT,
    write_checkpoint,
    write_foreign_checkpoint,
    write_packs,
)
from tests.support.system_calls import before_calls


@pytest.mark.multiprocess
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_failure_worth_a_traceback(
    flags: list[str], tmp_path: Path
) -> None:
    root = write_checkpoint(tmp_path / "ckpt")
    for number in range(3000):
        (root / f"array{number}").symlink_to(root / WEIGHT)

    with begun(*PROGRAM, "inspect", root, *flags) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints whole, damaged and unfinished of both formats, and an empty directory."""
    root = tmp_path_factory.mktemp("places")
    for write, name, chunk in (
        (write_checkpoint, "one", f"{WEIGHT}/0.0"),
        (write_packs, "two", "packs/*/*"),
    ):
        write(root / f"{name}-whole")
        next(write(root / f"{name}-damaged").glob(chunk)).unlink()
        unfinished = write(root / f"{name}-unfinished")
        for marker in ("metadata.json", "index"):
            (unfinished / marker).unlink(missing_ok=True)
    (root / "empty").mkdir()
    write_foreign_checkpoint(root / "foreign")
    (root / "script.py").touch()
    return root


PLACES_BY_STATUS = {
    0: ("one-whole", "two-whole"),
    1: ("one-damaged", "two-damaged", "one-unfinished", "two-unfinished"),
    3: ("nowhere", "foreign", "empty"),
}


WRONG_RUN_OPTIONS = (
    "--nproc 0",
    "--nproc_per_node two",
    "--nproc 2 --spares -1",
    "--nproc 2 --x",
    "--nnodes 2",
    "--nnodes 1:2 --rdzv-endpoint host",
    "--rdzv-endpoint host:port",
    "--rdzv-endpoint host:99999",
    "--rdzv-endpoint host --store-only",
    "--rdzv-backend etcd-v2",
    "--spare-nodes 1",
    "--tee 7",
    "--event-log-handler kafka",
    "--rdzv_conf join_timeout=9",
    "--virtual-local-rank",
    "--signals-to-handle SIGKILL",
    "--local-ranks-filter one",
    "--no-python",
)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        *(
            (f"{command} {{}}/{name}{flag}", status)
            for command in ("inspect", "verify")
            for status, names in PLACES_BY_STATUS.items()
            for name in names
            for flag in ("", " --json")
        ),
        ("convert {}/one-whole {}/new --to zarr2", 2),
        ("convert {}/one-whole {}/two-whole --to pack", 2),
        ("convert {}/one-whole s3:/bucket --to pack", 2),
        ("convert {}/one-unfinished {}/new --to pack", 1),
        ("convert {}/nowhere {}/new --to pack", 3),
        ("upgrade {}/one-whole {}/new", 2),
        ("upgrade {}/nowhere {}/new", 3),
        ("diff {}/one-whole {}/one-whole --json", 0),
        ("diff {}/one-whole {}/two-whole --json", 1),
        ("diff {}/one-whole {}/two-unfinished", 1),
        ("diff {}/one-whole {}/nowhere", 3),
        ("diff {}/one-whole {}/empty", 3),
        ("convert {} {}/new --to pack", 3),
        ("diff {}/one-whole {}/two-whole --keys nothing", 2),
        ("prune {}", 2),
        ("prune {} --keep-last 1 --json", 2),
        ("prune {} --keep-last 0 --dry-run", 2),
        ("prune {} --unfinished --older-than soon", 2),
        ("prune {} --keep-best loss:least:1 --dry-run", 2),
        ("prune {}/one-whole --keep-last 1", 2),
        ("prune {}/nowhere --keep-last 1", 3),
        ("prune {} --unfinished --dry-run --json", 0),
        ("bench {}/nowhere", 3),
        ("demo --keep {}", 2),
        ("inspect {}/one-whole --keys nothing", 2),
        ("run -n 1 {}/nowhere.py", 2),
        *((f"run {options} {{}}/script.py", 2) for options in WRONG_RUN_OPTIONS),
        ("--version", 0),
        ("", 2),
        ("inspect", 2),
        ("verify a b", 2),
        ("conquer", 2),
        ("--keep", 2),
    ],
)
def test_each_command_has_the_same_exit_statuses(args: str, status: int, places: Path) -> None:
    result = run(*args.replace("{}", str(places)).split())

    assert result.exit_code == status, result.output
    if result.stdout and "--json" in args:
        assert json.loads(result.stdout)["command"] == args.partition(" ")[0]
    assert not (places / "new" / "metadata.json").exists()


STORE_COMMANDS = (
    "inspect s3://bucket/c",
    "verify s3://bucket/c",
    "prune s3://bucket/c --keep-last 1",
    "diff s3://bucket/c s3://bucket/d",
    "convert {}/one-whole s3://bucket/c --to pack",
)


@pytest.mark.multiprocess
def test_a_store_that_does_not_answer_is_reported_in_time_in_one_line(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "DIST_CKPT_"))]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "HOME": str(tmp_path),
            "DIST_CKPT_S3_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        began = time.monotonic()
        lines = [line.replace("{}", str(places)).split() for line in STORE_COMMANDS]
        running = [begun(*PROGRAM, *words, **variables) for words in lines]
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


def test_a_failure_is_one_line_and_a_traceback_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DIST_CKPT_DEBUG", raising=False)

    def fail(_name: str, _path: str) -> None:
        raise KeyError("w")

    with before_calls(fail, ["scandir"]):
        unexpected = run("inspect", tmp_path)
    quiet, by_option = (run("verify", "/nowhere/\x1b[1m\n", *flags) for flags in ((), ["--debug"]))
    monkeypatch.setenv("DIST_CKPT_DEBUG", "1")
    by_variable = run("verify", "/nowhere")

    assert unexpected.stderr == "error: unexpected KeyError: 'w' (--debug shows where)\n"
    assert quiet.stderr == "error: checkpoint directory /nowhere/\\x1b[1m\\n does not exist\n"
    assert "Traceback" in by_option.stderr
    assert "Traceback" in by_variable.stderr
    results = (unexpected, quiet, by_option, by_variable)
    assert [result.exit_code for result in results] == [3] * 4
