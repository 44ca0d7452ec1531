"""Frozen options, and the only reader of the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from configparser import Error as ConfigParserError
from configparser import RawConfigParser
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, TypeVar

from dist_ckpt_strategies.errors import StrategyError

MIB = 1 << 20
_SHARE_OF_WAIT = 0.75
T = TypeVar("T")
_PREFIX = "DIST_CKPT_"

_COUNTS = frozenset({"io_threads", "max_retries"})

_STORE_VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "endpoint": ("DIST_CKPT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "region": ("DIST_CKPT_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
        "credentials": ("DIST_CKPT_S3_CREDENTIALS",),
        "profile": ("DIST_CKPT_S3_PROFILE",),
        "timeout_s": ("DIST_CKPT_STORE_TIMEOUT_S",),
        "max_retries": ("DIST_CKPT_STORE_MAX_RETRIES",),
    }
)
"""Of each field of StoreOptions; those of other tools come after our own."""


def limit_of_wait(timeout_s: float) -> float:
    """The longest that a step may wait for something of its own rank's, in seconds.

    The others wait for this rank, for ``timeout_s``: by then it has to have reported a failure.
    """
    return _SHARE_OF_WAIT * timeout_s


class Verify(StrEnum):
    """How much a load of packs compares with their digests."""

    OFF = "off"
    READ = "read"


class OnUnchanged(StrEnum):
    """Reaction of a save that repeats the one before."""

    WARN = "warn"
    RAISE = "raise"
    IGNORE = "ignore"


class Credentials(StrEnum):
    """Source of the credentials for S3; TensorStore reads them."""

    DEFAULT = "default"
    ENVIRONMENT = "environment"
    PROFILE = "profile"
    ANONYMOUS = "anonymous"
    IMDS = "imds"
    ECS = "ecs"


def require_in_range(name: str, kind: type[Any], limit: float, value: Any) -> None:
    """Raise StrategyError unless an option is a number of that kind, > 0 and below the limit."""
    if not (isinstance(value, kind) and 0 < value < limit):  # refuses NaN too
        raise StrategyError(
            f"option {name}: expected a number > 0 and < {limit:g}, found {value!r}"
        )


def _require_usable(options: Any) -> None:
    """Raise unless each number is in range and each choice is one; a choice becomes its enum's."""
    for field in fields(options):
        name, kind, value = field.name, type(field.default), getattr(options, field.name)
        if issubclass(kind, StrEnum):
            try:
                object.__setattr__(options, name, kind(value))
            except ValueError:
                names = ", ".join(kind)
                text = f"{name}: expected one of {names}, found {value!r}"
                raise StrategyError(text) from None
        elif kind in {int, float}:
            # Some 30 years; what waits for longer overflows somewhere.
            limit = 1e9 if name == "timeout_s" else math.inf
            require_in_range(name, Integral if name in _COUNTS else Real, limit, value)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How object stores are reached. Credentials are not part of it.

    Attributes:
        endpoint: URL of a server that speaks S3; None for the profile's, or else Amazon's own.
            ``{bucket}`` in it stands for the bucket's name, where the server expects that in its
            own.
        region: region for which requests are signed. None: the bucket's, or with an endpoint the
            profile's, or else us-east-1.
        credentials: their source; ``"default"`` is Amazon's usual chain: environment, profile,
            container, machine.
        profile: profile in the credentials file; None for AWS_PROFILE, or else ``default``.
        timeout_s: longest time for one request with its retries, in seconds. In a save or load of
            several ranks, at most three quarters of their wait for each other.
        max_retries: retries of one request; the pauses between them grow up to 4 s.
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: Credentials = Credentials.DEFAULT
    profile: str | None = None
    timeout_s: float = 120.0
    max_retries: int = 32

    def __post_init__(self) -> None:
        """Refuse values that could only hang or crash later."""
        _require_usable(self)
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise StrategyError(
                f"option endpoint: expected http://... or https://..., found {self.endpoint!r}"
            )


