"""Frozen options, and the only reader of the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from configparser import Error as ConfigParserError
from configparser import RawConfigParser
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
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
    """What a load of packs compares with their digests."""

    OFF = "off"
    READ = "read"


class Credentials(StrEnum):
    """Where the credentials for S3 come from; TensorStore reads them."""

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
        writer_process: whether a separate process per rank writes asynchronous saves to
            directories; threads of this process compete with training for Python's lock.
        store: how object stores are reached; None: from the environment.
    """

    timeout_s: float = 1800.0
    max_inflight_bytes: int = 512 * MIB
    io_threads: int = 128
    verify: Verify = Verify.READ
    strict_dtype: bool = False
    writer_process: bool = True
    store: StoreOptions | None = None

    def __post_init__(self) -> None:
        """Refuse values that could only hang or crash later."""
        _require_usable(self)

    def with_changes(self, **changes: Any) -> Options:
        """A copy with the given fields changed; None leaves a field as it is."""
        wanted = {k: v for k, v in changes.items() if v is not None}
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
    return _options_set_by(tuple(map(os.environ.get, _VARIABLES.values())))


@lru_cache(maxsize=8)
def _options_set_by(values: tuple[str | None, ...]) -> Options:  # noqa: ARG001 - the cache's key
    return Options(**_set_by_variables(Options, {f: (name,) for f, name in _VARIABLES.items()}))


def store_options_from_environment(**defaults: Any) -> StoreOptions:
    """How object stores are reached: by the first variable of ``_STORE_VARIABLES`` that is set.

    Args:
        defaults: of fields that no variable sets.

    Raises:
        StrategyError: a value does not parse, or is out of range; names the variable.
    """
    return StoreOptions(**(defaults | _set_by_variables(StoreOptions, _STORE_VARIABLES)))


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


