"""What an object store's errors mean, in our own terms."""

from __future__ import annotations

import re
from enum import StrEnum

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CorruptCheckpointError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.spec.store_url import StoreUrl

_DETAIL = re.compile(r" \[[a-z0-9_-]+='.*", re.DOTALL)
"""What TensorStore appends: codes, ids and the body of the response."""

_NO_CREDENTIALS = "Failed to get credentials"
_RETRIED = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
_NO_BUCKET = ("NoSuchBucket", "The specified bucket does not exist")


def no_answer(path: str, timeout_s: float, why: str) -> StoreUnreachableError:
    """The error for a request that has not ended, retries included.

    Args:
        path: what was asked for.
        timeout_s: how long it was waited for.
        why: what one more try without retries gave; empty where that tells nothing.
    """
    reason = f" ({why})" if why else ""
    return StoreUnreachableError(
        f"{path}: the object store did not answer within {timeout_s:g} s, retries included"
        f"{reason}; see that it runs and can be reached, or raise DIST_CKPT_STORE_TIMEOUT_S, and "
        "timeout_s of the save or load, of which a request takes three quarters at most",
        path=path,
    )


def shortened(error: Exception) -> str:
    """What TensorStore says, without codes, ids and bodies."""
    return _DETAIL.sub("", str(error))


class Deed(StrEnum):
    """What a request was to do; the values are words for it."""

    READ = "read"
    PUT = "put"
    DELETE = "delete"
    LIST = "list"


_RIGHTS = {
    "s3": {
        Deed.READ: "s3:GetObject",
        Deed.PUT: "s3:PutObject",
        Deed.DELETE: "s3:DeleteObject",
        Deed.LIST: "s3:ListBucket",
    },
    "gs": {
        Deed.READ: "storage.objects.get",
        Deed.PUT: "storage.objects.create",
        Deed.DELETE: "storage.objects.delete",
        Deed.LIST: "storage.objects.list",
    },
}
"""What an owner has to grant, in Amazon's words and in Google's."""

_WHEN_DELETED = "; a save to a new URL deletes nothing, a conversion its own notes"


def bucket_not_found(url: StoreUrl, server: str) -> BucketNotFoundError:
    """The error for a bucket that is not there.

    Args:
        url: the checkpoint; none of its objects is at fault.
        server: where the bucket was looked for.
    """
    return BucketNotFoundError(
        f"{url}: there is no bucket {url.bucket!r} at {server}; make it, or mend the URL or the "
        "endpoint",
        path=str(url),
    )


def store_error(
    error: Exception, deed: Deed, path: str, url: StoreUrl, server: str
) -> StorageError:
    """What an error of TensorStore's means; its text starts with a status.

    Args:
        error: what TensorStore raised.
        deed: what the request was to do.
        path: the URL that it was about.
        url: the checkpoint.
        server: who was asked.
    """
    text = str(error)
    status = text.partition(":")[0]
    short = shortened(error)
    if any(phrase in text for phrase in _NO_BUCKET):
        return bucket_not_found(url, server)
    if status in {"PERMISSION_DENIED", "UNAUTHENTICATED"} or _NO_CREDENTIALS in text:
        return StoreAccessError(
            f"{path}: the object store refuses access, to {deed} it ({short}); see the credentials "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role) and "
            f"what they may do in bucket {url.bucket!r}: this takes {_RIGHTS[url.scheme][deed]}"
            f"{_WHEN_DELETED if deed is Deed.DELETE else ''}",
            path=path,
        )
    if status == "OUT_OF_RANGE":
        return CorruptCheckpointError(f"{path} is shorter than it was written ({short})", path=path)
    if status in _RETRIED:
        return StoreUnreachableError(
            f"{path}: the object store cannot be reached, or fails ({short})", path=path
        )
    return StorageError(f"{path}: {short}", path=path)
