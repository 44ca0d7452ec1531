"""Adapter to Megatron-Core, its only importer: types, save and load flow, registry."""

from importlib.util import find_spec

from megatron import core

from dist_ckpt_strategies.errors import MissingDependencyError

if find_spec("megatron.core.safe_globals") is None:
    raise MissingDependencyError(
        f"megatron-core {core.__version__} lacks what this package needs; install 0.16 or later"
    )
