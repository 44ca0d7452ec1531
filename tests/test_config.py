"""Options refuse what could only hang or crash later, and the environment is read in one place."""

from collections.abc import Callable
from dataclasses import fields

import pytest

from dist_ckpt_strategies.config import (
    Credentials,
    Options,
    StoreOptions,
    options_from_environment,
    store_options_from_environment,
)
from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.launch import outlive_nccl_errors


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without any variable, for the test alone."""
    variables: dict[str, str] = {}
    monkeypatch.setattr("os.environ", variables)
    return variables


def test_each_option_has_its_variable_which_is_read_when_it_is_asked_for(
    environ: dict[str, str],
) -> None:
    environ |= {"TIMEOUT_S": "1", "DIST_CKPT_": "x"}
    assert options_from_environment() == Options()
    assert store_options_from_environment() == StoreOptions()
    environ |= {
        "DIST_CKPT_TIMEOUT_S": "60.5",
        "DIST_CKPT_MAX_INFLIGHT_BYTES": "1048576",
        "DIST_CKPT_IO_THREADS": "7",
        "DIST_CKPT_DIRECT_IO": "0",
        "DIST_CKPT_WHOLE_FLUSH": "0",
        "DIST_CKPT_S3_ENDPOINT": "https://store:9000",
        "DIST_CKPT_S3_REGION": "here",
        "DIST_CKPT_S3_CREDENTIALS": "profile",
        "DIST_CKPT_S3_PROFILE": "training",
        "DIST_CKPT_STORE_TIMEOUT_S": "5.5",
        "DIST_CKPT_STORE_MAX_RETRIES": "3",
    }

    assert options_from_environment() == Options(60.5, 1 << 20, 7)
    assert store_options_from_environment() == StoreOptions(
        "https://store:9000", "here", Credentials.PROFILE, "training", 5.5, max_retries=3
    )


def test_the_variables_of_amazons_tools_come_after_our_own(environ: dict[str, str]) -> None:
    environ |= {"AWS_ENDPOINT_URL": "http://theirs", "AWS_DEFAULT_REGION": "theirs"}
    assert store_options_from_environment() == StoreOptions("http://theirs", "theirs")

    environ |= {"DIST_CKPT_S3_ENDPOINT": "http://ours", "AWS_REGION": "nearer"}
    assert store_options_from_environment() == StoreOptions("http://ours", "nearer")
    environ["DIST_CKPT_S3_ENDPOINT"] = ""
    assert store_options_from_environment() == StoreOptions("http://theirs", "nearer")


def test_keys_are_chosen_by_a_glob_or_a_function() -> None:
    with pytest.raises(StrategyError, match="option only: expected a glob or a function"):
        Options(only=["*lora*"])  # type: ignore[arg-type]


NONSENSE = {
    options_from_environment: [
        (f"DIST_CKPT_{one.name.upper()}", value)
        for one in fields(Options)
        if one.name not in {"store", "base", "only"}  # any text is a place, or a glob
        for value in ("many", "1 000", "0x10", "-1", "-0", "nan", "inf")
    ],
    store_options_from_environment: [
        ("DIST_CKPT_S3_ENDPOINT", "store:9000"),
        ("AWS_ENDPOINT_URL", "s3://store"),
        ("DIST_CKPT_S3_CREDENTIALS", "secret"),
        ("DIST_CKPT_STORE_TIMEOUT_S", "0"),
        ("DIST_CKPT_STORE_TIMEOUT_S", "soon"),
        ("DIST_CKPT_STORE_MAX_RETRIES", "1.5"),
    ],
}


@pytest.mark.parametrize("read", NONSENSE)
def test_a_variable_that_makes_no_sense_is_refused_by_its_name_or_the_options(
    read: Callable[[], object], environ: dict[str, str]
) -> None:
    for name, value in NONSENSE[read]:
        environ[name] = value
        with pytest.raises(StrategyError, match=f"(?i){name.removeprefix('DIST_CKPT_')}"):
            read()
        del environ[name]


@pytest.mark.parametrize("before", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}])
def test_nccl_leaves_the_process_alive_under_torchrun_too(
    before: dict[str, str], environ: dict[str, str]
) -> None:
    environ |= before
    outlive_nccl_errors()
    outlive_nccl_errors()

    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    with pytest.raises(StrategyError, match="TORCH_NCCL_ASYNC_ERROR_HANDLING=3"):
        outlive_nccl_errors()
