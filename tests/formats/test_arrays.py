"""The contract of packs and of ("zarr", 1): every element comes back, by any region, whatever wrote
the array; and what is wrong with an array is an error that names key and file."""

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from benchmarks.common.disks import drop_cache
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from tests.golden.sets import TP4, GoldenSet
from tests.support.checkpoints import (
    Values,
    random_values,
    write_array,
    write_marker,
    write_metadata,
    write_object,
)
from tests.support.entries import Failure, outcome
from tests.support.leaks import threads_left
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    at_random,
    differences,
    no_data,
    on_grid,
    part_of,
    same_bits,
    sharded,
    state_of,
    whole,
    zeros,
)
from tests.support.system_calls import before_calls
from tests.support.tensors import LAYOUTS, transposed

FORMATS = [("zarr", 1), ("safetensors", 1)]
each_format = pytest.mark.parametrize("backend", FORMATS, ids=["zarr", "packs"])


def save(root: Path, backend: tuple[str, int], *cuts: Cut) -> None:
    dist_ckpt_strategies.save(state_of(0, cuts), root, backend)


def load(state: Any, root: Path) -> Any:
    return dist_ckpt_strategies.load(dict(state), root, validate_access_integrity=False)


def region_of(shape: tuple[int, ...], chance: random.Random) -> tuple[Cut, Part]:
    """Any region of the array w, as one shard of it; it may be empty."""
    low = tuple(chance.randrange(n + 1) for n in shape)
    length = tuple(chance.randint(0, n - a) for a, n in zip(low, shape, strict=True))
    part = Part(0, low, length)
    return Cut("w", shape, torch.float32, (part,)), part


@each_format
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 40))
@pytest.mark.slow
def test_any_region_is_loaded_into_memory_of_any_layout(
    backend: tuple[str, int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, chance = tmp_path_factory.mktemp("any") / "c", random.Random(seed)
    shape = tuple(chance.choice((1, 2, 3, 5, 8, 13)) for _ in range(chance.randint(0, 4)))
    dtype = chance.choice(ALL_DTYPES)
    if backend == ("zarr", 1):
        grid = tuple(
            chance.choice([n for n in range(1, size + 1) if size % n == 0]) for size in shape
        )
        saved = on_grid("w", shape, grid, size=1, dtype=dtype)
    else:
        saved = at_random("w", shape, chance.randint(1, 9), size=1, dtype=dtype, seed=seed)
    save(root, backend, saved)

    wanted: dict[str | None, Any] = {}
    targets: dict[str | None, torch.Tensor] = {}
    for layout in ("dense", "transposed", "every other element", None):
        cut, part = region_of(shape, chance)
        if layout is not None and shape:
            targets[layout] = LAYOUTS[layout](torch.zeros(part.shape, dtype=dtype))
        wanted[layout] = sharded(cut, part, targets.get(layout), dtype=dtype)
    found = load(wanted, root)

    for name, tensor in wanted.items():
        assert same_bits(
            found[name], part_of(saved, Part(0, tensor.global_offset, tensor.local_shape))
        )
        assert name not in targets or found[name] is targets[name]


SIZES = [
    (64 << 10) - 1,
    64 << 10,
    256 << 10,
    (256 << 10) + 4096 - 7,
    (4 << 20) + 3 * 4096 + 5,
    (16 << 20) + 12345,
]
"""Around the sizes at which reads are cut."""

REGIONS = [(0, 1), (1, 4097), (4095, (300 << 10) - 5), ((256 << 10) + 3, (4 << 20) + 4096)]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk, or memory."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place"),
    [(("zarr", 1), "disk"), (("safetensors", 1), "disk"), (("safetensors", 1), "memory")],
    indirect=["place"],
)
def test_large_arrays_come_back_whole_and_in_regions_or_are_damaged_from_cache_and_disk(
    backend: tuple[str, int], place: Path
) -> None:
    cuts = [on_grid(f"w{size}", (size,), (1,), size=1, dtype=torch.uint8) for size in SIZES]
    matrix = on_grid("matrix", (2500, 1300), (1, 1), size=1)
    ranges = on_grid("ranges", (2, 1 << 16), (1, 1), size=1)  # a row is a range of packs
    save(place / "c", backend, *cuts, matrix, ranges)
    regions = [
        Cut(cut.key, cut.shape, cut.dtype, (Part(0, (start,), (length,)),))
        for cut in cuts
        for start, length in REGIONS
        if start + length <= cut.shape[0]
    ]
    regions.append(Cut("matrix", matrix.shape, matrix.dtype, (Part(0, (833, 1), (700, 1298)),)))
    regions.append(Cut("ranges", ranges.shape, ranges.dtype, (Part(0, (0, 0), (2, 1)),)))

    for wanted in ([*cuts, matrix, ranges], regions):
        drop_cache(place)
        for _ in range(2):
            state = {n: next(iter(state_of(0, [c], zeros).values())) for n, c in enumerate(wanted)}
            found = load(state, place / "c")
            for number, cut in enumerate(wanted):
                assert same_bits(found[number], part_of(cut, cut.parts[0])), cut
    if backend != ("zarr", 1):  # where all are in one file
        return
    for cut, kept in zip(cuts[1:], (0.9999, 0.5, 0.3, 0.9999, 0.0), strict=True):
        path = place / "c" / cut.key / "0"
        os.truncate(path, int(path.stat().st_size * kept))
        drop_cache(place)
        with pytest.raises(CorruptCheckpointError, match=f"{cut.key}: .*{path}"):
            load(state_of(0, [cut], zeros), place / "c")


