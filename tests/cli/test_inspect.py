"""``dist-ckpt inspect``: lists for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.cli.render import Row, Table, bytes_text, print_table, printable
from dist_ckpt_strategies.formats.issues import Issue, Problem, StaleFile, StaleKind
from tests.support.checkpoints import (
    ARRAYS,
    OBJECTS,
    RNG,
    WEIGHT,
    write_foreign_checkpoint,
)


def shown(*args: str | Path, status: int = 0) -> str:
    """What the command prints, and nothing on stderr."""
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    assert result.exit_code == status, result.output
    assert result.stderr == ""
    return result.stdout


def as_json(*args: str | Path, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*args, "--json", status=status))
    return found


def row(text: str, key: str) -> list[str]:
    """The facts that stand beside a key."""
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [key])
    return line.split()[1:]


def test_every_array_and_object_has_a_line(written: Path) -> None:
    arrays, objects, summary = shown(written).split("\n\n")

    assert row(arrays, "array") == ["shape", "dtype", "chunk", "files", "size"]
    assert row(arrays, WEIGHT) == ["4x6", "float32", "2x2", "6", "96", "B"]
    assert row(arrays, "scale") == ["scalar", "float64", "scalar", "1", "8", "B"]
    assert row(arrays, "unused") == ["0x4", "int64", "1x4", "0", "0", "B"]
    assert [line.split()[0] for line in arrays.splitlines()[1:]] == ARRAYS
    assert row(objects, RNG)[:2] == ["2x2", "4"]
    assert [line.split()[0] for line in objects.splitlines()[1:]] == OBJECTS
    assert "backend     zarr 1; common state: torch 1" in summary
    assert "arrays      4 in 10 files, 116 B" in summary
    assert "objects     2 in 5 files" in summary
    assert "complete    yes" in summary
    assert str(written) in summary


def test_keys_are_chosen_by_a_glob(written: Path) -> None:
    text = shown(written, "--keys", "*/bias")

    assert "model/layers/0/bias" in text
    assert WEIGHT not in text
    assert RNG not in text
    assert "arrays      4 in 10 files" in text


def test_objects_can_be_left_out(written: Path) -> None:
    text = shown(written, "--no-objects")

    assert RNG not in text
    assert WEIGHT in text
    assert "objects     2 in 5 files" in text


def test_a_glob_that_matches_nothing_is_an_error(written: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(written), "--keys", "encoder.*", "--json"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "none of its 6 keys matches 'encoder.*'" in result.stderr


def test_the_json_says_all_that_there_is(written: Path) -> None:
    found = as_json(written)

    assert found["schema"] == 1
    assert found["command"] == "inspect"
    assert found["path"] == str(written)
    assert found["complete"] is True
    assert found["marker"] == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert found["common"] == {
        "path": "common.pt",
        "nbytes": (written / "common.pt").stat().st_size,
    }
    assert (found["num_arrays"], found["num_objects"]) == (4, 2)
    files = [path for path in written.rglob("*") if path.is_file()]
    assert found["num_files"] == len(files)
    assert found["nbytes"] == sum(path.stat().st_size for path in files)
    assert found["leftovers"] == found["findings"] == []
    assert found["arrays"][0] == {
        "key": WEIGHT,
        "shape": [4, 6],
        "dtype": "float32",
        "chunk_shape": [2, 2],
        "separator": ".",
        "raw": True,
        "nbytes": 96,
        "num_chunks": 6,
        "num_chunks_expected": 6,
        "file_nbytes": 96,
    }
    assert found["objects"][1] == {
        "key": RNG,
        "shape": [2, 2],
        "num_shards": 4,
        "num_shards_expected": 4,
        "file_nbytes": sum(path.stat().st_size for path in (written / RNG).iterdir()),
    }
    assert len(found) == 14


def test_the_json_takes_the_same_choices_as_the_lists(written: Path) -> None:
    found = as_json(written, "--keys", "*_state", "--no-objects")

    assert found["arrays"] == found["objects"] == []
    assert found["num_objects"] == 2


def test_an_incomplete_checkpoint_is_shown_as_such(checkpoint: Path) -> None:
    (checkpoint / WEIGHT / "1.2").unlink()
    (checkpoint / RNG / "shard_0.0_2.2.pt").unlink()
    (checkpoint / "common.pt").unlink()
    (checkpoint / "metadata.json").unlink()

    text = shown(checkpoint, status=1)

    assert "5 of 6" in text
    assert "3 of 4" in text
    assert "backend     unknown" in text
    assert "common.pt   missing" in text
    assert "complete    NO, 4 issues; `dist-ckpt verify` lists them all" in text
    assert "metadata.json: expected the last file that a save writes, found no file" in text
    found = as_json(checkpoint, status=1)
    assert found["complete"] is False
    assert found["marker"] is None
    assert found["common"] is None
    assert [finding["problem"] for finding in found["findings"]] == [
        "missing_marker",
        "missing_file",
        "missing_file",
        "missing_file",
    ]


def test_remains_of_a_killed_save_are_mentioned(checkpoint: Path) -> None:
    (checkpoint / ".partial-0123").write_bytes(b"12")

    assert "left over   files that a save did not finish: 1 (harmless)" in shown(checkpoint)
    assert as_json(checkpoint)["leftovers"] == [
        {"kind": "partial", "path": ".partial-0123", "nbytes": 2}
    ]


def test_another_backend_is_described_by_its_marker(tmp_path: Path) -> None:
    root = write_foreign_checkpoint(tmp_path / "ckpt")

    text = shown(root, status=3)

    assert "backend     torch_dist 1; common state: torch 1" in text
    assert "in all      5 files" in text
    assert "complete    not known; dist-ckpt looks into zarr 1 and zarr 2 only" in text
    found = as_json(root, status=3)
    assert found["complete"] is None
    assert found["marker"]["sharded_backend"] == "torch_dist"
    assert [finding["problem"] for finding in found["findings"]] == ["unknown_backend"]


def test_no_name_steers_the_terminal_or_is_taken_for_markup(checkpoint: Path) -> None:
    (checkpoint / WEIGHT).rename(checkpoint / "a\x1b[31m[red]b\nc")

    assert "a\\x1b[31m[red]b\\nc" in shown(checkpoint)
    assert "a\x1b[31m[red]b\nc" in {array["key"] for array in as_json(checkpoint)["arrays"]}


def test_a_wide_terminal_shows_one_line_for_each_name() -> None:
    lines = listed(width=20, is_terminal=True)

    assert lines == ["key   shape  files", "a     1x2        1", "bb.c  3          9"]


def test_a_narrow_terminal_shows_each_name_on_a_line_of_its_own() -> None:
    lines = listed(width=17, is_terminal=True)

    assert lines == [
        "key",
        "    shape  files",
        "a",
        "    1x2        1",
        "bb.c",
        "    3          9",
    ]


def test_without_a_terminal_no_line_is_broken() -> None:
    assert listed(width=5, is_terminal=False) == listed(width=80, is_terminal=True)


def listed(*, width: int, is_terminal: bool) -> list[str]:
    console = Console(width=width, force_terminal=is_terminal, color_system=None, record=True)
    titles = Row("key", ("shape", "files"))
    rows = (Row("a", ("1x2", "1")), Row("bb.c", ("3", "9"), is_marked=True))
    with console.capture() as captured:
        print_table(console, Table(titles, rows, right=("files",)))
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (38_123_456, "38.1 MB"),
        (2_500_000_000_000, "2.50 TB"),
        (10**19, "10000 PB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_printable_text_stays_as_it_is() -> None:
    assert printable("décoder/层 [x] \\n") == "décoder/层 [x] \\n"
    assert printable("\t\udcff") == "\\t\\udcff"


def test_every_field_and_value_of_the_json_is_documented(written: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    found = as_json(written)
    fields = {*found, *found["arrays"][0], *found["objects"][0], *found["common"]}
    fields |= {field.name for field in dataclasses.fields(Issue)}
    fields |= {field.name for field in dataclasses.fields(StaleFile)}

    names = (*fields, *Problem, *StaleKind)
    assert [name for name in names if f"`{name}`" not in page] == []
