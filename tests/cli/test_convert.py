"""``dist-ckpt convert``, ``upgrade`` and ``diff``: what they print, and their exit status."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from tests.cli.commands import json_of, run
from tests.support.checkpoints import (
    EMPTY,
    NESTED,
    RNG,
    SCALAR,
    WEIGHT,
    random_values,
    write_array,
    write_marker,
    write_object,
)
from tests.support.processes import finished


def test_a_checkpoint_is_converted_and_equal(written: Path, tmp_path: Path) -> None:
    result = run("convert", written, tmp_path / "c", "--to", "pack")
    found = json_of("convert", written, tmp_path / "d", "--to", "zarr@1", "--memory", "1")

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'c'}\n4 arrays with 114 B, 5 object shards; ")
    assert result.stderr == ""
    assert found.pop("seconds") > 0
    assert found == {
        "schema": 3,
        "command": "convert",
        "source": str(written),
        "target": str(tmp_path / "d"),
        "num_arrays": 4,
        "num_objects": 5,
        "nbytes": 114,
        "missing": [],
    }
    compared = run("diff", written, tmp_path / "c")
    assert compared.exit_code == 0
    assert compared.stdout == (
        f"{written} and {tmp_path / 'c'} are equal\n"
        "compared: 4 arrays with 114 B, 5 object shards\n"
    )


COMMANDS = """
import sys
from typer.testing import CliRunner
from dist_ckpt_strategies.cli.app import app
for args in sys.argv[1:]:
    done = CliRunner().invoke(app, args.split(","))
    assert done.exit_code == 0, done.output