@pytest.mark.slow
def test_more_arrays_than_a_system_call_takes_come_back(tmp_path: Path) -> None:
    cuts = [on_grid(f"w{number}", (3,), (1,), size=1) for number in range(2200)]
    save(tmp_path, ("safetensors", 1), *cuts)

    found = load(state_of(0, cuts, zeros), tmp_path)
    assert differences(0, cuts, found) == []


def test_zarr_python_reads_every_dtype_that_it_knows(tmp_path: Path) -> None:
    dtypes = [d for d in ALL_DTYPES if not DType.named(str(d), key="").is_extension]
    cuts = [on_grid(str(d), (8, 10), (2, 2), size=1, dtype=d) for d in dtypes]
    save(tmp_path, ("zarr", 1), *cuts)

    for cut in cuts:
        path = tmp_path / cut.key
        found: Any = zarr.open_array(str(path), mode="r")[...]
        expected = whole(cut).view(torch.uint8).numpy().tobytes()
        assert np.asarray(found).tobytes() == expected, cut.key


@each_format
def test_every_file_and_directory_is_flushed_before_the_save_ends(
    backend: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_WHOLE_FLUSH", "0")
    flushed: set[int] = set()
    with before_calls(lambda _, path: flushed.add(Path(path).stat().st_ino), ["fsync"]):
        save(tmp_path / "c", backend, *(on_grid(k, (8, 4), (4, 2), size=1) for k in ("w", "v")))

    written = {tmp_path / "c", *(tmp_path / "c").rglob("*")}
    assert len(written) > 8
    left = {path.name for path in written if path.stat().st_ino not in flushed}
    assert left <= {".dist-ckpt-commit"}  # the lock, which is empty


# What others wrote


def finish(root: Path) -> None:
    write_object(root / "common.pt", {})
    write_marker(root, "zarr")


def read(root: Path, values: Values, key: str = "w") -> Values:
    """All of an array of that shape and type."""
    data = torch.from_numpy(np.empty(values.shape, values.dtype.newbyteorder("=")))
    wanted = ShardedTensor.from_rank_offsets(key, data)
    dist_ckpt_strategies.load({"w": wanted}, root)
    return data.numpy()


ZLIB = numcodecs.Zlib(level=1)
WAYS: dict[str, dict[str, Any]] = {
    "zlib": {"compressors": ZLIB},
    "gzip": {"compressors": numcodecs.GZip(level=1)},
    "blosc": {"compressors": numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.SHUFFLE)},
    "zstd": {"compressors": numcodecs.Zstd(level=1)},
    "fortran": {"order": "F"},
    "big-endian": {"dtype": ">f4"},
    "big-endian, fortran, zlib": {"compressors": ZLIB, "order": "F", "dtype": ">f4"},
    "nested": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "fill value": {"fill_value": 7.0},
}


