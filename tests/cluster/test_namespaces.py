"""The cluster itself: nodes that differ, links that fail, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import ROOT, Cluster, why_not
from tests.support.processes import is_running, until

pytestmark = [pytest.mark.multiprocess, pytest.mark.skipif(bool(why_not()), reason=why_not())]

OWNER = """
import sys, time
from pathlib import Path
from tests.cluster.namespaces import Cluster
with Cluster(Path(sys.argv[1]), ["a"]) as cluster:
    print(cluster.up("a").pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, ["a", "b", "c"]) as found:
        for name in ("a", "b", "c"):
            found.up(name)
        yield found


def reaches(cluster: Cluster, name: str, other: str) -> bool:
    """Whether packets of a node come to another, and those of the other back."""
    knock = (
        "import socket\n"
        f"try: socket.create_connection(('{other}', 99), timeout=1)\n"
        "except ConnectionRefusedError: print('reached')\n"
        "except TimeoutError: print('silence')"
    )
    log = cluster.directory / f"{name}.{len(cluster.nodes[name].processes)}.log"
    assert cluster.nodes[name].start(sys.executable, "-S", "-c", knock, log=log).wait(60) == 0
    return log.read_text() == "reached\n"


def test_links_fail_and_come_back(cluster: Cluster) -> None:
    assert reaches(cluster, "a", "b")
    cluster.unplug("b")
    assert not reaches(cluster, "a", "b")
    assert reaches(cluster, "a", "c")
    cluster.replug("b")
    cluster.partition(["a", "b"], ["c"])
    assert reaches(cluster, "a", "b")
    assert not reaches(cluster, "a", "c")
    cluster.partition(["a", "b", "c"])
    assert reaches(cluster, "a", "c")
    cluster.lossy("b", 1.0)
    assert not reaches(cluster, "a", "b")
    cluster.mend("b")
    cluster.crash("c")
    assert not reaches(cluster, "a", "c")
    cluster.up("c")
    assert reaches(cluster, "a", "c")
    assert reaches(cluster, "c", "b")


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert owner.stdout is not None
    first = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()

    until(lambda: not is_running(first))
    until(lambda: str(tmp_path) not in Path("/proc/self/mounts").read_text())
