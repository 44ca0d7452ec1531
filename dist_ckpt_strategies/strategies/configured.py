"""Options: what strategies hold, and what ``save`` and ``load`` make of theirs."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, Self

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import IncompatibleVersionError, StrategyError
from dist_ckpt_strategies.formats.locations import Location, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.types import default_allowed


class Configured:
    """A strategy's options, the ranks that work together, the classes that objects may be of."""

    def _configure(
        self,
        options: Options | None,
        allow: Allowed,
        group: ProcessGroup | None = None,
        **changes: Any,
    ) -> None:
        self._options = (options or options_from_environment()).with_changes(**changes)
        self._allow = tuple(allow)
        self._group = group

    @property
    def options(self) -> Options:
        """How saves or loads are carried out."""
        return self._options

    def with_options(self, **changes: Any) -> Self:
        """The same strategy with some other options; None leaves one as it is. Caches are shared.

        Raises:
            StrategyError: an option is out of range.
        """
        other = copy(self)
        other._options = self._options.with_changes(**changes)  # noqa: SLF001 - a copy
        return other

    def runs_in_world(self, options: Options) -> bool:
        """Whether it works with all ranks, and within the same time limit as ``options``."""
        return self._group is None and self._options.timeout_s == options.timeout_s

    def allowed(self) -> Allowed:
        """The classes that objects may be of."""
        return [*default_allowed(), *self._allow]

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are saved and loaded too."""
        return True

    def _communicator(self, purpose: str, detail: str = "") -> Communicator:
        return open_communicator(
            self._group, timeout_s=self._options.timeout_s, purpose=purpose, detail=detail
        )


def require_own(own: tuple[str, int], backend: str, version: int) -> None:
    """Raise IncompatibleVersionError unless backend and version are a strategy's own."""
    if (backend, version) != own:
        raise IncompatibleVersionError(f"expected backend {own}, found ({backend!r}, {version!r})")


def entry_options(timeout_s: float | None) -> Options:
    """The options of the environment with the caller's time limit, in seconds.

    Raises:
        StrategyError: one of them is invalid.
    """
    return options_from_environment().with_changes(timeout_s=timeout_s)


def open_world(purpose: str, detail: str, timeout_s: float | None) -> tuple[Communicator, float]:
    """All ranks, and the time limit; invalid options are reported by the first collective."""
    try:
        limit_s = entry_options(timeout_s).timeout_s
    except StrategyError:
        limit_s = Options().timeout_s
    return open_communicator(None, timeout_s=limit_s, purpose=purpose, detail=detail), limit_s


def location_for(strategy: Any, checkpoint_dir: str | Path, options: Options) -> Location:
    """Where the checkpoint is; requests to an object store use the options of an instance.

    The shorter of its time limit and that of ``options`` counts: peers wait there too.
    """
    inner = getattr(strategy, "base_strategy", strategy)
    chosen = getattr(inner, "options", None) or options
    limit_s = min(chosen.timeout_s, options.timeout_s)
    return located(checkpoint_dir, chosen.with_changes(timeout_s=limit_s))


def require_taken(root: Location, strategy: Any) -> None:
    """Raise if the strategy needs a directory, and this is a place in an object store."""
    inner = getattr(strategy, "base_strategy", strategy)
    if not getattr(inner, "takes_urls", False):
        require_path(root, getattr(inner, "format_name", type(inner).__name__))
