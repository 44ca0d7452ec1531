"""The pages: what they name is there, and figures are those of the code."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies import errors
from dist_ckpt_strategies.inprocess import attempt
from dist_ckpt_strategies.integrations import lightning_faults
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.pages import PAGES, ROOT, blocks_of, page_id, python_blocks

PACKAGE = Path(dist_ckpt_strategies.__file__).parent
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.CheckpointError)
}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_python_block_is_python(page: Path) -> None:
    for content in python_blocks(page):
        compile(content, str(page), "exec")


def anchors_of(page: Path) -> set[str]:
    """Of each heading, as GitHub and Sphinx make them."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", page.read_text())
    lost = [
        f"{name}#{anchor}"
        for name, anchor in targets
        if anchor not in anchors_of((page.parent / name) if name else page)
    ]

    assert lost == []


def links_of(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links_of(page) if not (page.parent / link).exists()] == []


def is_known_error(name: str) -> bool:
    plain = name.removeprefix("Peer")
    places = (builtins, lightning_faults)
    return name in ERRORS or plain in ERRORS or any(hasattr(place, name) for place in places)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
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


def test_every_error_is_explained_with_a_remedy() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)

    assert sorted(name for name, _, _ in rows) == sorted(ERRORS.keys() - {"CheckpointError"})
    assert [row for row in rows if not all(cell.strip() for cell in row)] == []


def test_every_public_name_of_the_package_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()

    assert [name for name in dist_ckpt_strategies.__all__ if name not in page] == []


@pytest.mark.parametrize("name", ["lightning", "nemo"])
def test_the_names_of_the_integrations_are_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    source = (PACKAGE / "integrations" / f"{name}.py").read_text()
    listed = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )

    assert [one for one in listed if f"`{one}`" not in page] == []


def test_the_time_limits_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    options, store = dist_ckpt_strategies.Options(), dist_ckpt_strategies.StoreOptions()
    of_recovery = inspect.signature(CheckpointManager).parameters["timeout_s"].default

    assert f"default of `timeout_s` in `Options` is {options.timeout_s:g} s" in page
    assert f"`timeout_s` of `StoreOptions`, {store.timeout_s:g} s" in page
    assert f"`timeout_s` of `CheckpointManager`, {of_recovery:g} s" in page
    assert f"`abort_timeout` of `HPWrapper`, {attempt.DEFAULT_ABORT_TIMEOUT_S:g} s" in page


def test_the_options_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
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
        "strict_dtype": str(int(defaults.strict_dtype)),
        "writer_process": str(int(defaults.writer_process)),
    }