@dataclass(frozen=True, slots=True)
class Options:
    """How a save or load is carried out.

    Attributes:
        timeout_s: longest wait for a peer in each collective, in seconds. Storage has a quarter
            of it before the first collective of a call and half of it afterwards, so that every
            rank has raised by then. It must exceed the time by which the slowest rank lags behind
            the fastest.
        max_inflight_bytes: bound, per rank, on memory for staging (copies of CUDA or
            non-contiguous tensors), and on the chunks of format 1 that are
            decoded. A single larger tensor or chunk goes alone.
        io_threads: packs and chunks of ("zarr", 1) that a rank writes at the same time. The number
            of reads follows from the file system.
        verify: what a load of packs compares with digests: ``"read"``, what it reads; ``"off"``,
            nothing but headers and the index.
        strict_dtype: whether a load raises where an array is stored in another dtype than the one
            requested, before it fills any tensor; otherwise it converts, and warns once.
        on_unchanged: what a save of packs does that repeats the weights or the moments of the last
            save: ``"warn"``, ``"raise"`` a PlanError before it is committed, or ``"ignore"``; see
            docs/right_state.md.
        writer_process: whether a separate process per rank writes asynchronous saves to
            directories; threads of this process compete with training for Python's lock.
        store: how object stores are reached; None: from the environment.
        base: directory or URL of the checkpoint that has the rest of the model, where saves hold
            its trained part alone: each names it with the digest of its index. Loads of such a
            save take what it lacks from there, and refuse another one; by default it is looked for
            where it was.
        only: which keys a save holds: a glob, or a function of a key; None: all.
    """

    timeout_s: float = 1800.0
    max_inflight_bytes: int = 512 * MIB
    io_threads: int = 16
    verify: Verify = Verify.READ
    strict_dtype: bool = False
    on_unchanged: OnUnchanged = OnUnchanged.WARN
    writer_process: bool = True
    store: StoreOptions | None = None
    base: str | None = None
    only: str | Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse values that could only hang or crash later."""
        _require_usable(self)
        if not (self.only is None or isinstance(self.only, str) or callable(self.only)):
            raise StrategyError(
                f"option only: expected a glob or a function of a key, found {self.only!r}"
            )
        if self.base is not None:
            object.__setattr__(self, "base", os.fspath(self.base))

    def saves(self, key: str) -> bool:
        """Whether a save holds an array or object of that key."""
        if self.only is None or isinstance(self.only, str):
            return self.only is None or fnmatchcase(key, self.only)
        return bool(self.only(key))

    def with_changes(self, **changes: Any) -> Options:
        """A copy with the given fields changed; None leaves a field as it is."""
        wanted = {k: v for k, v in changes.items() if v is not None and v is not getattr(self, k)}
        return replace(self, **wanted) if wanted else self

    def reached_stores(self) -> StoreOptions:
        """How object stores are reached: no request outlasts what the peers wait for its rank.

        Raises:
            StrategyError: a variable of the environment is out of range, or does not parse.
        """
        store = self.store or store_options_from_environment()
        return replace(store, timeout_s=min(store.timeout_s, limit_of_wait(self.timeout_s)))


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How ``("local_replicated", 1)`` keeps copies.

    Attributes:
        replication_jump: number of ranks that fail together, those of a node; 0 means
            LOCAL_WORLD_SIZE.
        replication_factor: copies of each local shard, including the owner's.
        allow_uneven: make some cliques larger if the numbers do not divide the world.
        algo: ``"atomic"``: every rank stores all shards that it holds; ``"fully_parallel"``: one of
            the ranks that hold a shard stores it.
        max_bucket_bytes: bound on the bytes in flight.
        node_directory: for tests and unusual mounts, a function from a global rank to the directory
            on its node that replaces the parent of the checkpoint directory.
    """

    replication_jump: int = 0
    replication_factor: int = 2
    allow_uneven: bool = False
    algo: str = "atomic"
    max_bucket_bytes: int = 64 * MIB
    node_directory: Callable[[int], str | Path] | None = None


