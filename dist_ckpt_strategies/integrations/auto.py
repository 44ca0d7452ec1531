"""Importing this is ``dist_ckpt_strategies.install()``, with its arguments from the environment.

For what imports a module by its name in each worker, such as verl's ``external_lib``, or calls a
function by its path: Ray's ``worker_process_setup_hook``, slime's ``--custom-megatron-init-path``.
The variables are DIST_CKPT_FORMAT, DIST_CKPT_ALLOW and those of Options; see docs/stacks.md.
"""

from typing import Any

from dist_ckpt_strategies.config import install_from_environment
from dist_ckpt_strategies.strategies.install import install

__all__ = ["hook"]


def hook(*_: Any) -> None:
    """Install once more; takes what a stack passes to a function of a user. Rank-local."""
    sharded_strategy, allow = install_from_environment()
    install(sharded_strategy=sharded_strategy, allow=allow)


hook()