"""


def test_conversions_need_no_megatron_and_only_torch_dist_needs_torch(
    written: Path, tmp_path: Path
) -> None:
    for module in ("torch", "megatron"):
        (tmp_path / f"no {module}" / module).mkdir(parents=True)
        (tmp_path / f"no {module}" / module / "__init__.py").write_text("raise ImportError('no')")

    for without, options in (
        (("no megatron", "no torch"), ("convert,--to,pack", "convert,--to,zarr@3", "copy")),
        (("no megatron",), ("convert,--to,torch_dist",)),
    ):
        targets = [tmp_path / command.rpartition(",")[2] for command in options]
        commands = [f"{c},{written},{t}" for c, t in zip(options, targets, strict=True)]
        path = os.pathsep.join([*(str(tmp_path / n) for n in without), os.environ["PYTHONPATH"]])
        finished(sys.executable, "-c", COMMANDS, *commands, variables={"PYTHONPATH": path})
        assert [run("diff", written, target).exit_code for target in targets] == [0] * len(targets)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_files_of_safetensors_are_no_damaged_checkpoint(
    written: Path, tmp_path: Path, command: str
) -> None:
    run("convert", written, tmp_path / "model", "--to", "safetensors")

    found = run(command, tmp_path / "model")

    assert (found.exit_code, found.stdout) == (3, "")
    assert found.stderr.startswith(f"error: {tmp_path}/model is no checkpoint: it holds files of ")
    assert "the library safetensors reads them" in found.stderr
    with pytest.raises(IncompleteCheckpointError, match="it holds files of safetensors"):
        dist_ckpt_strategies.load({}, tmp_path / "model")


def rewrite(root: Path, key: str, values: Any, chunk: tuple[int, ...] | None = None) -> None:
    for path in (root / key).glob("[0-9]*"):
        path.unlink()
    write_array(root, values, key=key, chunk=chunk)


def change_values(root: Path) -> None:
    values = random_values((4, 6), DType.FLOAT32)
    values[2, 3] = 1.5
    rewrite(root, WEIGHT, values, (2, 2))


def change_common(root: Path) -> None:
    write_object(root / "common.pt", {"iteration": 8, "new": 1})


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (change_values, f"{WEIGHT}: 1 element differs, the first at [2, 3]: "),
    (
        lambda root: rewrite(root, NESTED, np.zeros(6, np.float32)),
        f"{NESTED}: shape (5,) and (6,)\n",
    ),
    (
        lambda root: rewrite(root, SCALAR, np.array(3.0, np.float32)),
        f"{SCALAR}: dtype float64 and float32\n",
    ),
    (lambda root: (root / EMPTY / ".zarray").unlink(), f"{EMPTY}: only in the first\n"),
    (
        lambda root: write_object(root / RNG / "shard_0.1_2.2.pt", {"state": [0, 1, 2, 99]}),
        f"{RNG}/shard_0.1_2.2: ['state']: 9 elements and 4 elements\n",
    ),
    (
        lambda root: (root / RNG / "shard_1.1_2.2.pt").unlink(),
        f"{RNG}/shard_1.1_2.2: only in the first\n",
    ),
    (change_common, "common.pt: ['iteration']: 7 and 8\ncommon.pt: ['new']: nothing and 1\n"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_each_difference_is_reported_and_ends_with_status_1(
    written: Path, checkpoint: Path, change: Callable[[Path], None], text: str
) -> None:
    change(checkpoint)

    result = run("diff", written, checkpoint)

    assert result.exit_code == 1, result.stderr
    assert text in result.stdout
    assert f"{written} and {checkpoint} DIFFER\n" in result.stdout
    assert json_of("diff", written, checkpoint, code=1)["equal"] is False


LARGE = 2**62


@pytest.mark.parametrize(
    ("one", "two", "first", "num_differing", "largest"),
    [
        (np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.5, 9.0]), [1], 2, 4.0),
        (np.array([math.nan, 1.0]), np.array([0.0, 1.0]), [0], 1, None),
        (np.array([0.0]), np.array([-0.0]), [0], 1, 0.0),
        (np.array([math.inf]), np.array([1.0]), [0], 1, "inf"),
        (np.array([LARGE]), np.array([LARGE + 1]), [0], 1, 1.0),
        (np.array([200], np.uint8), np.array([10], np.uint8), [0], 1, 190.0),
        (np.array([True, False]), np.array([True, True]), [1], 1, 1.0),
        (np.array([3 + 4j]), np.array([0j]), [0], 1, 5.0),
    ],
    ids=str,
)
def test_values_are_compared_to_the_bit_and_measured(
    tmp_path: Path, one: Any, two: Any, first: list[int], num_differing: int, largest: Any
) -> None:
    for name, values in (("one", one), ("two", two)):
        write_array(tmp_path / name, values, key="v", chunk=(3,))
        write_marker(tmp_path / name, "zarr")

    places = (tmp_path / "one", tmp_path / "two")
    (found,) = json_of("diff", *places, "--keys", "v", code=1)["arrays"]

    assert (found["index"], found["num_differing"]) == (first, num_differing)
    assert found["max_abs_difference"] == largest
    assert (found["max_index"] is None) == (largest is None)
    assert (found["a"], found["b"]) == (str(one[first[0]]), str(two[first[0]]))


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (np.arange(10.0), np.arange(10, dtype=np.float32), None),
        (
            np.array([[1.0, 2.0, 3.0], [math.nan, 7.0, 6.0]]),
            np.array([[1, 5, 3], [4, 6, 60]], np.int32),
            ([0, 1], 4, 54.0, [1, 2]),
        ),
        (np.array([0]), np.array([0.0]), None),
        (np.array([LARGE + 1]), np.array([1], np.int32), ([0], 1, float(LARGE), [0])),
    ],
    ids=["equal", "numbers", "same bits", "large"],
)
def test_arrays_of_different_dtypes_are_compared_as_numbers_if_asked(
    tmp_path: Path, one: Any, two: Any, expected: Any
) -> None:
    for name, values in (("one", one), ("two", two)):
        write_array(tmp_path / name, values, key="v", chunk=(2,) * values.ndim)
        write_marker(tmp_path / name, "zarr")
    places = (tmp_path / "one", tmp_path / "two", "--keys", "v")

    (dtypes,) = json_of("diff", *places, code=1)["arrays"]
    found = json_of("diff", *places, "--values", code=1)["arrays"]

    assert (dtypes["difference"], found[0]["difference"]) == ("dtype", "dtype")
    assert len(found) == 1 + (expected is not None)
    names = "index", "num_differing", "max_abs_difference", "max_index"
    for values in found[1:]:
        assert tuple(values[name] for name in names) == expected
        assert f"{expected[2]:g} at {expected[3]}" in run("diff", *places, "--values").stdout
