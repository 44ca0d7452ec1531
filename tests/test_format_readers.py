"""The readers on the pages of the formats read every byte, with numpy and xxhash alone."""

from pathlib import Path

import pytest
import torch

from tests.support.entries import Entry, require_on_ranks, save
from tests.support.layouts import empties, scattered
from tests.support.pages import reader_of
from tests.support.sharding import ALL_DTYPES, Cut, on_grid, part_of, state_of
from tests.support.tensors import bits

pytestmark = pytest.mark.multiprocess


def layouts() -> dict[str, list[Cut]]:
    """Arrays of every kind."""
    return {
        "dtypes": [on_grid(f"x.{d}", (12, 8), (2, 2), dtype=d) for d in ALL_DTYPES],
        "scattered": scattered(),
        "empty": empties(),
        "large": [
            on_grid("matrix", (512, 520), (2, 2)),
            on_grid("primes", (1021, 211), (1, 1)),
            on_grid("layers", (4, 128, 130), (4, 1, 1), num_prepended=1, dtype=torch.bfloat16),
        ],
    }


def save_all(rank: int, root: Path) -> None:
    for name, cuts in layouts().items():
        save(Entry.OURS, state_of(rank, cuts), root / name, sharded_strategy=("zarr", 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats")
    require_on_ranks(4, save_all, root)
    return root


@pytest.mark.parametrize("name", layouts())
def test_the_reader_of_zarr_finds_every_element(saved: Path, name: str) -> None:
    reader, cuts = reader_of("format.md", "read_array"), layouts()[name]
    found = reader["find_arrays"](saved / name).items()
    arrays = {key: reader["read_array"](at) for key, at in found}

    assert arrays.keys() == {cut.key for cut in cuts}
    for cut in cuts:
        assert arrays[cut.key].shape == cut.shape
        for part in cut.parts:
            elements = arrays[cut.key][part.slices()]
            assert elements.tobytes() == bits(part_of(cut, part)), cut.key
