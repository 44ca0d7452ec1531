"""What the strategies of this package have in common: options, ranks, and classes of objects."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.types import allow_in_common_state, default_allowed


class Configured:
    """A strategy's options, the ranks that work together, the classes that objects may be of."""

    options: Options

    def _configure(
        self,
        options: Options | None,
        allow: Allowed,
        group: ProcessGroup | None = None,
        **changes: Any,
    ) -> None:
        self.options = (options or options_from_environment()).with_changes(**changes)
        self._allow = tuple(allow)
        self.group = group
        allow_in_common_state()

    @property
    def allowed(self) -> Allowed:
        """All classes that objects may be of; Megatron-Core's list may grow meanwhile."""
        return (*default_allowed(), *self._allow)

    def with_options(self, **changes: Any) -> Self:
        """The same strategy with some other options; None leaves one as it is. Caches are shared.

        Raises:
            StrategyError: an option is out of range.
        """
        other = copy(self)
        other.options = self.options.with_changes(**changes)
        return other

    @property
    def can_handle_sharded_objects(self) -> bool:
        """ShardedObjects are saved and loaded too."""
        return True

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """The ranks that work together, for one thing that they do."""
        return open_communicator(
            self.group, timeout_s=self.options.timeout_s, purpose=purpose, detail=detail
        )


def require_own(own: str, versions: Sequence[int], backend: str, version: int) -> None:
    """Raise IncompatibleVersionError unless backend and version are a strategy's own."""
    if backend != own or version not in versions:
        formats = " or ".join(str((own, number)) for number in versions)
        raise IncompatibleVersionError(
            f"expected backend {formats}, found ({backend!r}, {version!r}); use the "
            "strategy of that backend, of a two-stage load as its base_strategy"
        )
