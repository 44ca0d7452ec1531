"""The readers on the pages of the formats read every byte, with numpy and xxhash alone."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject

from tests.support.checkpoints import flip_at
from tests.support.entries import Entry, require_on_ranks, save
from tests.support.layouts import empties, irregular, scattered
from tests.support.pages import reader_of
from tests.support.sharding import ALL_DTYPES, Cut, in_runs, on_grid, part_of, state_of
from tests.support.tensors import bits

pytestmark = pytest.mark.multiprocess

KEYS = ["a/b", "a", ".hidden", "..", "manifest", "metadata.json", "ключ", "c.0", "%"]
KEYS += ["k" * 200, "k" * 194 + "ö", "k" * 300]  # names of 200 characters, and longer ones
OF_FORMAT_1 = ("dtypes", "scattered", "irregular", "empty", "large")
"""Layouts whose keys format 1 takes."""


def layouts() -> dict[str, list[Cut]]:
    """Arrays of every kind; the large ones have many inner chunks, some of them padded."""
    return {
        "dtypes": [on_grid(f"x.{d}", (12, 8), (2, 2), dtype=d) for d in ALL_DTYPES],
        "keys": [on_grid(key, (8, 4), (4, 1)) for key in KEYS],
        "scattered": scattered(),
        "irregular": irregular(),
        "empty": empties(),
        "large": [
            on_grid("matrix", (512, 520), (2, 2)),
            on_grid("primes", (1021, 211), (1, 1)),
            on_grid("layers", (4, 128, 130), (4, 1, 1), num_prepended=1, dtype=torch.bfloat16),
            in_runs("flat", [50_000, 61_111, 90_001, 120_000]),
        ],
    }


def objects_of(rank: int) -> dict[str, Any]:
    """Shards of objects: small and large ones that JSON holds, and one that it does not."""
    values = {
        "small": {"rank": rank},
        "large": list(range(2000)),
        "pickled": {"seed": torch.arange(4) + rank},
    }
    return {key: ShardedObject(key, value, (4,), (rank,)) for key, value in values.items()}


def save_all(rank: int, root: Path) -> None:
    for name, cuts in layouts().items():
        state = state_of(rank, cuts) | objects_of(rank)
        save(Entry.OURS, state, root / name, sharded_strategy=("zarr", 2))
        if name in OF_FORMAT_1:
            save(Entry.OURS, state, root / f"{name}.1", sharded_strategy=("zarr", 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    require_on_ranks(4, save_all, root)
    return root


def arrays_in(root: Path) -> dict[str, Any]:
    if root.name.endswith(".1"):
        reader = reader_of("format.md", "read_array")
        return {key: reader["read_array"](at) for key, at in reader["find_arrays"](root).items()}
    reader = reader_of("format2.md", "read_array")
    fields, _ = reader["read_manifest"](root)
    return {key: reader["read_array"](root, one) for key, one in fields.items()}


@pytest.mark.parametrize("name", [*layouts(), *(f"{name}.1" for name in OF_FORMAT_1)])
def test_the_readers_of_both_formats_find_every_element(saved: Path, name: str) -> None:
    arrays, cuts = arrays_in(saved / name), layouts()[name.removesuffix(".1")]

    assert arrays.keys() == {cut.key for cut in cuts}
    for cut in cuts:
        assert arrays[cut.key].shape == cut.shape
        for part in cut.parts:
            found = arrays[cut.key][part.slices()]
            assert found.tobytes() == bits(part_of(cut, part)), cut.key


def test_the_reader_of_format_2_finds_every_object(saved: Path) -> None:
    reader = reader_of("format2.md", "read_object")
    _, objects = reader["read_manifest"](saved / "large")
    found = {
        (one["key"], *one["offset"]): reader["read_object"](saved / "large", one) for one in objects
    }

    assert len(found) == 12
    for rank in range(4):
        assert found["small", rank] == {"rank": rank}
        assert found["large", rank] == list(range(2000))
        pickled = torch.load(io.BytesIO(found["pickled", rank]), weights_only=True)
        assert pickled["seed"].tolist() == [rank, rank + 1, rank + 2, rank + 3]


def test_the_reader_of_format_2_notices_a_changed_byte_in_each_file(saved: Path) -> None:
    reader, root = reader_of("format2.md", "read_array"), saved / "dtypes"

    def read() -> None:
        arrays, objects = reader["read_manifest"](root)
        for fields in arrays.values():
            reader["read_array"](root, fields)
        for fields in objects:
            reader["read_object"](root, fields)

    read()
    manifest = (root / "manifest" / name for name in ("index.json", "part-00000.json"))
    for path in (*root.glob("arrays/*/c.*"), *root.glob("objects/*"), *manifest):
        flip_at(path, -3)
        with pytest.raises(ValueError, match="digest"):
            read()
        flip_at(path, -3)