_VARIABLES = {f.name: _PREFIX + f.name.upper() for f in fields(Options) if f.name != "store"}


def options_from_environment() -> Options:
    """The defaults, changed by ``DIST_CKPT_<FIELD>`` variables.

    ``DIST_CKPT_TIMEOUT_S=60`` sets ``timeout_s``, and so on for every field of Options but
    ``store``; see ``store_options_from_environment``.

    Raises:
        StrategyError: a value does not parse, or is out of range.
    """
    return _options(tuple(map(os.environ.get, _VARIABLES.values())))


@lru_cache(maxsize=8)
def _options(texts: tuple[str | None, ...]) -> Options:
    """The options that these values of ``_VARIABLES`` give."""
    given = zip(_VARIABLES.items(), texts, strict=True)
    return Options(**_parsed_fields(Options, {f: (v, text) for (f, v), text in given if text}))


def store_options_from_environment(**defaults: Any) -> StoreOptions:
    """How object stores are reached: by the first variable of ``_STORE_VARIABLES`` that is set.

    Args:
        defaults: of fields that no variable sets.

    Raises:
        StrategyError: a value does not parse, or is out of range; names the variable.
    """
    given: dict[str, tuple[str, str]] = {}
    for field, variables in _STORE_VARIABLES.items():
        name = next((name for name in variables if os.environ.get(name)), None)
        if name is not None:
            given[field] = name, os.environ[name]
    return StoreOptions(**(defaults | _parsed_fields(StoreOptions, given)))


def aws_profile() -> tuple[str, str, str]:
    """The profile, and the files of credentials and settings, that Amazon's tools use."""
    get, home = os.environ.get, os.path.expanduser("~/.aws")  # noqa: PTH111 - stays without a home
    return (
        get("AWS_PROFILE") or get("AWS_DEFAULT_PROFILE") or "default",
        get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/credentials",
        get("AWS_CONFIG_FILE") or f"{home}/config",
    )


def with_profile(options: StoreOptions) -> StoreOptions:
    """Options with the endpoint and region of the profile where they name none.

    As Amazon's tools read them from the settings file: an endpoint of the profile's ``services``
    comes before its own, and AWS_IGNORE_CONFIGURED_ENDPOINT_URLS leaves both out.

    Raises:
        StrategyError: the file does not parse, or the endpoint is no URL.
    """
    default, _, path = aws_profile()
    name = options.profile or default
    settings = RawConfigParser(strict=False)
    try:
        settings.read(path, encoding="utf-8")
    except (ConfigParserError, OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"{path}: no settings of Amazon's tools: {error}") from error
    section = next((s for s in (f"profile {name}", name) if settings.has_section(s)), "")
    profile = dict(settings[section]) if section else {}
    services = f"services {profile.get('services', '')}"
    nested = settings.get(services, "s3", fallback="").splitlines()
    service = {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in nested)}
    endpoint = service.get("endpoint_url") or profile.get("endpoint_url")
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        endpoint = None
    try:
        endpoint = options.endpoint or endpoint
        region = options.region or (profile.get("region") if endpoint else None)
        return replace(options, endpoint=endpoint, region=region)
    except StrategyError as error:
        raise StrategyError(f"{path}: [{section}]: {error.message}") from None


