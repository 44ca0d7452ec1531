"""What an object store's errors mean, in our own terms."""

from __future__ import annotations

import re

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CorruptCheckpointError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)

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
        f"{reason}; see that it runs and can be reached, or raise DIST_CKPT_STORE_TIMEOUT_S",
        path=path,
    )


def shortened(error: Exception) -> str:
    """What TensorStore says, without codes, ids and bodies."""
    return _DETAIL.sub("", str(error))


def bucket_not_found(path: str, bucket: str) -> BucketNotFoundError:
    """The error for a bucket that is not there."""
    return BucketNotFoundError(
        f"{path}: there is no bucket {bucket!r}; make it, or mend the URL", path=path
    )


def store_error(error: Exception, path: str, bucket: str) -> StorageError:
    """What an error of TensorStore's means; its text starts with a status."""
    text = str(error)
    status = text.partition(":")[0]
    short = shortened(error)
    if any(phrase in text for phrase in _NO_BUCKET):
        return bucket_not_found(path, bucket)
    if status in {"PERMISSION_DENIED", "UNAUTHENTICATED"} or _NO_CREDENTIALS in text:
        return StoreAccessError(
            f"{path}: the object store refuses access ({short}); see the credentials "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role) and "
            f"what they may do in bucket {bucket!r}",
            path=path,
        )
    if status == "OUT_OF_RANGE":
        return CorruptCheckpointError(f"{path} is shorter than it was written ({short})", path=path)
    if status in _RETRIED:
        return StoreUnreachableError(
            f"{path}: the object store cannot be reached, or fails ({short})", path=path
        )
    return StorageError(f"{path}: {short}", path=path)
