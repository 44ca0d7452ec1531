"""The pages: their code runs, and what they name is there."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies import errors
from dist_ckpt_strategies.plan import chunking
from dist_ckpt_strategies.storage import bucket_arrays, buckets
from tests.support.pythons import Python

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dist_ckpt_strategies.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.CheckpointError)
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BETWEEN = "--- next block ---"

_WORLD_OF_ONE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

_README_BEFORE = f"""
{_WORLD_OF_ONE}
from pathlib import Path
from megatron.core.dist_checkpointing import ShardedTensor
weight = torch.arange(6.0)
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets("w", weight), "iteration": 7}}
checkpoint_dir = "ckpt"
Path(checkpoint_dir).mkdir()
"""

_README_AFTER = """
assert state_dict.keys() == {"w", "iteration"}, state_dict
assert torch.equal(state_dict["w"], torch.arange(6.0)), state_dict
"""

_FORMAT_BEFORE = f"""
{_WORLD_OF_ONE}
from pathlib import Path
import dist_ckpt_strategies
from dist_ckpt_strategies.storage.zarr_dtypes import register_extension_dtypes
from megatron.core.dist_checkpointing import ShardedTensor
register_extension_dtypes()
weight = torch.arange(32.0, dtype=torch.bfloat16).reshape(4, 8)
state = {{"w": ShardedTensor.from_rank_offsets("w", weight)}}
dist_ckpt_strategies.save(state, "ckpt", ("zarr", 1))
array_directory = Path("ckpt/w")
"""

_FORMAT_AFTER = """
assert (whole == weight.float().numpy()).all() and (chunk == whole).all() and part.shape == (2, 8)
"""

_STORES_BEFORE = f"""
{_WORLD_OF_ONE}
import atexit, os
from tests.support.object_stores import Moto, free_port
server = Moto(free_port())
atexit.register(server.kill)
server.store.make_bucket("checkpoints")
os.environ.update(server.store.variables)
"""

_LOCAL_BEFORE = f"""
{_WORLD_OF_ONE}
from pathlib import Path
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from megatron.core.dist_checkpointing import ShardedTensor
model, iteration = torch.nn.Linear(3, 2), 100
earlier = {{name: torch.full_like(value, 7) for name, value in model.state_dict().items()}}
LocalCheckpointManager("local/checkpoints", "run-7").save(
    BasicTensorAwareStateDict({{"model": earlier}}), 99
)
weight = torch.arange(6.0)
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets("w", weight), "iteration": 7}}
Path("local/checkpoints/iter_0000100").mkdir()
"""

_LOCAL_AFTER = """
assert all(bool((value == 7).all()) for value in model.state_dict().values())
assert (part_id[:15], manager.find_latest()) == ("iter_0000099_0_", 100)
assert torch.equal(state_dict["w"], torch.arange(6.0)) and state_dict["iteration"] == 7
"""

_FORMAT2_BEFORE = f"""
{_WORLD_OF_ONE}
from megatron.core.dist_checkpointing import ShardedTensor
weight = torch.arange(32.0).reshape(4, 8)
name = "decoder.final_layernorm.weight"
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets(name, weight)}}
checkpoint_dir = "iter_0000999"
"""

_FORMAT2_AFTER = """
assert torch.equal(state_dict["w"], weight)
assert (array.read().result() == weight.numpy()).all()
"""

_CONVERT_BEFORE = f"""
{_WORLD_OF_ONE}
import dist_ckpt_strategies
from megatron.core.dist_checkpointing import ShardedTensor
weight = ShardedTensor.from_rank_offsets("w", torch.arange(6.0))
dist_ckpt_strategies.save({{"w": weight}}, "old", ("zarr", 1))
"""

SCRIPTS = {
    "README.md": (_README_BEFORE, _README_AFTER),
    "docs/quickstart.md": ("", ""),
    "docs/errors.md": ("", ""),
    "docs/stores.md": (_STORES_BEFORE, "server.kill()"),
    "docs/convert.md": (_CONVERT_BEFORE, ""),
    "docs/format.md": (_FORMAT_BEFORE, _FORMAT_AFTER),
    "docs/format2.md": (_FORMAT2_BEFORE, _FORMAT2_AFTER),
    "docs/local.md": (_LOCAL_BEFORE, _LOCAL_AFTER),
}

CHANGES = {
    "docs/format2.md": {
        '"iter_0001000/': '"iter_0000999/',
        "save_async(sharded_state_dict, checkpoint_dir": "save_async(sharded_state_dict, 'later'",
    },
    "docs/local.md": {
        '"/local/': '"local/',
        '"/shared/': '"shared/',
        "replication_jump=8, replication_factor=2": "replication_jump=1, replication_factor=1",
    },
}
"""What one process has not: other nodes, and their directories."""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return _FENCE.findall(page.read_text())


def python_blocks(page: Path) -> list[str]:
    return [content for language, content in blocks_of(page) if language == "python"]


def expected_outputs(page: Path) -> list[str | None]:
    """For each python block the text block right behind it, which is what it prints."""
    found: list[str | None] = []
    text = page.read_text()
    for match in _FENCE.finditer(text):
        if match[1] != "python":
            continue
        follower = re.match(
            r"\n\n```text\n(.*?)^```$", text[match.end() :], re.MULTILINE | re.DOTALL
        )
        found.append(follower[1] if follower else None)
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(
    name: str, plain_python: Python, tmp_path: Path
) -> None:
    page = ROOT / name
    before, after = SCRIPTS[name]
    script = tmp_path / "page.py"
    parts = [before, *python_blocks(page), after]
    code = f"\nprint({_BETWEEN!r})\n".join(parts)
    for old, new in CHANGES.get(name, {}).items():
        assert old in code
        code = code.replace(old, new)
    script.write_text(code)

    done = plain_python.run(script)

    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{_BETWEEN}\n")[1:-1]
    expected = expected_outputs(page)
    assert len(printed) == len(expected)
    assert [p for p, e in zip(printed, expected, strict=True) if e is not None] == [
        e for e in expected if e is not None
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_python(page: Path) -> None:
    for content in python_blocks(page):
        compile(content, str(page), "exec")


def test_the_readme_takes_five_lines_to_adopt_it() -> None:
    (block,) = python_blocks(ROOT / "README.md")

    assert len([line for line in block.splitlines() if line]) == 5


def commands_of_the_readme() -> list[str]:
    return [text.strip() for language, text in blocks_of(ROOT / "README.md") if language == "bash"]


def test_the_readme_has_two_commands_of_one_line_each() -> None:
    demo, tests = commands_of_the_readme()

    assert demo.endswith(".venv/bin/dist-ckpt demo")
    assert tests.endswith(".venv/bin/tox")
    assert "\n" not in demo + tests


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert commands_of_the_readme()[1] in (ROOT / ".ci" / "run").read_text()


def links_of(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links_of(page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    ours = [path for path in named if not path.startswith("megatron/training/")]

    assert [p for p in ours if not ((PACKAGE / p).exists() or (ROOT / p).exists())] == []


def is_known_error(name: str) -> bool:
    plain = name.removeprefix("Peer")
    return name in ERRORS or plain in ERRORS or hasattr(builtins, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_an_error_that_does_not_exist(page: Path) -> None:
    named = set(re.findall(r"\b[A-Z]\w*Error\b", page.read_text()))

    assert {name for name in named if not is_known_error(name)} == set()


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Of the tree on the page of errors: each class with its parent and the builtin beside it."""
    drawing = next(text for language, text in blocks_of(ROOT / "docs" / "errors.md") if language)
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in drawing.splitlines():
        match = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        assert match, line
        depth = len(match[1]) // 4
        above[depth:] = [match[2]]
        found[match[2]] = (above[depth - 1] if depth else None, match[3])
    return found


