"""Credentials and addresses of S3, as Amazon's tools take them, at a server that checks both."""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import boto3
import pytest

from dist_ckpt_strategies import Options, StoreOptions
from dist_ckpt_strategies.errors import StoreAccessError, StrategyError
from dist_ckpt_strategies.strategies.safetensors import PackLoadShardedStrategy
from tests.stores.commands import cuts, differing, write
from tests.support.object_stores import ObjectStore, moto

ALL = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
WRONG = ("AKIAWRONG", "wrong")


@pytest.fixture(scope="module")
def strict_store() -> Iterator[ObjectStore]:
    """A moto server with one user, whose signature it checks, and a bucket."""
    with moto() as store:
        names = {"aws_access_key_id": store.key, "aws_secret_access_key": store.secret}
        iam = boto3.client("iam", endpoint_url=store.endpoint, region_name="us-east-1", **names)
        iam.create_user(UserName="trainer")
        iam.put_user_policy(UserName="trainer", PolicyName="p", PolicyDocument=json.dumps(ALL))
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        store.make_bucket("checkpoints")
        reset = urllib.request.Request(  # noqa: S310 - from now on the server checks
            f"{store.endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(reset).close()  # noqa: S310
        yield replace(store, key=key["AccessKeyId"], secret=key["SecretAccessKey"])


def profile(name: str, key: str, secret: str) -> str:
    return f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"


def use(store: ObjectStore, home: Path, monkeypatch: pytest.MonkeyPatch, credentials: str) -> None:
    """Have this process reach the server, without credentials in its environment."""
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("DIST_CKPT_S3_CREDENTIALS", credentials)
    monkeypatch.setenv("HOME", str(home))
    (home / ".aws").mkdir(exist_ok=True)


CASES = {
    "default": (".aws/credentials", {}),
    "train": (".aws/credentials", {"AWS_PROFILE": "train"}),
    "ours": (".aws/credentials", {"AWS_PROFILE": "none", "DIST_CKPT_S3_PROFILE": "ours"}),
    "other": ("elsewhere", {"AWS_SHARED_CREDENTIALS_FILE": "elsewhere", "AWS_PROFILE": "other"}),
    "profile set": ("settings", {"AWS_CONFIG_FILE": "settings", "AWS_PROFILE": "set"}),
}


@pytest.mark.parametrize(
    ("name", "credentials"), [*product(CASES, ["profile"]), ("default", "default")]
)
def test_a_profile_is_found_where_amazons_tools_find_it(
    name: str,
    credentials: str,
    strict_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, variables = CASES[name]
    use(strict_store, tmp_path, monkeypatch, credentials)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, str(tmp_path / value) if variable.endswith("_FILE") else value)
    others = "" if name == "default" else profile("default", *WRONG)
    (tmp_path / file).write_text(others + profile(name, strict_store.key, strict_store.secret))
    url = f"s3://checkpoints/{credentials}/{name}"
    assert differing(write(url), cuts()) == []
    # The bucket's name in the server's, which then does not expect it in the path.
    port = strict_store.endpoint.rpartition(":")[2]
    monkeypatch.setenv("DIST_CKPT_S3_ENDPOINT", f"http://{{bucket}}.localhost:{port}/")
    assert differing(url, cuts()) == []
    assert differing(write(f"{url}-again"), cuts()) == []


def test_a_profile_that_is_missing_is_named(
    strict_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(strict_store, tmp_path, monkeypatch, "profile")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    (tmp_path / ".aws/credentials").write_text(profile("default", *WRONG))
    with pytest.raises(StoreAccessError, match=r"profile 'absent' in .*\.aws/credentials"):
        write("s3://checkpoints/refused")
    monkeypatch.setenv("AWS_PROFILE", "default")
    with pytest.raises(StoreAccessError, match=r"profile 'default' in .*\.aws/credentials"):
        write("s3://checkpoints/refused")


SETTINGS = {
    "its own": "[profile lab]\nendpoint_url = {}\n",
    "default": "[default]\nregion = eu-north-1\nendpoint_url = {}\n",
    "a service's": "[profile lab]\nservices = lab\nendpoint_url = http://127.0.0.1:1\n\n"
    "[services lab]\ns3 =\n  endpoint_url = {}\n",
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_profile_names_the_server(
    case: str, strict_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(strict_store, tmp_path, monkeypatch, "default")
    monkeypatch.delenv("DIST_CKPT_S3_ENDPOINT")
    name = "default" if case == "default" else "lab"
    monkeypatch.setenv("AWS_PROFILE", name)
    keys = profile(name, strict_store.key, strict_store.secret)
    (tmp_path / ".aws/credentials").write_text(keys)
    (tmp_path / ".aws/config").write_text(SETTINGS[case].format(strict_store.endpoint))
    assert differing(write(f"s3://checkpoints/named/{name}-{len(case)}"), cuts()) == []
    # The options of a strategy come first, then a variable.
    store = StoreOptions(endpoint=strict_store.endpoint)
    loader = PackLoadShardedStrategy(options=Options(store=store))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert differing(f"s3://checkpoints/named/{name}-{len(case)}", cuts(), loader) == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", strict_store.endpoint)
    (tmp_path / ".aws/config").write_text(SETTINGS[case].format("http://127.0.0.1:1"))
    assert differing(f"s3://checkpoints/named/{name}-{len(case)}", cuts()) == []
    (tmp_path / ".aws/config").write_text(f"[profile {name}")
    with pytest.raises(StrategyError, match=r"\.aws/config: no settings of Amazon's tools"):
        write("s3://checkpoints/refused")
