"""The pages: links, errors, commands, options, variables and quoted texts are those that exist."""

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from megatron.core.dist_checkpointing import mapping, validation
from megatron.core.dist_checkpointing.strategies import base

import dist_ckpt_strategies
from dist_ckpt_strategies import Options, config, errors
from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.inprocess import launch
from tests.support.pages import PAGES, ROOT, blocks_of

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors_of(page: Path) -> set[str]:
    """Of each heading, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", outside_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def outside_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors_of(target), link


def test_every_error_is_explained_with_a_remedy() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, errors.CheckpointError)}

    assert sorted(name for name, _, _ in rows) == sorted(names - {"CheckpointError"})
    assert [row for row in rows if not all(cell.strip() for cell in row)] == []


# Commands and variables

GROUP: Any = typer.main.get_command(app)
SEPARATORS = {"&&", "||", "|", ";"}


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words behind ``dist-ckpt``, of every command that a page shows."""
    lines = [
        line
        for language, content in blocks_of(page)
        if language == "bash"
        for line in content.replace("\\\n", " ").splitlines()
    ]
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", outside_blocks(page))]
    for line in [*lines, *(span for span in spans if span.startswith("dist-ckpt "))]:
        words = shlex.split(line, comments=True)
        for at, word in enumerate(words):
            if word.rpartition("/")[2] == "dist-ckpt":
                end = next((n for n in range(at, len(words)) if words[n] in SEPARATORS), None)
                yield words[at + 1 : end]


def options_of(command: Any) -> set[str]:
    context = command.make_context(command.name, [], resilient_parsing=True)
    return {
        name
        for found in command.get_params(context)
        for name in (*found.opts, *found.secondary_opts)
    }


def unknown_in(words: list[str]) -> set[str]:
    """The command, or those of its options, that do not exist."""
    name, *rest = words
    if not name.startswith("-") and name not in GROUP.commands:
        return {name}
    if name == "run":  # what follows the script is the script's
        rest = [*takewhile(lambda word: not word.endswith(".py"), rest)]
    options = {word.partition("=")[0] for word in (name, *rest) if word.startswith("-")}
    return options - options_of(GROUP.commands.get(name, GROUP))


@each_page
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    found = {" ".join(words): unknown_in(words) for words in shown_commands(page) if words}

    assert {text: names for text, names in found.items() if names} == {}


def test_the_page_of_all_commands_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "commands.py"))

    assert (ROOT / "docs" / "commands.md").read_text() == generator["build_page"]()


def known_variables() -> set[str]:
    """Every variable of ours that the package reads."""
    source = "".join(Path(str(module.__file__)).read_text() for module in (config, launch))
    named = re.findall(r'"(DIST_CKPT_\w+)"', source)
    made = [f"DIST_CKPT_{name}" for name in re.findall(r'_PREFIX \+ "(\w+)"', source)]
    of_options = {f"DIST_CKPT_{one.name.upper()}" for one in fields(Options)}
    return {*named, *made, *of_options} - {"DIST_CKPT_STORE"}


def variables_of(page: Path) -> set[str]:
    return set(re.findall(r"DIST_CKPT_[A-Z0-9_]*[A-Z0-9]", page.read_text()))


@each_page
def test_the_variables_of_a_page_are_read(page: Path) -> None:
    assert variables_of(page) <= known_variables()


def test_the_page_of_tuning_lists_every_variable() -> None:
    assert variables_of(ROOT / "docs" / "tuning.md") == known_variables()


# Texts that the runbook quotes


def texts_of(path: Path) -> set[str]:
    """Every text of a source file, with ``…`` for what is filled in."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            found.add("".join(map(str, parts)))
    return found


@pytest.mark.slow
def test_the_texts_that_the_runbook_quotes_are_those_of_the_code() -> None:
    package = Path(dist_ckpt_strategies.__file__).parent
    megatrons = [Path(str(module.__file__)) for module in (mapping, validation, base)]
    known = {text for path in [*package.rglob("*.py"), *megatrons] for text in texts_of(path)}
    page = (ROOT / "docs" / "operations.md").read_text()
    cells = [cell.strip() for line in page.splitlines() for cell in line.split("|")[1:3]]
    quoted = [cell[1:-1] for cell in cells if re.fullmatch(r"`[^`]+`", cell)]
    others = ("dist-ckpt", "--", "py-spy", "complete ", "rank ")
    texts = {text for text in quoted if " " in text and not text.startswith(others)}

    assert texts
    assert {text for text in texts if not any(text in one for one in known)} == set()