def _set_by_variables(kind: type[Any], variables: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The fields of options that variables set: of each field the first one that is not empty."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        name = next((name for name in variables.get(field.name, ()) if os.environ.get(name)), None)
        if name is not None:
            parsers: dict[type[Any], Callable[[str], Any]] = {bool: _switch, int: int, float: float}
            parse = parsers.get(type(field.default), str)
            found[field.name] = _parsed(name, os.environ[name], parse)
            try:
                kind(**{field.name: found[field.name]})
            except StrategyError as error:
                raise StrategyError(f"{name}: {error.message}") from None
    return found


def debug_from_environment() -> bool:
    """Whether ``DIST_CKPT_DEBUG`` asks commands for tracebacks: set, and neither empty nor 0."""
    return os.environ.get(_PREFIX + "DEBUG", "") not in {"", "0"}


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
    return _parsed("LOCAL_RANK", text, int) if text else None


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process finds the rendezvous of its job.

    Attributes:
        address: host and port of the launcher's store; None: there is none, a world of one.
        worker: what the launcher calls this process.
        rank: its place as torchrun says; None where the elastic agent assigns it.
        attempt: how often the launcher has restarted all of them.
        heartbeat_pipe: file descriptor and inode that heartbeats go to; None: no process listens.
        heartbeat_s: seconds between two of them.
    """

    address: tuple[str, int] | None = None
    worker: str = "0"
    rank: int | None = None
    attempt: int = 0
    heartbeat_pipe: tuple[int, int] | None = None
    heartbeat_s: float = 1.0


RENDEZVOUS, WORKER = _PREFIX + "RENDEZVOUS", _PREFIX + "WORKER"
HEARTBEAT_PIPE, HEARTBEAT_S = _PREFIX + "HEARTBEAT_PIPE", _PREFIX + "HEARTBEAT_S"
JOB = _PREFIX + "JOB"  # a random id, equal in all workers of a launcher's job
PLACE = _PREFIX + "PLACE"
"""``KEY=NODE``: the node of this process owns its place as long as that key names it."""
_TORCHRUN = _PREFIX + "TORCHRUN"
_STORE_ADDRESS = _PREFIX + "STORE_ADDRESS"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def launch_from_environment() -> Launch:
    """How this process was started: by ``dist-ckpt run``, by torchrun, or on its own.

    Raises:
        StrategyError: in another way, as one of several; or a variable makes no sense.
    """
    source = os.environ
    if source.get(RENDEZVOUS):
        pipe = source.get(HEARTBEAT_PIPE)
        return Launch(
            _parsed(RENDEZVOUS, source[RENDEZVOUS], _address),
            source.get(WORKER, ""),
            heartbeat_pipe=None if not pipe else _parsed(HEARTBEAT_PIPE, pipe, _pipe),
            heartbeat_s=_parsed(HEARTBEAT_S, source.get(HEARTBEAT_S, "1"), float),
        )
    if source.get(_AGENT_STORE) == "True":
        # Each attempt in place gives these variables other values; the first ones are torchrun's.
        count = source.get("TORCHELASTIC_RESTART_COUNT", "0")
        address = f"{source.get('MASTER_ADDR', '')}:{source.get('MASTER_PORT', '')}"
        count, _, address = source.setdefault(_TORCHRUN, f"{count}@{address}").partition("@")
        rank = _parsed("RANK", source.get("RANK", ""), int)
        return Launch(
            _parsed("MASTER_ADDR:MASTER_PORT", address, _address),
            str(rank),
            rank=rank,
            attempt=_parsed("TORCHELASTIC_RESTART_COUNT", count, int),
        )
    if source.get("WORLD_SIZE", "1") in {"", "1"}:
        return Launch()
    raise StrategyError(
        f"WORLD_SIZE is {source['WORLD_SIZE']}, but nothing here coordinates restarts: start the "
        "script with dist-ckpt run or torchrun, or give HPWrapper an hp_api_factory"
    )


def place_from_environment() -> tuple[tuple[str, int], str, str] | None:
    """The place of this process's node: address of the job's store, key, node; None without one.

    Raises:
        StrategyError: a variable makes no sense.
    """
    text = os.environ.get(PLACE)
    if not text:
        return None
    key, _, node = text.partition("=")
    return _parsed(RENDEZVOUS, os.environ.get(RENDEZVOUS, ""), _address), key, node


def claim_store_address() -> tuple[str, int] | None:
    """Host and port for the store of process groups that no other process hosts; None if one does.

    From then on ``init_process_group`` looks for one that is there, and rank 0 hosts none itself.

    Raises:
        StrategyError: MASTER_PORT is no number.
    """
    source = os.environ
    host, port = source.get("MASTER_ADDR"), source.get("MASTER_PORT")
    if host and port and source.get(_AGENT_STORE) != "True":
        source |= {_STORE_ADDRESS: f"{host}:{port}", _AGENT_STORE: "True"}
    found = source.get(_STORE_ADDRESS)
    return None if found is None else _parsed(_STORE_ADDRESS, found, _address)


def update_environment(changes: Mapping[str, str]) -> None:
    """Set variables of this process: what a launcher would have set, had it known."""
    os.environ.update(changes)


def outlive_nccl_errors() -> None:
    """Have NCCL's watchdog leave this process alive when it loses contact with another rank.

    By default it ends the process, and with it the state in its memory. Process groups read the
    variable when they are made. torchrun sets it to 1 where it is unset.

    Raises:
        StrategyError: the variable asks for something else.
    """
    found = os.environ.get(_NCCL_ERROR_HANDLING, "0")
    if found not in {"0", "1"}:
        raise StrategyError(
            f"{_NCCL_ERROR_HANDLING}={found}: NCCL would end every process when one rank is lost; "
            "leave it unset, or set it to 0"
        )
    os.environ[_NCCL_ERROR_HANDLING] = "0"


def environment() -> dict[str, str]:
    """A copy of the environment, for processes to start."""
    return dict(os.environ)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError(text)
    return host, int(port)


def _pipe(text: str) -> tuple[int, int]:
    fd, _, inode = text.partition(":")
    return int(fd), int(inode)


def rank_from_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE, as torchrun sets them; 0 and 1 where nothing is set.

    Raises:
        StrategyError: only one of them is set, or one is no number.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank or size):
        return 0, 1
    return _parsed("RANK", rank, int), _parsed("WORLD_SIZE", size, int)


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError(text)
    return text == "1"


def _parsed(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError:
        expected = _EXPECTED.get(parse, parse.__name__)
        raise StrategyError(f"{name}: expected {expected}, found {text!r}") from None


_EXPECTED: Mapping[Callable[[str], Any], str] = MappingProxyType(
    {_switch: "0 or 1", _address: "host:port", _pipe: "fd:inode"}
)