@pytest.mark.parametrize("name", WAYS)
def test_arrays_of_other_writers_are_read_and_bad_chunks_are_named(
    name: str, tmp_path: Path
) -> None:
    values = random_values((7, 5), DType.FLOAT32)
    values[np.isnan(values)] = 1.5  # numcodecs and numpy may touch payloads of swapped NaNs
    directory = tmp_path / "layer.w"
    options: dict[str, Any] = {"dtype": values.dtype, "fill_value": None, "compressors": None}
    array = zarr.create_array(
        str(directory),
        shape=values.shape,
        chunks=(4, 3),
        zarr_format=2,
        config={"write_empty_chunks": True},
        **options | WAYS[name],
    )
    array[...] = values
    finish(tmp_path)
    bad = directory / ("0/1" if name == "nested" else "0.1")

    found = read(tmp_path, values, "layer.w")
    assert (found.dtype, found.tobytes()) == (values.dtype, values.tobytes())
    content = bad.read_bytes()
    if "compressors" in WAYS[name]:
        for damaged in (content[: len(content) // 2], b"", b"\x01" * len(content)):
            bad.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=rf"layer\.w: .*{directory}") as caught:
                read(tmp_path, values, "layer.w")
            assert caught.value.key == "layer.w"
    bad.unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"^(rank 0: )?layer\.w: ") as lost:
        read(tmp_path, values, "layer.w")
    assert (lost.value.key, lost.value.path) == ("layer.w", str(bad))


VALUES = np.zeros(4, np.float32)
HUGE = {"chunks": [10**13]}
"""An error of memory, not the end of the process."""

UNKNOWN: list[dict[str, Any]] = [
    {"compressor": {"id": "lz4", "acceleration": 1}},
    {"filters": [{"id": "delta", "dtype": "<f4"}]},
]


@pytest.mark.parametrize(
    ("fields", "content", "said"),
    [
        (HUGE, bytes(16), "w: "),
        (HUGE | {"compressor": ZLIB.get_config()}, ZLIB.encode(bytes(16)), "w: "),
        *((fields, bytes(16), "no decoder; rewrite") for fields in UNKNOWN),
        ({"compressor": {"id": "homemade"}}, bytes(16), "homemade"),
    ],
)
def test_chunks_that_cannot_be_decoded_are_an_error_that_says_so(
    fields: dict[str, Any], content: bytes, said: str, tmp_path: Path
) -> None:
    write_metadata(tmp_path / "w", **fields)
    (tmp_path / "w" / "0").write_bytes(content)
    finish(tmp_path)

    with pytest.raises(StorageError, match=said) as caught:
        read(tmp_path, VALUES)
    assert caught.value.key == "w"


# The description of an array of format 1


