"""What TensorStore says of an object store becomes an error that a handler can choose by."""

from __future__ import annotations

import pytest

from dist_ckpt_strategies.errors import (
    BucketNotFoundError,
    CorruptCheckpointError,
    StorageError,
    StoreAccessError,
    StoreUnreachableError,
)
from dist_ckpt_strategies.storage.buckets.errors import store_error

DETAIL = " [http_response_code='403'] [http_response_body='<Error>...</Error>']"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            f"NOT_FOUND: NoSuchBucket: The specified bucket does not exist{DETAIL}",
            BucketNotFoundError,
        ),
        (f"NOT_FOUND: NoSuchBucket{DETAIL}", BucketNotFoundError),
        (f"PERMISSION_DENIED: SignatureDoesNotMatch{DETAIL}", StoreAccessError),
        (f"PERMISSION_DENIED: InvalidAccessKeyId{DETAIL}", StoreAccessError),
        (f"UNAUTHENTICATED: Unauthorized{DETAIL}", StoreAccessError),
        ("INTERNAL: Failed to get credentials from provider: aws-c-auth: ...", StoreAccessError),
        ("ABORTED: All 4 retry attempts failed: CURL error ...", StoreUnreachableError),
        (f"UNAVAILABLE: 503{DETAIL}", StoreUnreachableError),
        ("OUT_OF_RANGE: Requested byte range [5, 15) was not satisfied", CorruptCheckpointError),
        (f"INVALID_ARGUMENT: KeyTooLong{DETAIL}", StorageError),
    ],
)
def test_each_answer_has_its_class(text: str, kind: type[StorageError]) -> None:
    found = store_error(ValueError(text), "s3://bucket/run/x", "bucket")

    assert type(found) is kind
    assert found.path == "s3://bucket/run/x"
    assert found.message.startswith("s3://bucket/run/x")
    assert "http_response" not in found.message