def test_the_tree_of_errors_is_the_one_in_the_code() -> None:
    tree = {
        name: (
            next((base.__name__ for base in kind.__bases__ if base.__name__ in ERRORS), None),
            next(
                (
                    b.__name__
                    for b in kind.__bases__
                    if b is not Exception and hasattr(builtins, b.__name__)
                ),
                None,
            ),
        )
        for name, kind in ERRORS.items()
    }

    assert drawn_tree() == tree


def test_every_error_is_explained() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    explained = page[page.index("## What each means") :]

    assert [
        name for name in ERRORS if f"`{name}`" not in explained and name != "CheckpointError"
    ] == []


def test_every_public_name_of_the_package_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()

    assert [name for name in dist_ckpt_strategies.__all__ if name not in page] == []


def test_the_figures_of_object_stores_are_those_of_the_code() -> None:
    page = " ".join((ROOT / "docs" / "stores.md").read_text().split())
    options = dist_ckpt_strategies.StoreOptions()

    assert f"one object of {chunking.MAX_OBJECT_NBYTES >> 20} MiB at most" in page
    assert f"requests of {bucket_arrays.REQUEST_NBYTES >> 20} MiB" in page
    assert f"at most {buckets.MAX_REQUESTS} requests" in page
    assert f"`DIST_CKPT_STORE_TIMEOUT_S` | {options.timeout_s:g} |" in page
    assert f"`DIST_CKPT_STORE_MAX_RETRIES` | {options.max_retries} |" in page


def test_the_figures_of_the_chunk_grid_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "format.md").read_text()

    assert f"{chunking.FILE_COST_NBYTES >> 10} KiB" in page
    assert f"{chunking.MAX_ASSEMBLED_NBYTES >> 20} MiB" in page


def test_the_options_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    defaults = dist_ckpt_strategies.Options()
    rows = re.findall(r"^\| `(\w+)` \| `DIST_CKPT_(\w+)` \| ([^|]+) \|", page, re.MULTILINE)

    assert [name.upper() for name, _, _ in rows] == [variable for _, variable, _ in rows]
    assert {name: shown.strip(" `") for name, _, shown in rows} == {
        "timeout_s": f"{defaults.timeout_s:g}",
        "max_inflight_bytes": f"{defaults.max_inflight_bytes >> 20} MiB",
        "io_threads": str(defaults.io_threads),
        "direct_io": str(int(defaults.direct_io)),
        "whole_flush": str(int(defaults.whole_flush)),
        "engine": defaults.engine,
        "verify": defaults.verify,
        "crc32c": str(int(defaults.crc32c)),
        "writer_process": str(int(defaults.writer_process)),
    }
