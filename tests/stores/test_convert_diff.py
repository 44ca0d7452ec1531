"""``convert``, ``upgrade`` and ``diff`` where one of the two, or both, are in object stores."""

from pathlib import Path

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies import ConvertOptions, convert, copy, diff
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    IncompleteCheckpointError,
    StoreAccessError,
    StrategyError,
)
from tests.cli.commands import run
from tests.stores.commands import ONE_SERVER, cuts, differing, write
from tests.support.folders import Folder
from tests.support.sharding import same_bits, whole

PACKS = ("safetensors", 1)

SMALL_BLOCKS = ConvertOptions(max_memory_bytes=1, num_threads=2)
"""Blocks of 64 KiB; the arrays have 240 kB."""


@pytest.mark.parametrize("backend", [("zarr", 1), PACKS])
def test_a_checkpoint_goes_to_a_store_and_back(
    in_bucket: Folder, tmp_path: Path, backend: tuple[str, int]
) -> None:
    source = write(str(tmp_path / "source"), backend=backend)
    url, back, again = in_bucket.address, tmp_path / "back", f"{in_bucket.address}-again"
    seen: list[tuple[int, int]] = []

    there = convert(
        source,
        url,
        "pack",
        options=SMALL_BLOCKS,
        watch=lambda done, total: seen.append((done, total)),
    )
    convert(url, back, backend, options=SMALL_BLOCKS)
    copy(url, again, options=SMALL_BLOCKS)

    for place in (url, back, again):
        found = diff(source, place, options=SMALL_BLOCKS)
        assert found.is_equal
        assert (found.num_arrays, found.num_objects) == (2, 2)
        assert differing(str(place), cuts()) == []
        opened = dist_ckpt_strategies.open(place)
        for cut in cuts():
            assert same_bits(opened[cut.key].torch(), whole(cut))
        assert opened.objects["plain/shard_0_1"] == {"seen": 7}
        assert opened.common["iteration"] == 3
    assert diff(again, url).is_equal
    assert max(seen) == (there.nbytes, there.nbytes)
    sizes = [len(in_bucket.read(n)) for n in in_bucket.names() if n.startswith("packs/")]
    assert len(sizes) > 3
    assert max(sizes) < (64 << 10) + 8192
    assert run("verify", url).exit_code == 0


@ONE_SERVER
def test_other_formats_do_not_go_to_a_store_and_say_so(in_bucket: Folder, tmp_path: Path) -> None:
    source = write(str(tmp_path / "one"), backend=("zarr", 1))
    url, new = write(f"{in_bucket.address}/two", backend=PACKS), f"{in_bucket.address}/new"

    for to in ("zarr@1", "zarr@3", "torch_dist", "safetensors"):
        with pytest.raises(StrategyError, match=rf"{new}: .*{to} needs a directory"):
            convert(source, new, to)
        with pytest.raises(StrategyError, match="file system"):
            convert(url, new, to)
    with pytest.raises(StrategyError, match="needs a directory"):
        dist_ckpt_strategies.upgrade(source, new)
    assert not [name for name in in_bucket.names() if name.startswith("new")]
    with pytest.raises(StoreAccessError, match="no bucket 'not-there'"):
        convert(url, "s3://not-there/run", "pack")

    marker = b'{"sharded_backend":"torch_dist","common_backend":"torch"}'
    in_bucket.put("other/packs/x", b"{}")
    in_bucket.put("other/metadata.json", marker)
    with pytest.raises(IncompleteCheckpointError, match="index is missing"):
        diff(f"{in_bucket.address}/other", source)


@pytest.mark.parametrize("place", ["directory", "moto"], indirect=True)
def test_a_target_that_is_taken_or_the_source_itself_is_refused(place: Folder) -> None:
    source, other = (write(f"{place.address}/{name}", backend=PACKS) for name in ("run", "run-2"))
    place.put("other/thesis.tex", b"x")

    with pytest.raises(CheckpointExistsError, match="a finished checkpoint; `dist-ckpt diff`"):
        convert(source, other, "pack")
    with pytest.raises(CheckpointExistsError, match="files of something else"):
        convert(source, f"{place.address}/other", "pack")
    for target in (source, f"{source}/inner", place.address):
        with pytest.raises(StrategyError, match="must be a place beside the source"):
            convert(source, target, "pack")
    convert(source, f"{source}-3", "pack")
    assert diff(source, f"{source}-3").is_equal
