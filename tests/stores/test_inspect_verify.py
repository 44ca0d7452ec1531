"""``dist-ckpt inspect`` and ``verify`` of checkpoints in object stores."""

from __future__ import annotations

import time

import pytest

from tests.stores.commands import CHUNK, PACK, json_of, problems, run, write
from tests.support.faulty_proxy import BUSY, NONE, Fault, FaultyProxy, Request
from tests.support.object_stores import ObjectStore
from tests.support.ports import free_port

ONE_SERVER = pytest.mark.parametrize("store", ["moto"], indirect=True)
BOTH_COMMANDS = pytest.mark.parametrize("command", ["inspect", "verify"])
INDEX = "manifest/index.json"
PART = "manifest/part-00000.json"


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_inspect_shows_what_the_manifest_says(environment: ObjectStore, bucket: str) -> None:
    url = write(f"s3://{bucket}/run/iter_0000003")
    environment.put(bucket, "run/iter_0000003/notes.txt", b"mine")

    lines = run("inspect", url).stdout.splitlines()

    assert lines[1].split()[:4] == ["v", "300x200", "float32", "300x200"]
    shown = {line[:12].strip(): line[12:] for line in lines if line[:12].strip()}
    assert shown["checkpoint"] == url
    assert shown["beside it"] == "notes.txt"
    assert shown["complete"].startswith("yes, by names; ")
    found = json_of("inspect", url, "--keys", "w")
    place = environment.place(bucket, "run/iter_0000003")
    names = [n for n in environment.names(bucket) if n.startswith(place)]
    assert (found["path"], found["complete"], found["num_files"]) == (url, True, len(names))
    sizes = [len(environment.read(bucket, name)) for name in names]
    unlisted = ("metadata.json", INDEX, "manifest/save.json")
    listed = [s for n, s in zip(names, sizes, strict=True) if not n.endswith(unlisted)]
    assert found["nbytes"] == sum(listed)
    (array,) = found["arrays"]
    content = environment.read(bucket, f"{place}/{CHUNK}")
    assert array["file_nbytes"] == len(content)


def test_a_whole_checkpoint_verifies(environment: ObjectStore, bucket: str) -> None:
    url = write(f"s3://{bucket}/run")

    result = run("verify", f"{url}/")

    assert result.exit_code == 0, result.stderr
    assert f"{url} is whole\n" in result.stdout
    assert json_of("verify", url)["whole"] is True


@ONE_SERVER
def test_verify_lists_all_damage_not_just_the_first(environment: ObjectStore, bucket: str) -> None:
    url = write(f"s3://{bucket}/run")

    below = environment.place(bucket)

    def change(name: str, place: int) -> None:
        content = environment.read(bucket, f"{below}/{name}")
        environment.put(bucket, f"{below}/{name}", flipped(content, place))

    change(CHUNK, 5)
    change(CHUNK, -1)
    change("arrays/w/zarr.json", 20)
    change(PACK, 40)
    change("common.pt", 40)
    environment.delete(bucket, f"{below}/arrays/v/c.0.0")
    environment.put(bucket, f"{below}/arrays/stray", b"x")
    environment.put(bucket, f"{below}/metadata.json", b"{}")

    assert problems(url) == {
        CHUNK: {"damaged"},
        "arrays/w/zarr.json": {"damaged"},
        PACK: {"damaged"},
        "common.pt": {"damaged"},
        "arrays/v/c.0.0": {"missing_file"},
        "arrays/stray": {"unexpected_file"},
        "metadata.json": {"damaged"},
    }
    result = run("verify", url)
    assert result.exit_code == 1
    assert "is NOT whole: 8 issues in 7 files" in result.stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (CHUNK, "wrong_size"),
        (PACK, "wrong_size"),
        ("common.pt", "damaged"),
        (INDEX, "damaged"),
        (PART, "damaged"),
        ("metadata.json", "damaged"),
    ],
)
@ONE_SERVER
def test_an_object_of_another_size_is_found(
    environment: ObjectStore, bucket: str, name: str, problem: str
) -> None:
    url = write(f"s3://{bucket}/run")
    place = environment.place(bucket)
    content = environment.read(bucket, f"{place}/{name}")

    for changed, found in ((content[:-1], "fewer bytes"), (content + b"x", "more bytes")):
        environment.put(bucket, f"{place}/{name}", changed)
        (finding,) = json_of("verify", url)["findings"]
        assert (finding["path"], finding["problem"]) == (name, problem)
        if name in {CHUNK, PACK}:
            assert finding["found"] == found


@BOTH_COMMANDS
def test_an_unfinished_save_is_told_as_such(
    environment: ObjectStore, bucket: str, command: str
) -> None:
    url = write(f"s3://{bucket}/run")
    place = environment.place(bucket)
    environment.delete(bucket, "run/metadata.json")

    result = run(command, url)

    assert result.exit_code == 1
    assert "has not ended, or was killed" in result.stdout
    environment.delete(bucket, f"{place}/{INDEX}")
    assert run(command, url).exit_code == 1


@BOTH_COMMANDS
def test_what_is_missing_or_no_checkpoint_is_told_apart(
    environment: ObjectStore, bucket: str, command: str
) -> None:
    write(f"s3://{bucket}/run/iter_0000003")
    environment.put(bucket, "other/x", b"x")

    for address, said in {
        f"s3://{bucket}/ru": "there is no checkpoint",
        f"s3://{bucket}/run": "is no checkpoint, but holds 1 (iter_0000003)",
        f"s3://{bucket}/other": "no checkpoint of format ('zarr', 2)",
        "s3://not-there/run": "no bucket 'not-there'",
        "ftp://host/run": "expected s3://bucket/path",
    }.items():
        result = run(command, address)
        assert result.exit_code == (2 if address.startswith("ftp:") else 3), address
        assert said in result.stderr, (address, result.stderr)
        assert result.stderr.count("\n") == 1


@BOTH_COMMANDS
def test_a_server_that_is_not_there_is_given_up_in_time(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ObjectStore(f"http://127.0.0.1:{free_port()}").variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "2")
    started = time.monotonic()

    result = run(command, "s3://some-bucket/run")

    assert result.exit_code == 3
    assert "within 2 s" in result.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("fault", [BUSY, Fault(delay_s=30)], ids=["busy", "silent"])
@ONE_SERVER
def test_a_server_that_fails_while_it_is_read_is_no_damage(
    environment: ObjectStore, bucket: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(f"s3://{bucket}/run")
    monkeypatch.setenv("DIST_CKPT_STORE_TIMEOUT_S", "4")

    def decide(request: Request) -> Fault:
        return fault if request.path.partition("?")[0].endswith("/c.0.0") else NONE

    with FaultyProxy(environment) as proxy, proxy.faulty(decide):
        monkeypatch.setenv("DIST_CKPT_S3_ENDPOINT", proxy.store.endpoint)
        result = run("verify", url)

    assert result.exit_code == 3
    assert "within 4 s" in result.stderr
    assert result.stdout == ""
