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
from dist_ckpt_strategies.storage.bucket import Operation, store_error
from dist_ckpt_strategies.storage.files import StoreUrl

RUN = StoreUrl("s3", "bucket", "run")
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
    found = store_error(ValueError(text), Operation.PUT, "s3://bucket/run/x", RUN, "http://host")

    named = "s3://bucket/run" if kind is BucketNotFoundError else "s3://bucket/run/x"
    assert type(found) is kind
    assert found.path == named
    assert found.message.startswith(f"{named}:" if kind is not CorruptCheckpointError else named)
    assert "http_response" not in found.message


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("operation", Operation)
def test_a_refusal_says_what_was_refused_and_which_right_it_takes(
    scheme: str, operation: Operation
) -> None:
    url = StoreUrl(scheme, "bucket", "run")

    found = store_error(
        ValueError("PERMISSION_DENIED: no"), operation, f"{url}/x", url, "http://host"
    )

    right = {
        Operation.READ: "s3:GetObject storage.objects.get",
        Operation.PUT: "s3:PutObject storage.objects.create",
        Operation.DELETE: "s3:DeleteObject storage.objects.delete",
        Operation.LIST: "s3:ListBucket storage.objects.list",
    }[operation].split()[scheme == "gs"]
    assert f"to {operation} it" in found.message
    assert f"this takes {right}" in found.message
    assert ("a save to a new URL deletes nothing" in found.message) == (
        operation is Operation.DELETE
    )
