"""``prune`` in object stores and directories: old checkpoints and killed saves go, no others."""

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.config import Credentials, StoreOptions
from dist_ckpt_strategies.tools.prune import Status
from tests.stores.commands import ONE_SERVER, write
from tests.support.faulty_proxy import BUSY, NONE, Fault, FaultyProxy, Request
from tests.support.folders import Folder
from tests.support.object_stores import ObjectStore

PACKS = ("safetensors", 1)


def folders_in(root: Folder) -> list[str]:
    return sorted({name.partition("/")[0] for name in root.names()})


def test_old_ones_go_and_what_is_no_part_of_them_stays(place: Folder) -> None:
    root = place.address
    for number in range(1, 6):
        write(f"{root}/iter_{number:07d}", number, PACKS)
    write(f"{root}/iter_0000001/inner", backend=PACKS)
    for name in ("index", "metadata.json"):
        place.delete(f"iter_0000005/{name}")
    place.put("iter_0000001/notes/mine", b"x")
    place.put("iter_0000001/train_dataloader.pt", b"x")
    place.put("iter_0000009/mine", b"x")
    place.put("latest_checkpointed_iteration.txt", b"3")
    before = set(place.names())

    plan = dist_ckpt_strategies.prune(root, keep_last=1, dry_run=True)
    assert set(place.names()) == before
    report = dist_ckpt_strategies.prune(root, keep_last=1)

    assert plan.removed[1] == report.removed[1]
    assert [(one.name, one.stays) for one in report.removed] == [
        ("iter_0000001", ("inner", "notes", "train_dataloader.pt")),
        ("iter_0000002", ()),
    ]
    assert report.nbytes > 4 * 300 * 200 * 4
    assert str(report.root) == root
    kept = {one.name[-1]: one for one in report.kept}
    assert kept["3"].why == "the run's tracker file names it"
    assert (kept["4"].status, kept["4"].why) == (Status.COMPLETE, "the newest")
    assert (kept["5"].status, kept["9"].status) == (Status.UNFINISHED, Status.OTHER)
    gone = ("iter_0000001/", "iter_0000002/")
    stays = tuple(f"iter_0000001/{name}" for name in report.removed[0].stays)
    left = {name for name in before if name.startswith(stays) or not name.startswith(gone)}
    assert set(place.names()) == left


@pytest.fixture
def root(in_bucket: Folder) -> Folder:
    """Four checkpoints, the last of them killed before its end."""
    for number in range(1, 5):
        write((in_bucket / f"iter_{number:07d}").address, number, PACKS)
    for name in ("index", "metadata.json"):
        in_bucket.delete(f"iter_0000004/{name}")
    return in_bucket


@ONE_SERVER
def test_a_prune_that_breaks_off_leaves_nothing_that_counts_and_the_next_goes_on(
    environment: ObjectStore, root: Folder
) -> None:
    def decide(request: Request) -> Fault:
        is_of_first = "iter_0000001/packs/" in request.path
        return BUSY if request.method == "DELETE" and is_of_first else NONE

    with FaultyProxy(environment) as proxy, proxy.faulty(decide):
        endpoint = proxy.store.endpoint
        options = StoreOptions(endpoint, credentials=Credentials.ENVIRONMENT, timeout_s=4)
        with pytest.raises(TimeoutError, match="within 4 s"):
            dist_ckpt_strategies.prune(root.address, keep_last=1, store=options)

    left = {one.name: one.status for one in dist_ckpt_strategies.prune(root.address).kept}
    assert left["iter_0000001"] is Status.UNFINISHED
    assert left["iter_0000002"] is Status.COMPLETE
    report = dist_ckpt_strategies.prune(root.address, keep_last=1, unfinished=True, older_than_s=0)
    assert [one.name for one in report.removed] == ["iter_0000001", "iter_0000004", "iter_0000002"]
    assert folders_in(root) == ["iter_0000003"]
