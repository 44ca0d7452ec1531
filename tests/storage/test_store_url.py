"""URLs of object stores: what they mean, and which mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.storage.files import StoreUrl, parsed_address


@pytest.mark.parametrize(
    ("text", "expected", "prefix"),
    [
        ("s3://some.bucket-1", StoreUrl("s3", "some.bucket-1", ""), ""),
        ("s3://bucket/", StoreUrl("s3", "bucket", ""), ""),
        ("s3://bucket/a", StoreUrl("s3", "bucket", "a"), "a/"),
        ("gs://bucket_1/a/b c/%41//", StoreUrl("gs", "bucket_1", "a/b c/%41"), "a/b c/%41/"),
    ],
)
def test_a_url_is_a_scheme_a_bucket_and_a_path(text: str, expected: StoreUrl, prefix: str) -> None:
    assert StoreUrl.parse(text) == expected
    assert expected.prefix == prefix
    assert StoreUrl.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "bucket/path", "s3:/bucket/path", "S3://bucket/path", "http://bucket/path"),
        *("s3://", "s3:///path", "s3://b", "s3://-bucket/path", "s3://buck et/path"),
        *("s3://bucket//path", "s3://bucket/a//b", "s3://bucket/./b", "s3://bucket/../b"),
        *("s3://bucket/a?b", "s3://bucket/a#b", "s3://bucket/a*", "s3://bucket/a\\b"),
        *("s3://bucket/a\0b", "s3://user:secret@bucket/a"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=r"expected|name of a bucket|a path in a bucket"):
        StoreUrl.parse(text)


@given(st.text(max_size=20))
def test_any_path_is_kept_as_it_is_or_refused(path: str) -> None:
    try:
        found = StoreUrl.parse(f"s3://bucket/{path}")
    except StrategyError:
        return
    assert found.path == path.rstrip("/")


@pytest.mark.parametrize("text", ["s3:bucket/run", "s3:/bucket/run", "gs:bucket", "file:/run"])
def test_a_url_without_its_slashes_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=f"a directory of that name is ./{text}"):
        parsed_address(text)


@pytest.mark.parametrize("text", ["./s3:bucket", "s3", "runs/s3:old", "/gs:x"])
def test_a_directory_may_have_such_a_name(text: str) -> None:
    assert parsed_address(text) == Path(text).absolute()
