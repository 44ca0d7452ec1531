"""Every exception this package raises on purpose."""

import difflib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CheckpointError(Exception):
    """Base of all deliberate failures.

    Attributes:
        key: the array or object at fault, where there is one.
        path: the file or directory at fault, where there is one.
        global_rank: the rank on which it happened, once a collective has reported it.
    """

    def __init__(self, message: str, *, key: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.path = path
        self.global_rank: int | None = None

    @property
    def message(self) -> str:
        """The text without the rank."""
        return str(self.args[0])

    def at_rank(self, global_rank: int) -> Self:
        """Name the rank on which this error happened; returns the error itself."""
        self.global_rank = global_rank
        return self

    def __str__(self) -> str:
        """The message, led by the rank where it is known."""
        if self.global_rank is None:
            return self.message
        return f"rank {self.global_rank}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle: also the classes that ``joint_class`` makes, which no module holds."""
        classes = vars(type(self)).get("joins", (type(self),))
        return built_error, (type(self).__name__, classes, self.args, self.state)

    @property
    def state(self) -> dict[str, Any]:
        """All its fields; an ImportError keeps ``path`` elsewhere than others."""
        return {**self.__dict__, "path": self.path}


@lru_cache(maxsize=64)
def joint_class(name: str, bases: tuple[type, ...]) -> Any:
    """A class of errors that is each of the bases, the first of them one of ours."""
    importable = tuple(one for base in bases for one in vars(base).get("joins", (base,)))
    return type(name, bases, {"__module__": __name__, "joins": importable})


def built_error(
    name: str, classes: tuple[Any, ...], args: tuple[Any, ...], state: dict[str, Any]
) -> Any:
    """An error that is each of the classes, with these fields, whatever they take when called.

    Raises a TypeError if no class can be all of them.
    """
    cls = classes[0] if len(classes) == 1 else joint_class(name, classes)
    error = cls.__new__(cls, *args)
    error.args = args
    for field, value in state.items():
        setattr(error, field, value)
    return error


class PlanError(CheckpointError, ValueError):
    """The shards cannot be turned into a consistent plan, or differ from what is stored."""


class CoverageError(PlanError):
    """The main replicas do not hold each element and object exactly once."""


class StrategyError(CheckpointError):
    """The strategy does not support the request."""


class IncompatibleVersionError(StrategyError):
    """A strategy was asked to read a backend or version that it does not know."""


class StorageError(CheckpointError):
    """The checkpoint on disk cannot be read or written."""


class ArrayNotFoundError(StorageError, FileNotFoundError, KeyError):
    """The checkpoint holds no array or object of that key."""


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """There is no checkpoint at this path or URL."""


class CheckpointExistsError(StorageError, FileExistsError):
    """The directory already holds a finished checkpoint."""


class IncompleteCheckpointError(StorageError):
    """The checkpoint was never finished, or a file of it is missing."""


class CheckpointChangedError(StorageError):
    """Another job saves here too: it replaces what is read, or has the lock of the place."""


class CorruptCheckpointError(StorageError):
    """The checkpoint holds something other than what was written."""


class StoreAccessError(StorageError, PermissionError):
    """The object store refuses these credentials, or has no bucket of that name."""


class StorageTimeoutError(StorageError, TimeoutError):
    """Storage did not answer in time; an object store also if it answers only with errors.

    After a load that raises this, a read that was given up may still write to the tensors.
    """


class UnsafeObjectError(StorageError):
    """An object needs a class that is not on the list of classes allowed to be unpickled."""


class PeerError(CheckpointError):
    """Another rank of the same group failed.

    Attributes:
        rank: global rank of the peer, None where it is unknown.
    """

    def __init__(
        self,
        rank: int | None,
        reason: str,
        *,
        key: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(reason, key=key, path=path)
        self.rank = rank
        self.global_rank = rank


class PeerTimeoutError(PeerError, TimeoutError):
    """Another rank did not answer in time."""


class PeerLostError(PeerError, RuntimeError):
    """The connection to another rank broke, or was ended because a rank has failed."""


class NoReplicasAvailableError(PeerError):
    """No surviving rank holds a copy of a shard."""


class RestartError(CheckpointError):
    """Training cannot be restarted in place, or not by this process."""


class MissingDependencyError(CheckpointError, ImportError):
    """An optional package is needed; the message says which one to install."""


def text_of(error: BaseException) -> str:
    """The text of an error, even if its ``str`` raises."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - whatever a foreign ``__str__`` raises
        return f"its text cannot be had, {type(failure).__name__} was raised instead"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first of the names for a message; ``...`` stands for the others."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def similar_text(name: str, names: Sequence[str]) -> str:
    """The end of a message about an unknown name: similar names, if any."""
    near = difflib.get_close_matches(name, names, n=3)
    return f"; similar ones: {', '.join(near)}" if near else ""


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """The error itself if it is one of ours; else one of ours, of its class too where that can be.

    So ``except CheckpointError`` takes the same branch on the rank that met, say, a MemoryError as
    on the others. What the system says of a file is a StorageError.
    """
    if isinstance(error, CheckpointError):
        return error
    ours: Any = CheckpointError
    path, text = None, text_of(error)
    if isinstance(error, OSError) and error.filename is not None:
        ours, path = StorageError, str(error.filename)
        text = f"{path}: {error.strerror}"
    message = f"{type(error).__name__}: {text}"
    state = {"key": None, "path": path, "global_rank": None}
    converted: CheckpointError
    try:
        converted = built_error(type(error).__name__, (ours, type(error)), (message,), state)
    except TypeError:  # no class can be both, as with MemoryError
        converted = built_error("", (ours,), (message,), state)
    converted.__cause__ = error
    return converted


def _public_class(name: str) -> type[CheckpointError] | None:
    """The class of that name in this module."""
    value = globals().get(name)
    is_one = isinstance(value, type) and issubclass(value, CheckpointError)
    return value if is_one else None


def error_from_peer(global_rank: int, kind: str, reason: str, **place: str | None) -> PeerError:
    """Build the error that the healthy ranks raise when ``global_rank`` failed.

    It is a PeerError and also an instance of the class that the failed rank raised, so that
    ``except IncompleteCheckpointError`` takes the same branch on every rank. ``kind`` is the name
    of that class; one that this package does not know yields a plain PeerError. ``place`` are
    ``key`` and ``path``.
    """
    cause = _public_class(kind) or PeerError
    if issubclass(cause, PeerError):
        return cause(global_rank, reason, **place)
    error: PeerError = joint_class(f"Peer{kind}", (PeerError, cause))(global_rank, reason, **place)
    return error


def kind_of(error: CheckpointError) -> str:
    """The class by which a handler chooses; ``error_from_peer`` makes an error of the same class.

    Classes that an adapter made come down to ours, and what a peer reported to what it reported.
    """
    public = [cls for cls in type(error).__mro__ if _public_class(cls.__name__) is cls]
    reported = [cls for cls in public if cls not in {PeerError, CheckpointError}]
    return (reported or public)[0].__name__


def forget_frames(error: BaseException) -> None:
    """Let go of all that the frames hold which ``error`` and its causes came through.

    What was being handled meanwhile is cut off from it and stays as it is: it may be the caller's.
    """
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = one.__context__ = None
        one = one.__cause__


def array_not_found(key: str, keys: Sequence[str], root: object) -> ArrayNotFoundError:
    """The error for a key that is none of those that a place holds."""
    text = f"{key}: no such key among the {len(keys)} in {root}{similar_text(key, keys)}"
    return ArrayNotFoundError(text, key=key, path=str(root))


def as_megatron_error(error: CheckpointError) -> CheckpointError:
    """The same error, of a class that is also Megatron-Core's ``CheckpointingException``.

    The error itself where nothing has imported Megatron-Core: then no caller can expect that class.
    """
    core = sys.modules.get("megatron.core.dist_checkpointing.core")
    theirs, kind = getattr(core, "CheckpointingException", None), type(error)
    if theirs is None or issubclass(kind, theirs):
        return error
    adapted: CheckpointError
    adapted = built_error(kind.__name__, (kind, theirs), error.args, error.state)
    return adapted.with_traceback(error.__traceback__)


def raises_megatron_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: every CheckpointError that it raises is Megatron-Core's too."""

    @wraps(function)
    def adapted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            raise as_megatron_error(error) from error.__cause__

    return adapted


@contextmanager
def needs_megatron_core() -> Iterator[None]:
    """Make an ImportError within the block a MissingDependencyError that says what is needed."""
    try:
        yield
    except ImportError as error:
        installed = getattr(sys.modules.get("megatron.core"), "__version__", "none")
        raise MissingDependencyError(
            f"expected megatron-core 0.16 or later, with what this package uses of it, found "
            f"{installed}: {error}; install megatron-core>=0.16, or a newer dist-ckpt-strategies"
        ) from error