def _parsed_fields(kind: type[Any], given: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Fields of options, each by a variable and its text; errors name the variable."""
    values: dict[str, Any] = {}
    parsers: dict[type[Any], Callable[[str], Any]] = {bool: _switch, int: int, float: float}
    defaults = {field.name: field.default for field in fields(kind)}
    for name, (variable, text) in given.items():
        values[name] = parsed(variable, text, parsers.get(type(defaults[name]), str))
        try:
            kind(**{name: values[name]})
        except StrategyError as error:
            raise StrategyError(f"{variable}: {error.message}") from None
    return values


def debug_from_environment() -> bool:
    """Whether ``DIST_CKPT_DEBUG`` asks commands for tracebacks: set, and neither empty nor 0."""
    return os.environ.get(_PREFIX + "DEBUG", "") not in {"", "0"}


def install_from_environment() -> tuple[tuple[str, int], list[Any]]:
    """The format and the allowed classes that ``integrations.auto`` installs with.

    ``DIST_CKPT_FORMAT`` is ``safetensors`` (the default), ``zarr`` or ``torch_dist``;
    ``DIST_CKPT_ALLOW`` lists classes as ``package.module:Class``, with commas in between.

    Raises:
        StrategyError: a class cannot be imported, or the format is none of these.
    """
    backend = os.environ.get(_PREFIX + "FORMAT") or _FORMATS[0]
    if backend not in _FORMATS:
        names = ", ".join(_FORMATS)
        raise StrategyError(f"{_PREFIX}FORMAT: expected one of {names}, found {backend!r}")
    classes = filter(None, os.environ.get(_PREFIX + "ALLOW", "").split(","))
    return (backend, 1), [parsed(_PREFIX + "ALLOW", c.strip(), _imported) for c in classes]


_FORMATS = ("safetensors", "zarr", "torch_dist")


def _imported(name: str) -> Any:
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(name) from error


def local_world_size() -> int:
    """Ranks of this node, by LOCAL_WORLD_SIZE; StrategyError if that is not set, or no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal() or int(text) == 0:
        raise StrategyError(
            f"LOCAL_WORLD_SIZE: expected the number of ranks of this node, found {text!r}; set it, "
            "or give replication_jump"
        )
    return int(text)


def local_rank() -> int | None:
    """This process's place among those of its node, by LOCAL_RANK; None if that is not set.

    Raises StrategyError if it is no number.
    """
    text = os.environ.get("LOCAL_RANK")
    return parsed("LOCAL_RANK", text, int) if text else None


RENDEZVOUS = _PREFIX + "RENDEZVOUS"
JOB = _PREFIX + "JOB"  # a random id, equal in all workers of a launcher's job
PLACE = _PREFIX + "PLACE"
"""``KEY=NODE``: the node of this process owns its place as long as that key names it."""


def place_from_environment() -> tuple[tuple[str, int], str, str] | None:
    """The place of this process's node: address of the job's store, key, node; None without one.

    Raises:
        StrategyError: a variable makes no sense.
    """
    text = os.environ.get(PLACE)
    if not text:
        return None
    key, _, node = text.partition("=")
    return parsed(RENDEZVOUS, os.environ.get(RENDEZVOUS, ""), parse_address), key, node


def update_environment(changes: Mapping[str, str]) -> None:
    """Set variables of this process: what a launcher would have set, had it known."""
    os.environ.update(changes)


def environment() -> dict[str, str]:
    """A copy of the environment, for processes to start."""
    return dict(os.environ)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError(text)
    return host, int(port)


def rank_from_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun sets them; 0 and 1 where nothing is set.

    Raises:
        StrategyError: only one of them is set, or one is no number.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank or size):
        return 0, 1
    return parsed("RANK", rank, int), parsed("WORLD_SIZE", size, int)


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError(text)
    return text == "1"


def parsed(name: str, text: str, parse: Callable[[str], T]) -> T:
    """The value of a variable; a StrategyError if ``parse`` raises a ValueError."""
    try:
        return parse(text)
    except ValueError:
        expected = _EXPECTED.get(parse, parse.__name__)
        raise StrategyError(f"{name}: expected {expected}, found {text!r}") from None


_EXPECTED: Mapping[Callable[[str], Any], str] = MappingProxyType(
    {_switch: "0 or 1", parse_address: "host:port", _imported: "package.module:Class"}
)
