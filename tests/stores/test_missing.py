"""What is not there, or may not be reached, is distinguished, within the time that is set."""

import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException

import dist_ckpt_strategies
from dist_ckpt_strategies import load_latest
from dist_ckpt_strategies.config import Credentials, Options, StoreOptions
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
    StorageTimeoutError,
    StoreAccessError,
    StrategyError,
)
from dist_ckpt_strategies.strategies.safetensors import (
    PackLoadShardedStrategy,
    PackSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.stores.commands import ONE_SERVER, cuts, differing, write
from tests.support.faulty_proxy import DENIED, NONE, Fault, FaultyProxy, Request
from tests.support.folders import Folder
from tests.support.object_stores import ObjectStore
from tests.support.ports import free_port
from tests.support.sharding import differences, no_data, on_grid, state_of


def load(url: str | Path) -> Any:
    return dist_ckpt_strategies.load(state_of(0, cuts(), no_data), url)


def prune(url: str) -> Any:
    return dist_ckpt_strategies.prune(url, keep_last=1)


WAYS: dict[str, Callable[[str], Any]] = {"save": write, "load": load}
BOTH_WAYS = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
READING: dict[str, Callable[[str], Any]] = {
    "load": load,
    "strategy": lambda url: PackLoadShardedStrategy().load_tensors_metadata(url),
    "load_latest": lambda url: load_latest(None, [url], load),
    "prune": prune,
    "convert": lambda url: dist_ckpt_strategies.convert(url, f"{url}-2", "pack"),
    "diff": lambda url: dist_ckpt_strategies.diff(url, url),
}


@BOTH_WAYS
def test_an_expired_token_is_a_matter_of_access(
    proxy: FaultyProxy, bucket: str, way: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in proxy.store.variables.items():
        monkeypatch.setenv(name, value)
    with (
        proxy.faulty(lambda _: Fault(status=400)),
        pytest.raises(StoreAccessError, match=r"token that has expired.*AWS_ACCESS_KEY_ID"),
    ):
        way(f"s3://{bucket}/run")


@pytest.mark.parametrize("way", [write, *READING.values()], ids=["save", *READING])
def test_a_bucket_that_is_missing_is_named(
    environment: ObjectStore, way: Callable[[str], Any]
) -> None:
    with pytest.raises(StoreAccessError, match="'not-there'") as caught:
        way("s3://not-there/run")

    assert isinstance(caught.value, CheckpointingException) or way not in WAYS.values()
    assert caught.value.path == "s3://not-there/run"
    assert str(caught.value).count("s3://") == 1  # no name of an object that was asked for
    assert f"at {environment.endpoint}; make it" in str(caught.value)


def test_a_checkpoint_that_is_missing_is_not_taken_for_an_unfinished_one(in_bucket: Folder) -> None:
    url = in_bucket.address
    for way in READING.values():
        with pytest.raises(CheckpointNotFoundError, match=url):
            way(url)

    in_bucket.put("manifest/save.json", b"{}")
    with pytest.raises(IncompleteCheckpointError, match=r"metadata\.json"):
        load(url)
    with pytest.raises(CheckpointNotFoundError):
        load(url[:-1])


@pytest.mark.parametrize(
    ("store", "name", "value", "said"),
    [
        ("radosgw", "AWS_ACCESS_KEY_ID", "wrong", "credentials"),
        ("radosgw", "AWS_SECRET_ACCESS_KEY", "wrong", "credentials"),
        ("moto", "AWS_ACCESS_KEY_ID", "", "AWS_ACCESS_KEY_ID"),
    ],
    indirect=["store"],
)
@pytest.mark.usefixtures("environment")
def test_wrong_or_no_credentials_are_said_to_be_that(
    bucket: str, name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    for way in WAYS.values():
        with pytest.raises(StoreAccessError, match=said) as caught:
            way(f"s3://{bucket}/run")
        assert isinstance(caught.value, PermissionError)


@BOTH_WAYS
def test_a_server_that_is_not_there_is_given_up_in_time(
    way: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = ObjectStore(f"http://127.0.0.1:{free_port()}")
    for name, value in unreachable.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "2")
    started = time.monotonic()

    with pytest.raises(StorageTimeoutError, match=r"within 2 s.*[Cc]ould not connect"):
        way("s3://some-bucket/run")

    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("said", "urls"),
    [
        ("expected s3://bucket/path", ["ftp://host/path", "S3://bucket/run"]),
        ("name of a bucket", ["s3://", "s3:///run", "s3://b", "s3://buck et/run"]),
        ("name of a bucket", ["s3://user:secret@bucket/a"]),
        ("a path in a bucket", [f"s3://bucket/{path}" for path in ("a//b", "../b", "a?b", "a*")]),
        (r"a directory of that name is \./s3:bucket/run", ["s3:bucket/run"]),
        ("file:///path", ["file://host/path"]),
        ("pass it as a str", [Path("s3://bucket/run")]),
        ("empty", [""]),
    ],
)
@BOTH_WAYS
def test_an_address_that_makes_no_sense_is_refused(
    said: str, urls: list[str | Path], way: Callable[[str | Path], Any]
) -> None:
    for url in urls:
        with pytest.raises(StrategyError, match=said):
            way(url)


ANSWERS = {
    "NoSuchBucket": (404, StoreAccessError),
    "SignatureDoesNotMatch": (403, StoreAccessError),
    "InvalidAccessKeyId": (403, StoreAccessError),
    "Unauthorized": (401, StoreAccessError),
    "SlowDown": (503, StorageTimeoutError),
    "KeyTooLong": (400, StorageError),
}


@ONE_SERVER
@pytest.mark.parametrize(("code", "way"), zip(ANSWERS, cycle((write, load)), strict=False))
def test_each_answer_of_a_server_has_its_class_of_error(
    code: str, way: Callable[[str], Any], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, kind = ANSWERS[code]
    answer = f"<Error><Code>{code}</Code><Message>No</Message></Error>".encode()
    url = f"{proxy.store.make_bucket(f'answers-{code.lower()}-{way.__name__}')}/run"
    write(url)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "3")
    fault = Fault(status=status, content=answer)
    with proxy.faulty(lambda _: fault), pytest.raises(kind, match=url) as caught:
        way(url)

    assert "http_response" not in str(caught.value)


RIGHTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "PUT": (write, "this takes s3:PutObject"),
    "GET": (lambda root: load(f"{root}/iter_1"), "this takes s3:GetObject"),
    "DELETE": (prune, "this takes s3:DeleteObject.*a save to a new URL deletes nothing"),
}


@ONE_SERVER
@pytest.mark.parametrize("method", RIGHTS)
def test_a_refusal_says_which_right_it_takes(method: str, proxy: FaultyProxy, bucket: str) -> None:
    root, (act, said) = f"s3://{bucket}/run", RIGHTS[method]
    for number in (1, 2):
        write(f"{root}/iter_{number}")

    def decide(request: Request) -> Fault:
        return DENIED if request.method == method and "list-type" not in request.path else NONE

    with proxy.faulty(decide), pytest.raises(StoreAccessError, match=said):
        act(root)


def test_format_1_and_others_take_no_url() -> None:
    state = {"w": torch.zeros(2)}
    for strategy in (("zarr", 1), ("local_replicated", 1), ("torch_dist", 1)):
        with pytest.raises(StrategyError, match=r"s3://bucket/run.*file system"):
            dist_ckpt_strategies.save(state, "s3://bucket/run", strategy)
    with pytest.raises(StrategyError, match=r"s3://bucket/run.*file system"):
        ZarrSaveShardedStrategy().save(state_of(0, cuts()), "s3://bucket/run")


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    write(f"file://{tmp_path}/with%20space")

    assert (tmp_path / "with space" / "metadata.json").exists()
    for place in (tmp_path / "with space", f"file://{tmp_path}/with space"):
        assert differing(str(place), cuts()) == []


@ONE_SERVER
def test_a_strategy_reaches_the_store_as_its_own_options_say(
    store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.variables.items():
        if name.startswith("AWS"):
            monkeypatch.setenv(name, value)
    options = Options(store=StoreOptions(store.endpoint, credentials=Credentials.ENVIRONMENT))
    loader = PackLoadShardedStrategy(options=options)
    url = f"s3://{bucket}/run"

    saver = PackSaveShardedStrategy(options=options)
    dist_ckpt_strategies.save(state_of(0, cuts()), url, saver)

    assert differing(url, cuts(), loader) == []
    assert differences(0, cuts(), loader.load(state_of(0, cuts(), no_data), url)) == []
    assert set(loader.load_tensors_metadata(url)) == {"v", "w"}


def test_a_finished_checkpoint_is_only_replaced_when_that_is_asked_for(in_bucket: Folder) -> None:
    url = f"{in_bucket.address}/c"
    write(url)
    for name in ("c/notes.txt", "c-2/packs/x"):
        in_bucket.put(name, b"mine")
    other = on_grid("other", (4, 4), (1, 1))

    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        write(url)
    dist_ckpt_strategies.save(state_of(0, [other]), url, overwrite=True)

    loaded: Any = dist_ckpt_strategies.load(state_of(0, [other], no_data), url)
    assert set(loaded) == {"other #0"}
    names = in_bucket.names()
    assert len([n for n in names if n.startswith("c/packs/")]) == 1
    assert {"c/notes.txt", "c-2/packs/x"} <= set(names)
