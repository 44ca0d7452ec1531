"""Servers that speak S3, for tests: moto, and Ceph's radosgw where it is installed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import HOST, claim, free_port
from tests.support.processes import until

_START_S = 200.0
_CEPH_PORTS = 1300
_SCRIPTS = Path(__file__).parents[2].parent / "shared" / "tools"
_CEPH = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool", "curl")


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A server, and who may use it."""

    endpoint: str  # its URL
    key: str = "testkey"  # the access key
    secret: str = "testsecret"  # noqa: S105 - of a server on the loopback

    @property
    def variables(self) -> dict[str, str]:
        """What a process has in its environment to use it; fails within seconds."""
        return {
            "DIST_CKPT_S3_ENDPOINT": self.endpoint,
            "DIST_CKPT_S3_CREDENTIALS": "environment",
            "DIST_CKPT_STORE_TIMEOUT_S": "20",
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client, for what checkpoints do not do themselves."""
        import boto3  # noqa: PLC0415 - slow to import, and ranks do not need it

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )

    def make_bucket(self, name: str) -> str:
        """Make a bucket; its URL."""
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def names(self, bucket: str) -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def delete(self, bucket: str, name: str) -> None:
        self.client().delete_object(Bucket=bucket, Key=name)


class Moto:
    """A moto server in a process of its own, which keeps objects in memory and checks no rights."""

    def __init__(self, port: int) -> None:
        self.store = ObjectStore(f"http://{HOST}:{port}")
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _await_port(port, self._process)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once; its objects are gone."""
        self._process.kill()
        self._process.wait()


@contextmanager
def moto() -> Iterator[ObjectStore]:
    """A moto server that is ended on leaving."""
    server = Moto(free_port())
    try:
        yield server.store
    finally:
        server.kill()


def why_no_radosgw() -> str | None:
    """Why there can be no radosgw here; None where there can."""
    missing = [name for name in _CEPH if shutil.which(name) is None]
    if missing:
        return f"Ceph's radosgw is not installed (no {', '.join(missing)})"
    script = _SCRIPTS / "start_radosgw.sh"
    return None if script.exists() else f"{script} is missing"


class Radosgw:
    """Ceph's radosgw, a monitor and a disk in memory, with real credentials."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._port = directory, _ceph_port()
        self.store = ObjectStore(f"http://{HOST}:{self._port}")
        try:
            _start("bash", _SCRIPTS / "start_radosgw.sh", directory, self._port, "memstore")
        except BaseException:
            self.stop()
            raise

    def kill_gateway(self) -> None:
        """Kill the process that serves; its objects stay."""
        os.kill(self._pid("client.rgw"), signal.SIGKILL)

    def start_gateway(self) -> None:
        """Start it again; returns once it listens."""
        (self._directory / "run" / "client.rgw.asok").unlink(missing_ok=True)
        _start("radosgw", "-n", "client.rgw", "-c", self._directory / "ceph.conf")
        _await_port(self._port, None)

    def stop(self) -> None:
        """Kill every process of it."""
        for file in (self._directory / "run").glob("*.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue  # it has ended by itself

    def _pid(self, name: str) -> int:
        return int((self._directory / "run" / f"{name}.pid").read_text())


def _start(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=_START_S)


def _ceph_port() -> int:
    """A port below those that are given out, as those 1000 to 1200 above it must be free too."""
    for port in range(12480, 28000, _CEPH_PORTS):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind((HOST, port))
                other.bind((HOST, port + 1000))
            except OSError:
                continue
        if claim(port):
            return port
    raise OSError("no free ports for radosgw")


def _await_port(port: int, process: subprocess.Popen[bytes] | None) -> None:
    def is_open() -> bool:
        if process is not None and process.poll() is not None:
            raise OSError(f"the server ended with {process.returncode}")
        with socket.socket() as found:
            return found.connect_ex((HOST, port)) == 0

    until(is_open, _START_S)
