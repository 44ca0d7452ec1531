"""How the pages are built: ``sphinx-build -W -b html docs OUT``."""

import dist_ckpt_strategies

project = "dist_ckpt_strategies"
author = "the dist_ckpt_strategies authors"
project_copyright = author
version = release = dist_ckpt_strategies.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
