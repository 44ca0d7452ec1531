"""The reader on the page of packs, and the safetensors library, read every byte of packs."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject

from dist_ckpt_strategies.formats.objects import load_content
from dist_ckpt_strategies.formats.pack import PackLimits
from dist_ckpt_strategies.sharded.save import Contents
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from tests.support.checkpoints import flip_at
from tests.support.layouts import empties, irregular, random_layouts, scattered
from tests.support.packs import save_packs
from tests.support.pages import reader_of
from tests.support.sharding import ALL_DTYPES, Cut, on_grid, part_of, state_of
from tests.support.tensors import bits

pytestmark = pytest.mark.slow

KEYS = [
    "a/b",
    "a",
    "..",
    "a@0",
    "a@0.0",
    "a#1",
    "@",
    "#",
    "@#",
    '"',
    'it\'s "so"',
    "a b",
    " ",
    "\\",
]
KEYS += ["new\nline", "\t\r\0", "ключ", "😀", "\u2028", "", "k" * 5000, "ö" * 3000, "{}", "a@"]
KEYS += ["__metadata__", "__digests__", "__common__", "__padding__", "index", "packs"]

LAYOUTS: dict[str, list[Cut]] = {
    "dtypes": [on_grid(f"x.{d}", (12, 8), (2, 2), dtype=d, size=3) for d in ALL_DTYPES]
    + [on_grid(f"0-d.{d}", (), (), dtype=d, size=3) for d in ALL_DTYPES],
    "keys": [on_grid(key, (8, 4), (4, 1), size=2) for key in KEYS],
    "keys of scalars": [on_grid(key, (), (), size=2) for key in KEYS],
    "scattered": scattered(),
    "irregular": irregular(),
    "empty": empties(),
    "several ranges": [
        on_grid("stacked", (4, 300, 513), (4, 1, 1), num_prepended=1, dtype=torch.bfloat16),
        on_grid("uneven", (1021, 211), (1, 1)),
        on_grid("half", (512, 2048), (1, 2), dtype=torch.float16),
    ],
    **{f"random {seed}": random_layouts(seed)[0] for seed in range(4)},
}


def contents(rank: int, name: str) -> Contents:
    """Arrays, objects with odd keys, and on the first rank the common state."""
    objects = {
        key: ShardedObject(key, {"rank": rank, "key": key}, (4,), (rank,))
        for key in (KEYS if name == "keys" else ["rng", "x/extra"])
    }
    named = {f"object {key}": value for key, value in objects.items()}
    common = pickle.dumps(name) if rank == 0 else None
    state = state_of(rank, LAYOUTS[name]) | named
    return PackSaveShardedStrategy().contents(state, common, copies_common=True)


@pytest.fixture(params=[(name, (None, 700)[n % 2]) for n, name in enumerate(LAYOUTS)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A layout and a checkpoint of it; of one or several packs per rank."""
    name, nbytes = request.param
    limits = PackLimits() if nbytes is None else PackLimits(nbytes)
    save_packs(tmp_path, 4, lambda rank: contents(rank, name), limits=limits)
    num_packs = len(list(tmp_path.glob("packs/*/*")))
    assert num_packs > 4 if nbytes else num_packs == 4
    return name, tmp_path


def test_the_reader_finds_every_element_and_every_object(saved: tuple[str, Path]) -> None:
    name, root = saved
    arrays, objects, common = reader_of("packs.md", "read_checkpoint")["read_checkpoint"](root)

    assert arrays.keys() == {cut.key for cut in LAYOUTS[name]}
    for cut in LAYOUTS[name]:
        assert arrays[cut.key].shape == cut.shape
        for part in cut.parts:
            assert arrays[cut.key][part.slices()].tobytes() == bits(part_of(cut, part)), cut.key
    keys = KEYS if name == "keys" else ["rng", "x/extra"]
    assert {*objects} == {(key, rank) for key in keys for rank in range(4)}
    for (key, rank), content in objects.items():
        assert load_content(content, "", key, ()) == {"rank": rank, "key": key}
    assert pickle.loads(common) == name


def test_the_safetensors_library_reads_the_same_bytes(saved: tuple[str, Path]) -> None:
    safetensors: Any = pytest.importorskip("safetensors")
    name, root = saved
    stored: dict[str, list[Any]] = {}
    for path in root.glob("packs/*/*.safetensors"):
        for tensor, found in safetensors.deserialize(path.read_bytes()):
            stored.setdefault(tensor, []).append(found)

    expected = {
        f"{cut.key}@{'.'.join(map(str, part.offset))}": bits(part_of(cut, part))
        for cut in LAYOUTS[name]
        for part in cut.parts
        if part.replica == 0 and (0 not in part.shape or 0 in cut.shape)
    }
    blocks = {tensor: found for tensor, found in stored.items() if "@" in tensor.rpartition("#")[2]}
    assert blocks.keys() == expected.keys()
    for tensor, found in blocks.items():
        assert {bytes(one["data"]) for one in found} == {expected[tensor]}, tensor
    assert len(stored["__common__"]) == 1
    assert all(one["dtype"] == "U64" for one in stored["__digests__"])


def test_the_reader_notices_a_changed_byte_in_each_file(tmp_path: Path) -> None:
    save_packs(tmp_path, 4, lambda rank: contents(rank, "dtypes"))
    read = reader_of("packs.md", "read_checkpoint")["read_checkpoint"]
    read(tmp_path)
    (full_index,) = tmp_path.glob("saves/*/index")
    sizes = {path: path.stat().st_size for path in tmp_path.glob("packs/*/*")}
    sizes |= {full_index: full_index.stat().st_size - 8}  # its last bytes are of use to rebuild

    for path, nbytes in sizes.items():
        for at in range(0, nbytes, 97):
            flip_at(path, at)
            with pytest.raises(ValueError, match="digest"):
                read(tmp_path)
            flip_at(path, at)
    read(tmp_path)
