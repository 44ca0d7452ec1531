"""Common parts of this package's strategies: formats, options, ranks, allowed classes."""

from collections.abc import Callable
from copy import copy
from typing import Any, ClassVar, Self, TypeVar

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.formats.locations import FORMAT2, FORMAT2_REFUSED
from dist_ckpt_strategies.formats.objects import Allowed, default_allowed
from dist_ckpt_strategies.megatron.types import allow_in_common_state, raises_megatron_errors
from dist_ckpt_strategies.storage.io_pool import Deadline, run_within

T = TypeVar("T")


class Configured:
    """A strategy's options, the ranks that work together, the classes that objects may be of."""

    formats: ClassVar[tuple[tuple[str, int], ...]]
    """The format that it saves, or those that it reads: the directory says which."""

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
        allow_in_common_state(default_allowed())

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

    def within(self, share: float, path: object, step: Callable[[], T]) -> T:
        """The result of a step on storage, within a share of the time limit. Rank-local."""
        return run_within(Deadline.after(share * self.options.timeout_s), path, step)

    @raises_megatron_errors
    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise IncompatibleVersionError unless the backend is one that it reads.

        Args:
            loaded_version: the backend's name; Megatron-Core 0.15 called it so.
        """
        versions = dict(self.formats)
        backend = loaded_version if loaded_version in versions else self.formats[0][0]
        self._require_own(backend, versions[backend], loaded_version, versions[backend])

    @raises_megatron_errors
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise IncompatibleVersionError unless it reads that version."""
        backend, version = self.formats[0]
        if (backend, loaded_version) == FORMAT2:
            raise IncompatibleVersionError(f"the checkpoint {FORMAT2_REFUSED}")
        self._require_own(backend, version, backend, loaded_version)

    @staticmethod
    def _require_own(name: str, number: int, backend: str, version: int) -> None:
        if (backend, version) != (name, number):
            raise IncompatibleVersionError(
                f"expected backend {(name, number)}, found ({backend!r}, {version!r}); use the "
                "strategy of that backend, of a two-stage load as its base_strategy, or convert it "
                "with dist-ckpt convert"
            )


class ConfiguredSaver(Configured):
    """A strategy that saves one format.

    Args:
        backend: that of the format.
        version: that of the format.
        group: ranks that save together; the world by default.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that objects may be of; a load has to allow them too.
    """

    @raises_megatron_errors
    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        group: ProcessGroup | None = None,
        options: Options | None = None,
        allow: Allowed = (),
    ) -> None:
        ((name, number),) = self.formats
        given = name if backend is None else backend, number if version is None else version
        self._require_own(name, number, *given)
        super().__init__(*given)  # type: ignore[call-arg]
        self._configure(options, allow, group)
