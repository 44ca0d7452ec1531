"""A place in an object store, and what the errors of the store mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.config import Credentials, StoreOptions, aws_profile, with_profile
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
    StoreAccessError,
    StrategyError,
)
from dist_ckpt_strategies.storage.files import Directory

if TYPE_CHECKING:
    from dist_ckpt_strategies.storage.store import Bytes

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]")
_REFUSED = frozenset("?#\\*[]\0")

_DETAIL = re.compile(r" \[[a-z0-9_-]+='.*", re.DOTALL)
"""Codes, ids and the body of the response, which TensorStore appends."""

_NO_CREDENTIALS = re.compile("Failed to (get|create) credentials")
_RETRIED = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
_NO_BUCKET = ("NoSuchBucket", "The specified bucket does not exist")


class Operation(Enum):
    """The purpose of a request, and the rights it needs, at Amazon and at Google."""

    READ = "read", "s3:GetObject", "storage.objects.get"
    PUT = "put", "s3:PutObject", "storage.objects.create"
    DELETE = "delete", "s3:DeleteObject", "storage.objects.delete"
    LIST = "list", "s3:ListBucket", "storage.objects.list"


MAX_PUT_NBYTES = 5 << 30
"""Limit of one PUT, on Amazon's S3 and elsewhere."""

MAX_REQUESTS = 32
"""Under way at the same time, for each rank."""

_DELETES_AT_A_TIME = 1000
_NOTHING = ".nothing/"
"""No object's name starts like this: it is a short list to ask for."""

_MAX_PROBE_S = 5.0
_SHARE_OF_PROBE = 0.125
"""Of the time for a request: its answer has to arrive while peers still wait."""


