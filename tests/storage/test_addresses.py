"""A URL with a typing error is not taken for the name of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.storage.urls import parsed_address


@pytest.mark.parametrize("text", ["s3:bucket/run", "s3:/bucket/run", "gs:bucket", "file:/run"])
def test_a_url_without_its_slashes_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=f"a directory of that name is ./{text}"):
        parsed_address(text)


@pytest.mark.parametrize("text", ["./s3:bucket", "s3", "runs/s3:old", "/gs:x"])
def test_a_directory_may_have_such_a_name(text: str) -> None:
    assert parsed_address(text) == Path(text).absolute()
