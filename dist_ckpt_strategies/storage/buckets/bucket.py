"""A checkpoint's place in an object store, through TensorStore's key-value stores.

Plain requests only: an object is put whole, read whole or in part, listed and deleted. Nothing is
renamed, and no request depends on what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import tensorstore as ts

from dist_ckpt_strategies.config import Credentials, StoreOptions
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.spec.store_url import StoreUrl
from dist_ckpt_strategies.storage.buckets.errors import Deed, no_answer, shortened, store_error

MAX_PUT_NBYTES = 5 << 30
"""What one request can put, on Amazon's S3 and elsewhere."""

MAX_REQUESTS = 32
"""Under way at the same time, for each rank."""

_DELETES_AT_A_TIME = 1000
_NOTHING = ".nothing/"
"""No object's name starts like this: it is a short list to ask for."""

_MAX_PROBE_S = 5.0
_SHARE_OF_PROBE = 0.125
"""Of the time for a request: what it tells has to be told while peers still wait for it."""

_FIRST_PAUSE = "100ms"
_LONGEST_PAUSE = "4s"


class Bucket:
    """What lies below a URL; see FileStore. Names have ``/`` between their parts.

    Nothing is asked of the store before the first request.

    Args:
        url: where.
        options: how the store is reached.
    """

    def __init__(self, url: StoreUrl, options: StoreOptions) -> None:
        self.url = url
        self._options = options

    def __str__(self) -> str:
        """See FileStore."""
        return str(self.url)

    @property
    def tells_missing_buckets(self) -> bool:
        """Whether a request that changes nothing shows that the bucket is missing.

        TensorStore takes Google's refusal to list a bucket for an empty list; a put shows it.
        """
        return self.url.scheme != "gs"

    def below(self, name: str) -> Bucket:
        """What lies below this, under a name without a ``/``."""
        return Bucket(self.url.below(name), self._options)

    def path(self, name: str) -> str:
        """See FileStore."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        """See FileStore."""
        return self._read(name, None)

    def read_span(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """See FileStore.

        Raises:
            CorruptCheckpointError: it ends before.
        """
        return self._read(name, slice(byte_offset, byte_offset + nbytes)) if nbytes else b""

    def read_rest(self, name: str, byte_offset: int) -> bytes:
        """The bytes of an object from an offset, where it has some, to its end."""
        return self._read(name, slice(byte_offset, None))

    def write(self, name: str, content: bytes) -> None:
        """See FileStore. It is durable once the store has acknowledged it."""
        if len(content) > MAX_PUT_NBYTES:
            raise StorageError(
                f"{self.path(name)}: {len(content)} bytes, and an object takes {MAX_PUT_NBYTES} in "
                "one request; spread the objects over more ranks",
                path=self.path(name),
            )
        self._result(self._store.write(name, content), Deed.PUT, self.path(name))

    def nbytes(self, name: str) -> int | None:
        """The size of an object; None where it is missing.

        Takes some sixty requests for one byte: none of TensorStore's tells.
        """
        if not self.has(name):
            return None
        low, high = 0, 1
        while self._has_byte(name, high - 1):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has_byte(name, middle - 1) else (low, middle)
        return low

    def has_nbytes(self, name: str, nbytes: int) -> bool:
        """Whether an object that is there has this size. Takes two requests for one byte."""
        return not self._has_byte(name, nbytes) and (not nbytes or self._has_byte(name, nbytes - 1))

    def _has_byte(self, name: str, byte_offset: int) -> bool:
        """Whether an object reaches this far.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        try:
            return bool(self.read_span(name, byte_offset, 1))
        except CorruptCheckpointError:
            return False

    def has(self, name: str) -> bool:
        """Whether there is an object of that name."""
        request = self._store.read(name, byte_range=slice(0, 0))
        found = self._result(request, Deed.READ, self.path(name))
        if found.state == "missing":
            self.require_bucket()
        return bool(found.state != "missing")

    def names(self, prefix: str) -> Iterator[str]:
        """See FileStore."""
        return iter(self._listed(f"{prefix}/" if prefix else ""))

    def is_empty(self) -> bool:
        """Whether nothing lies below the URL."""
        return not self._listed("")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are passed over."""
        left = iter(names)
        while some := list(islice(left, _DELETES_AT_A_TIME)):
            pending = [(name, self._store.write(name, None)) for name in some]
            for name, future in pending:
                self._result(future, Deed.DELETE, self.path(name))

    def require_bucket(self) -> None:
        """Raise unless the bucket is there, and may be listed.

        A missing object does not tell: TensorStore reports it, and a missing bucket, alike.

        Raises:
            BucketNotFoundError: it is not there, and the store tells (``tells_missing_buckets``).
            StoreAccessError, StoreUnreachableError: nothing can be told.
        """
        self._listed(_NOTHING)

    def _listed(self, start: str) -> Sequence[str]:
        keys = ts.KvStore.KeyRange(start, f"{start[:-1]}0" if start else "")  # "0" follows "/"
        place = self.path("" if start == _NOTHING else start).rstrip("/")
        found = self._result(self._store.list(range=keys), Deed.LIST, place)
        return [key.decode() for key in found]

    def _read(self, name: str, byte_range: slice | None) -> bytes:
        path = self.path(name)
        found = self._result(self._store.read(name, byte_range=byte_range), Deed.READ, path)
        if found.state == "missing":
            self.require_bucket()
            raise IncompleteCheckpointError(f"{path} does not exist", path=path)
        content: bytes = found.value
        return content

    def _result(self, future: Any, deed: Deed, path: str) -> Any:
        """What a request gives, within the time that is set."""
        limit_s = self._options.timeout_s
        try:
            return future.result(timeout=limit_s)
        except (TimeoutError, FutureTimeoutError):
            future.cancel()
            raise no_answer(path, limit_s, self._why_not()) from None
        except Exception as error:
            server = server_name(self.url, self._options)
            raise store_error(error, deed, path, self.url, server) from error

    def _why_not(self) -> str:
        """What a single short try says; TensorStore keeps to itself why it tries again."""
        options = replace(self._options, max_retries=1)
        probe = ts.KvStore.open(_spec(self.url, options)).result()
        future = probe.list(range=ts.KvStore.KeyRange(_NOTHING, f"{_NOTHING[:-1]}0"))
        try:
            future.result(timeout=min(_MAX_PROBE_S, _SHARE_OF_PROBE * self._options.timeout_s))
        except (TimeoutError, FutureTimeoutError):
            future.cancel()
            return "it takes requests, and leaves them unanswered"
        except Exception as error:  # noqa: BLE001 - libraries raise what they like; it is told
            return shortened(error)
        return ""

    @cached_property
    def _store(self) -> Any:
        return ts.KvStore.open(_spec(self.url, self._options)).result()


def server_name(url: StoreUrl, options: StoreOptions) -> str:
    """Who is asked for what lies below a URL."""
    if url.scheme == "gs":
        return "Google Cloud Storage"
    return options.endpoint or "Amazon's S3"


def _spec(url: StoreUrl, options: StoreOptions) -> dict[str, Any]:
    """The TensorStore spec of what lies below a URL."""
    retries = {
        "max_retries": options.max_retries,
        "initial_delay": _FIRST_PAUSE,
        "max_delay": _LONGEST_PAUSE,
    }
    place = {"bucket": url.bucket, "path": url.prefix}
    if url.scheme == "gs":
        return place | {
            "driver": "gcs",
            "gcs_request_retries": retries,
            "gcs_request_concurrency": {"limit": MAX_REQUESTS},
        }
    spec = place | {
        "driver": "s3",
        "aws_credentials": _credentials(options),
        "use_conditional_write": False,
        "s3_request_retries": retries,
        "s3_request_concurrency": {"limit": MAX_REQUESTS},
    }
    if options.endpoint is not None:
        return spec | {"endpoint": options.endpoint, "aws_region": options.region or "us-east-1"}
    return spec | ({"aws_region": options.region} if options.region else {})


def _credentials(options: StoreOptions) -> dict[str, str]:
    takes_profile = options.credentials in {Credentials.DEFAULT, Credentials.PROFILE}
    profile = {"profile": options.profile} if options.profile and takes_profile else {}
    return {"type": options.credentials.value} | profile