@dataclass(frozen=True)
class Bucket:
    """The objects below ``scheme://bucket/path``; see Directory for its methods.

    Nothing is asked of the store before the first request.

    Attributes:
        scheme: one of SCHEMES.
        prefix: what the names of all its objects start with: empty, or with a ``/`` at the end.
        num_readers: see Directory; each has one request for data under way.
        read_nbytes: of one request at most.
    """

    scheme: str
    bucket: str
    prefix: str
    options: StoreOptions
    num_readers = 16
    read_nbytes = 16 << 20

    def __str__(self) -> str:
        """See Directory."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}"[:-1]

    @staticmethod
    def parse(text: str, options: StoreOptions) -> Bucket:
        """The place that a URL states.

        Raises:
            StrategyError: it states none, or the settings of its profile do not parse; says why.
        """
        scheme, _, rest = text.partition("://")
        if scheme not in SCHEMES:
            schemes = ", ".join(f"{scheme}://bucket/path" for scheme in SCHEMES)
            raise StrategyError(f"{text}: expected {schemes}, file:///path or a path")
        bucket, _, path = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise StrategyError(f"{text}: {bucket!r} is no name of a bucket")
        path = path.rstrip("/")
        parts = path.split("/") if path else []
        if _REFUSED.intersection(path) or any(part in {"", ".", ".."} for part in parts):
            raise StrategyError(
                f"{text}: a path in a bucket has no empty part, no '.', '..' and none of ?#\\*[]"
            )
        options = with_profile(options) if scheme == "s3" else options
        return SCHEMES[scheme](scheme, bucket, f"{path}/" if path else "", options)

    @property
    def reports_missing_buckets(self) -> bool:
        """Whether a request that changes nothing shows that the bucket is missing.

        TensorStore takes Google's refusal to list a bucket for an empty list; a put shows it.
        """
        return self.scheme != "gs"

    def __truediv__(self, name: str) -> Bucket:
        """The place below this one; ``name`` has no ``/``."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def path(self, name: str) -> str:
        """See Directory."""
        return f"{self}/{name}"

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """See Directory.

        Raises:
            CorruptCheckpointError: it ends before.
        """
        if nbytes == 0:
            return b""
        path, end = self.path(name), None if nbytes < 0 else byte_offset + nbytes
        part = slice(byte_offset, end) if byte_offset or end else None  # None: an empty one too
        request = self._store.read(name, byte_range=part)
        answer = self._result(request, Operation.READ, path)
        if answer.state == "missing":
            self.require_bucket()
            raise IncompleteCheckpointError(f"{path} does not exist", path=path)
        content: bytes = answer.value
        return content

    def write_pieces(self, name: str, pieces: Iterable[Sequence[Bytes]]) -> None:
        """See Directory. All of it is in memory until the store has it."""
        content = bytearray()
        for buffers in pieces:
            for buffer in buffers:
                content += buffer.data
        self.write(name, content)

    def read_into(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> None:
        """See Directory."""
        content = memoryview(self.read(name, byte_offset, sum(target.size for target in targets)))
        for target in targets:
            target.data[:] = content[: target.size]
            content = content[target.size :]

    def read_steps(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> Iterator[int]:
        """See Directory. There is one step."""
        self.read_into(name, byte_offset, targets)
        yield len(targets)

    def write(self, name: str, content: bytes | bytearray) -> None:
        """See Directory. It is durable once the store has acknowledged it."""
        if len(content) > MAX_PUT_NBYTES:
            raise StorageError(
                f"{self.path(name)}: {len(content)} bytes, and an object takes {MAX_PUT_NBYTES} in "
                "one request; distribute the objects over more ranks",
                path=self.path(name),
            )
        self._result(self._store.write(name, content), Operation.PUT, self.path(name))

    def create(self, name: str, content: bytes) -> bool:
        """Make an object unless there is one; whether it was made, by a conditional put.

        A server that ignores ``If-None-Match`` may make two, the second in place of the first.
        """
        spec, path = self._spec(self.options), self.path(name)
        if "use_conditional_write" in spec:  # puts to Google's are conditional anyway
            spec["use_conditional_write"] = True
        store = self._open(spec)
        missing = self._result(store.read(name, byte_range=slice(0, 0)), Operation.READ, path)
        if missing.state != "missing":
            return False
        request = store.write(name, content, if_equal=missing.stamp.generation)
        return bool(self._result(request, Operation.PUT, path).generation)

    def has(self, name: str) -> bool:
        """Whether there is an object of that name."""
        request = self._store.read(name, byte_range=slice(0, 0))
        is_there: bool = self._result(request, Operation.READ, self.path(name)).state != "missing"
        if not is_there:
            self.require_bucket()
        return is_there

    def has_bytes(self, name: str, nbytes: int) -> bool:
        """Whether there is an object of so many bytes at least."""
        with suppress(IncompleteCheckpointError, CorruptCheckpointError):
            return len(self.read(name, nbytes - 1, 1)) == 1
        return False

    def require_space(self, nbytes: int, num_files: int) -> None:
        """See Directory; a store does not say how much it takes."""

    def locked(self) -> AbstractContextManager[None]:
        """See Directory; a store has no locks, and replaces an object in one step."""
        return nullcontext()

    def names(self, start: str = "") -> Sequence[str]:
        """Every object whose name starts with ``start``, in no order."""
        end = f"{start[:-1]}{chr(ord(start[-1]) + 1)}" if start else ""
        keys = _kv_store().KeyRange(start, end)
        place = self.path("" if start == _NOTHING else start).rstrip("/")
        listed = self._result(self._store.list(range=keys), Operation.LIST, place)
        return [key.decode() for key in listed]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are passed over."""
        left = iter(names)
        while batch := list(islice(left, _DELETES_AT_A_TIME)):
            pending = [(name, self._store.write(name, None)) for name in batch]
            for name, future in pending:
                self._result(future, Operation.DELETE, self.path(name))

    def require_bucket(self) -> None:
        """Raise unless the bucket is there, and may be listed, as asked once.

        TensorStore reports a missing object and a missing bucket alike.

        Raises:
            StoreAccessError: it is not there; only where ``reports_missing_buckets``.
            StoreAccessError, StorageTimeoutError: the store does not answer.
        """
        _ = self._nothing

    @cached_property
    def _nothing(self) -> Sequence[str]:
        return self.names(_NOTHING)

    def _result(self, future: Any, operation: Operation, path: str) -> Any:
        """The result of a request, within the time that is set."""
        limit_s = self.options.timeout_s
        try:
            return future.result(timeout=limit_s)
        except (TimeoutError, FutureTimeoutError):
            future.cancel()
            why = f" ({reason})" if (reason := self._why_not()) else ""
            raise StorageTimeoutError(
                f"{path}: the object store did not answer within {limit_s:g} s, retries included"
                f"{why}; see that it runs and can be reached, or raise DIST_CKPT_STORE_TIMEOUT_S "
                "and timeout_s of the save or load: a request takes three quarters of it at most",
                path=path,
            ) from None
        except Exception as error:
            raise self._error(error, operation, path) from error

    def _error(self, error: Exception, operation: Operation, path: str) -> StorageError:
        """The StorageError for an error of TensorStore, whose text starts with a status."""
        text, short = str(error), _DETAIL.sub("", str(error))
        status = text.partition(":")[0]
        if any(phrase in text for phrase in _NO_BUCKET):
            endpoint = self.options.endpoint or "Amazon's S3"
            server = "Google Cloud Storage" if self.scheme == "gs" else endpoint
            return StoreAccessError(  # no object of the checkpoint is at fault
                f"{self}: there is no bucket {self.bucket!r} at {server}; make it, or correct the "
                "URL or the endpoint",
                path=str(self),
            )
        if text.startswith("Unknown [http_response_code='400'"):  # of a HEAD: it has no body
            status, short = "UNAUTHENTICATED", "HTTP 400, as for a session token that has expired"
        if status in {"PERMISSION_DENIED", "UNAUTHENTICATED"} or _NO_CREDENTIALS.search(text):
            what, *rights = operation.value
            profile, file, _ = aws_profile()
            harmless = "; a save to a new URL deletes nothing, a conversion its own notes"
            return StoreAccessError(
                f"{path}: the object store refuses access, to {what} it ({short}); see the "
                "credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, profile "
                f"{self.options.profile or profile!r} in {file}, or the machine's role) and what "
                f"they may do in bucket {self.bucket!r}: this takes {rights[self.scheme == 'gs']}"
                f"{harmless if operation is Operation.DELETE else ''}",
                path=path,
            )
        if status == "OUT_OF_RANGE":
            short = f"{path} is shorter than it was written ({short})"
            return CorruptCheckpointError(short, path=path)
        if status in _RETRIED:
            return StorageTimeoutError(
                f"{path}: the object store cannot be reached, or fails ({short})", path=path
            )
        return StorageError(f"{path}: {short}", path=path)

    def _why_not(self) -> str:
        """The error of a single short try; TensorStore does not say why it tries again."""
        options = replace(self.options, max_retries=1)
        probe = self._open(self._spec(options))
        future = probe.list(range=_kv_store().KeyRange(_NOTHING, f"{_NOTHING[:-1]}0"))
        try:
            future.result(timeout=min(_MAX_PROBE_S, _SHARE_OF_PROBE * self.options.timeout_s))
        except (TimeoutError, FutureTimeoutError):
            future.cancel()
            return "it takes requests, and leaves them unanswered"
        except Exception as error:  # noqa: BLE001 - libraries raise what they like; it is reported
            return _DETAIL.sub("", str(error))
        return ""

    @cached_property
    def _store(self) -> Any:
        return self._open(self._spec(self.options))

    def _open(self, spec: dict[str, Any]) -> Any:
        try:
            return _kv_store().open(spec).result()
        except ValueError as error:
            raise self._error(error, Operation.READ, str(self)) from error

    def _spec(self, options: StoreOptions) -> dict[str, Any]:
        """The TensorStore spec of this."""
        retries = {"max_retries": options.max_retries, "initial_delay": "100ms", "max_delay": "4s"}
        place = {"bucket": self.bucket, "path": self.prefix}
        if self.scheme == "gs":
            return place | {
                "driver": "gcs",
                "gcs_request_retries": retries,
                "gcs_request_concurrency": {"limit": MAX_REQUESTS},
            }
        credentials = {"type": options.credentials.value}
        if options.credentials in {Credentials.DEFAULT, Credentials.PROFILE}:
            profile, *files = aws_profile()  # TensorStore looks for none that is not named
            credentials["profile"] = options.profile or profile
        if options.credentials is Credentials.PROFILE:
            credentials |= zip(("credentials_file", "config_file"), files, strict=True)
        spec = place | {
            "driver": "s3",
            "aws_credentials": credentials,
            "use_conditional_write": False,
            "s3_request_retries": retries,
            "s3_request_concurrency": {"limit": MAX_REQUESTS},
        }
        if options.endpoint is not None:
            given = options.endpoint.rstrip("/")  # with one, each request is refused
            endpoint = given.replace("{bucket}", self.bucket)
            spec |= {"endpoint": endpoint, "aws_region": options.region or "us-east-1"}
            return spec | ({"bucket": ""} if endpoint != given else {})
        return spec | ({"aws_region": options.region} if options.region else {})


def _kv_store() -> Any:
    from tensorstore import KvStore  # noqa: PLC0415 - takes a while, and directories go without

    return KvStore


SCHEMES = {"s3": Bucket, "gs": Bucket}
"""The class of each scheme; docs/contributing.md shows how to add one."""

Place = Directory | Bucket
"""A place below a URL or in a directory; both have the same methods."""


def content_of(place: Place, name: str) -> bytes | None:
    """The content of a file; None where there is none."""
    with suppress(IncompleteCheckpointError):
        return place.read(name)
    return None
