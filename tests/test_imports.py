"""Which files of the package import each other; the layers of folders are in ``setup.cfg``."""

import ast
from pathlib import Path

import pytest

PACKAGE = "dist_ckpt_strategies"
ROOT = Path(__file__).resolve().parents[1]


def imported_by(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports anywhere: within functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules


@pytest.mark.slow
def test_no_two_files_import_each_other() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / PACKAGE).rglob("*.py")
    }
    imports = {module: imported_by(path, set(paths)) for module, path in paths.items()}
    assert len(paths) > 100
    assert not [(a, b) for a in imports for b in imports[a] if a != b and a in imports[b]]
