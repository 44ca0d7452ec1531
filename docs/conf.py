"""How the pages are built: ``sphinx-build -W -b html docs OUT``."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import dist_ckpt_strategies

project = "dist_ckpt_strategies"
author = "the dist_ckpt_strategies authors"
project_copyright = author
version = release = dist_ckpt_strategies.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"dist-ckpt-strategies {release}"
html_static_path = ["static"]
html_css_files = ["pages.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

PUBLIC_MODULES = (
    "",
    ".errors",
    ".inprocess",
    ".inprocess.train_utils",
    ".local",
    ".recovery",
    ".strategies.common",
    ".strategies.local_replicated",
    ".strategies.registry",
    ".strategies.zarr",
    ".strategies.tensorstore",
    ".strategies.two_stage",
)
"""Modules whose public names have to be in the reference; the integrations need libraries."""

NOT_OURS = {"StrategyAction"}
"""Megatron-Core's own where it has one; the reference says what is in it."""


def setup(app: Sphinx) -> None:
    """Let a public name that the reference leaves out be a warning, which -W makes an error."""
    app.connect("env-check-consistency", _require_complete_reference)


def _require_complete_reference(app: Sphinx, env: BuildEnvironment) -> None:  # noqa: ARG001 - theirs
    described = set(env.domaindata["py"]["objects"])
    logger = logging.getLogger(__name__)
    for name in PUBLIC_MODULES:
        module = import_module(f"dist_ckpt_strategies{name}")
        for public, found in _public_names(module):
            homes = (module.__name__, getattr(found, "__module__", ""), project)
            names = {public, getattr(found, "__name__", public)}  # a second name has no entry
            known = {f"{home}.{name}" for home in homes for name in names}
            if public not in NOT_OURS and not known & described:
                logger.warning("api.md: %s.%s is not in the reference", module.__name__, public)


def _public_names(module: Any) -> Iterator[tuple[str, Any]]:
    """What ``__all__`` lists; without it, public classes and functions that were made there."""
    if hasattr(module, "__all__"):
        yield from ((name, getattr(module, name)) for name in module.__all__)
        return
    for name, found in vars(module).items():
        is_ours = getattr(found, "__module__", None) == module.__name__
        if is_ours and callable(found) and not name.startswith("_"):
            yield name, found