def test_descriptions_have_the_bytes_that_megatron_wrote(tmp_path: Path) -> None:
    old = Path(GoldenSet.unpack(TP4, tmp_path).checkpoint)
    state: dict[str, Any] = {}
    for path in old.glob("*/.zarray"):
        fields, key = json.loads(path.read_bytes()), path.parent.name
        grid = tuple(n // c for n, c in zip(fields["shape"], fields["chunks"], strict=True))
        cut = on_grid(key, tuple(fields["shape"]), grid, size=1, dtype=torch.bfloat16)
        state |= state_of(0, [cut], no_data)
    loaded = load(state, old)
    for name, tensor in state.items():
        tensor.data = loaded[name]
    dist_ckpt_strategies.save(state, tmp_path / "new", ("zarr", 1))

    assert len({tensor.key for tensor in state.values()}) == 17
    for key in {tensor.key for tensor in state.values()}:
        new, before = tmp_path / "new" / key / ".zarray", old / key / ".zarray"
        assert new.read_bytes() == before.read_bytes()


NO_ARRAY: list[bytes | dict[str, Any]] = [
    *(b"", b"[]", b"\xff", {"zarr_format": 3}, {"order": "X"}, {"dimension_separator": "x"}),
    *({"shape": [-1]}, {"shape": [float("inf")]}, {"chunks": [0]}, {"chunks": [2, 6]}),
    *({"dtype": d} for d in ("<f5", "f4", "float32", "<U4", "|S3", "<M8[ns]", "|O", "<f16")),
    *({"dtype": [["a", "<f4"]]}, {"compressor": {}}, {"filters": [[]]}),
]
FIELDS = ("chunks", "compressor", "dtype", "fill_value", "filters", "order", "shape", "zarr_format")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def load_described(root: Path, content: bytes | dict[str, Any]) -> Any:
    """What a load of an array of four elements comes to, with other fields or another file."""
    finish(root)
    write_array(root, VALUES)
    if isinstance(content, dict):
        write_metadata(root / "w", **content)
    else:
        (root / "w" / ".zarray").write_bytes(content)
    return outcome(partial(read, root, VALUES))


def test_invalid_array_metadata_is_an_error_that_names_key_and_file(tmp_path: Path) -> None:
    for content in NO_ARRAY:
        found = load_described(tmp_path, content)
        assert isinstance(found, Failure), content
        assert {"CorruptCheckpointError", "PlanError"} & set(found.kinds), found
        assert (found.key, found.path) == ("w", str(tmp_path / "w" / ".zarray")), found


@pytest.mark.slow
@given(name=st.sampled_from(FIELDS), value=json_values)
def test_any_value_of_any_field_is_an_array_or_one_of_our_errors(
    tmp_path: Path, name: str, value: Any
) -> None:
    found = load_described(tmp_path, {name: value})

    assert not isinstance(found, Failure) or found.is_ours, found


# What is wrong on disk


def test_no_read_touches_its_target_once_the_failure_of_one_is_reported(tmp_path: Path) -> None:
    cuts = [on_grid(f"w{n}", (512, 256), (1, 1), size=1) for n in range(4)]
    save(tmp_path, ("zarr", 1), *cuts)
    (tmp_path / "w2" / "0.0").unlink()
    state, before = state_of(0, cuts, zeros), threading.enumerate()

    with pytest.raises(IncompleteCheckpointError, match="w2"):
        dist_ckpt_strategies.load(state, tmp_path)
    left = {name: tensor.data.clone() for name, tensor in state.items()}
    time.sleep(0.1)
    assert all(same_bits(state[name].data, copy) for name, copy in left.items())
    assert threads_left(before, prefix="dist-ckpt-io") == []


def test_chunks_that_are_not_asked_for_may_be_missing(tmp_path: Path) -> None:
    cut = on_grid("w", (8, 4), (4, 1), size=1)
    save(tmp_path, ("zarr", 1), cut)
    (tmp_path / "w" / "3.0").unlink()
    wanted = Cut("w", (8, 4), torch.float32, (Part(0, (0, 0), (6, 4)),))

    found = load(state_of(0, [wanted], no_data), tmp_path)
    assert differences(0, [wanted], found) == []


# CUDA


@pytest.mark.gpu
@each_format
def test_cuda_tensors_of_every_dtype_and_layout_are_saved_and_filled(
    backend: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_MAX_INFLIGHT_BYTES", "400")
    cuts = [on_grid(str(d), (8, 10), (2, 2), size=1, dtype=d) for d in ALL_DTYPES]
    state = state_of(0, cuts, lambda cut, part: transposed(part_of(cut, part).cuda()))
    dist_ckpt_strategies.save(state, tmp_path, backend)
    found = load(state_of(0, cuts, lambda c, part: transposed(zeros(c, part).cuda())), tmp_path)

    assert differences(0, cuts, {name: tensor.cpu() for name, tensor in found.items()}) == []
