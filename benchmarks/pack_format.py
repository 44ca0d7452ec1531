"""Choices of the format of packs, measured side by side.

    python benchmarks/pack_format.py --out pack_format.jsonl

Digest ranges of several sizes: a save and a verified load of 285 blocks, relative to a plain stream
of the same bytes in the same round; the bytes that a change of layout reads of those it needs; the
size of the tables. Forms of ``__metadata__`` and of the full index: 100,000 blocks of 1, 1,000 and
100,000 arrays. One process, one thread; medians.
"""

import base64
import json
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from benchmarks.common.command_line import Parser, open_output
from benchmarks.common.disks import workspace
from dist_ckpt_strategies.core.array import DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.formats import index, pack, pack_header, pack_read, pack_write
from dist_ckpt_strategies.formats.pack import Layout, lay_out
from dist_ckpt_strategies.formats.pack_read import BlockReads, read_jobs
from dist_ckpt_strategies.formats.pack_write import PackRecord, write_pack
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import Transfer

RANGES: Final = [128 << 10, 256 << 10, 512 << 10, 1 << 20]
_MODULES: Final = (pack, pack_header, pack_read, pack_write)
_STREAM_NBYTES: Final = 4 << 20

Bytes = Any


@contextmanager
def range_nbytes(nbytes: int) -> Iterator[None]:
    """Within the block digests are of ranges of that size."""
    with ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(patch.object(module, "RANGE_NBYTES", nbytes))
        yield


# Time by range


def gpt_shards(hidden: int, num_layers: int) -> list[ShardSpec]:
    """What a rank of TP 2 holds of a GPT in float32: weights, and both moments of Adam."""
    per_layer = {
        "qkv": (3 * hidden, hidden, 0),
        "proj": (hidden, hidden, 1),
        "fc1": (4 * hidden, hidden, 0),
        "fc2": (hidden, 4 * hidden, 1),
        "norm": (hidden, 1, None),
    }
    named = {
        f"layers.{n}.{key}": facts for n in range(num_layers) for key, facts in per_layer.items()
    }
    shards = []
    for key, (rows, columns, axis) in named.items():
        shape = (rows, columns)
        local = tuple(n // 2 if axis == dim else n for dim, n in enumerate(shape))
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            region = Region((0, 0), local)
            shards.append(ShardSpec(ShardId(f"{key}.{kind}", region), shape, DType.FLOAT32))
    return shards


def save(store: Directory, layout: Layout, tensors: Sequence[Bytes]) -> list[PackRecord]:
    """Write the packs."""
    records = []
    for packed in layout.packs:
        contents = [[tensors[n] for n in packed.sources if n >= 0]]
        name = pack_write.new_pack_name()
        record, _ = write_pack(store, name, packed, contents, save_id="s", rank=0)
        records.append(record)
    return records


def reads_of(
    layout: Layout, records: Sequence[PackRecord], targets: dict[str, Bytes]
) -> BlockReads:
    """Reads of all blocks."""
    table = layout.table
    keys = [table.keys[number] for number in table.array.tolist()]
    packs, memory = dict(enumerate(records)), [targets[key] for key in keys]
    zeros = np.zeros_like(table.extent)
    return BlockReads(packs, table.place, table.extent, zeros, table.extent, memory, keys)


def stream(place: Path, tensors: Sequence[Bytes], *, is_save: bool) -> None:
    """Write or read the bytes of all tensors, one after the other."""
    path = place / "stream"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    move: Any = os.pwritev if is_save else os.preadv
    at = 0
    for tensor in tensors:
        for start in range(0, tensor.size, _STREAM_NBYTES):
            at += move(handle, [tensor[start : start + _STREAM_NBYTES]], at)
    if is_save:
        os.fsync(handle)
    os.close(handle)


def timed_ranges(
    place: Path, hidden: int, num_layers: int, repetitions: int
) -> list[dict[str, Any]]:
    """Seconds of saves and loads of the stream in the same round, for each range."""
    shards = gpt_shards(hidden, num_layers)
    chance = np.random.default_rng(0)
    tensors = [chance.integers(0, 256, shard.nbytes, np.uint8) for shard in shards]
    memory = [np.zeros(shard.nbytes, np.uint8) for shard in shards]
    targets = {
        shard.key: m.view(np.float32).reshape(shard.region.shape)
        for shard, m in zip(shards, memory, strict=True)
    }
    ratios: dict[tuple[int, str], list[float]] = {}
    for repetition in range(repetitions + 1):
        for turn in range(len(RANGES)):
            nbytes = RANGES[(turn + repetition) % len(RANGES)]
            with range_nbytes(nbytes):
                found = _round(place, shards, tensors, memory, targets)
            for name, ratio in found.items() if repetition else ():
                ratios.setdefault((nbytes, name), []).append(ratio)
    return [
        {
            "range_nbytes": nbytes,
            "nbytes": sum(tensor.size for tensor in tensors),
            **{
                f"{name}_ratio": statistics.median(ratios[nbytes, name])
                for name in ("save", "load", "save_cpu", "load_cpu")
            },
        }
        for nbytes in RANGES
    ]


def _round(
    place: Path,
    shards: Sequence[ShardSpec],
    tensors: Sequence[Bytes],
    memory: Sequence[Bytes],
    targets: dict[str, Bytes],
) -> dict[str, float]:
    store, layout = Directory(place), lay_out(shards)
    (place / "stream").unlink(missing_ok=True)  # a pack is a new file, too
    raw = _seconds(partial(stream, place, tensors, is_save=True))
    records: list[PackRecord] = []
    saved = _seconds(lambda: records.extend(save(store, layout, tensors)))
    raw_load = _seconds(partial(stream, place, memory, is_save=False))
    reads = reads_of(layout, records, targets)
    loaded = _seconds(lambda: Transfer(read_jobs(store, reads, {}), 1).wait(60))
    assert all(np.array_equal(a, b) for a, b in zip(tensors, memory, strict=True))  # noqa: S101
    store.delete([pack_write.file_of(record.name) for record in records])
    return {
        "save": saved[0] / raw[0],
        "load": loaded[0] / raw_load[0],
        "save_cpu": saved[1] / raw[1],
        "load_cpu": loaded[1] / raw_load[1],
    }


def _seconds(step: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began, time.process_time() - cpu


# Bytes by range


def read_of_needed(hidden: int) -> float:
    """Bytes that a rank of TP 4 reads of packs of TP 2, of those that it needs."""
    read = needed = 0
    record = PackRecord("0" * 16, "", 0, 0, 0, 0)
    for shard in gpt_shards(hidden, 1):
        shape = shard.region.shape
        axis = next((dim for dim in (0, 1) if shape[dim] < shard.array_shape[dim]), None)
        half = tuple(n // 2 if dim == axis else n for dim, n in enumerate(shape))
        target, column = np.empty(half, np.float32), np.array([shape])
        start, boxes = np.zeros((1, 3), np.int64), np.array([half])
        of_block = BlockReads({0: record}, start, column, 0 * boxes, boxes, [target], [shard.key])
        read += sum(s[4] for s in pack_read._spans(of_block, pack_read.READ_NBYTES))  # noqa: SLF001
        needed += target.nbytes
    return read / needed


# Forms of the metadata


def numbered(num_blocks: int, num_keys: int) -> list[ShardSpec]:
    """Blocks of some arrays, as the experts of a layer are."""
    per_key = num_blocks // num_keys
    return [
        ShardSpec(
            ShardId(f"decoder.layers.mlp.experts.{key:06}.weight", Region((n, 0), (1, 512))),
            (per_key, 512),
            DType.BFLOAT16,
        )
        for key in range(num_keys)
        for n in range(per_key)
    ]


_METADATA = pack._metadata  # noqa: SLF001


def _flat(*args: Any) -> dict[str, str]:
    """An entry for each array."""
    arrays = args[1]
    return _METADATA(args[0], {}, *args[2:]) | {
        key: ",".join(map(str, facts.shape)) for key, facts in arrays.items()
    }


def _packed(*args: Any) -> dict[str, str]:
    """Names and shapes compressed, as text."""
    found = _METADATA(*args)
    return found | {"arrays": base64.b64encode(zlib.compress(found["arrays"].encode(), 1)).decode()}


def _unpacked(metadata: dict[str, str]) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(metadata["arrays"])))


METADATA_FORMS: Final[dict[str, tuple[Any, Any]]] = {
    "JSON in one entry": (_METADATA, lambda metadata: json.loads(metadata["arrays"])),
    "an entry per array": (
        _flat,
        lambda metadata: {k: [*map(int, v.split(","))] for k, v in metadata.items() if "." in k},
    ),
    "compressed": (_packed, _unpacked),
}


def metadata_form(form: str, place: Path, shards: Sequence[ShardSpec]) -> dict[str, Any]:
    """What a form costs: bytes of the header, seconds to lay out, to parse, for safetensors."""
    import safetensors  # noqa: PLC0415 - the only one that needs it

    build, parse = METADATA_FORMS[form]
    with patch.object(pack, "_metadata", build):
        began = time.process_time()
        (packed,) = lay_out(shards).packs
        header = packed.header("s")
        laid_out = time.process_time() - began
    began = time.process_time()
    parse(json.loads(header[8:])["__metadata__"])
    parsed = time.process_time() - began
    path = place / "pack.safetensors"
    path.write_bytes(header)
    os.truncate(path, packed.nbytes)
    began = time.process_time()
    with safetensors.safe_open(path, "np") as file:
        file.keys()
    opened = time.process_time() - began
    path.unlink()
    return {
        "header_nbytes": len(header),
        "lay_out_s": laid_out,
        "parse_json_s": parsed,
        "safetensors_s": opened,
    }


# Forms of the full index


def _to_json(table: BlockTable) -> bytes:
    """Columns as lists."""
    names = [[key, f.dtype, f.shape] for key, f in zip(table.keys, table.facts, strict=True)]
    columns = [
        c.T.tolist() for c in (table.array[:, None], table.origin, table.extent, table.place)
    ]
    return json.dumps([names, *columns], separators=(",", ":")).encode()


def _from_json(content: bytes) -> BlockTable:
    names, array, *columns = json.loads(content)
    tables = [np.array(column, np.int64).reshape(len(column), -1).T for column in columns]
    facts = tuple([ArrayFacts(dtype, tuple(shape)) for _, dtype, shape in names])
    keys = tuple([key for key, _, _ in names])
    return BlockTable(keys, facts, np.array(array[0], np.int64), *tables)


INDEX_FORMS: Final[dict[str, tuple[int, bool]]] = {
    "int64, 256 blocks": (256, False),
    "int64, 1024 blocks": (1024, False),
    "int64, 4096 blocks": (4096, False),
    "JSON, 1024 blocks": (1024, True),
    "JSON, 4096 blocks": (4096, True),
}


def index_form(form: str, table: BlockTable) -> dict[str, Any]:
    """What a form costs: bytes, seconds to build, and bytes and seconds to find 30 arrays."""
    rows, is_json = INDEX_FORMS[form]
    with ExitStack() as stack:
        stack.enter_context(patch.object(index, "_ROWS", rows))
        if is_json:
            stack.enter_context(patch.object(BlockTable, "to_bytes", _to_json))
            stack.enter_context(patch.object(BlockTable, "from_bytes", staticmethod(_from_json)))
        began = time.process_time()
        segments = index.array_segments(table)
        pack = PackRecord("0" * 16, "0" * 32, 1 << 62, 0, 0, 0)  # of which the index says nothing
        packs = [index.PackSummary((pack,) * (1 + int(table.place[:, 0].max())))]
        content, pointer = index.build_full_index(index.NewSave("s", segments, packs, {}))
        built = time.process_time() - began
        read: list[int] = []

        def part(start: int, nbytes: int) -> bytes:
            read.append(nbytes)
            return content[start : start + nbytes]

        keys = table.keys[:: math.ceil(len(table.keys) / 30)][:30]
        began = time.process_time()
        index.FullIndex(pointer, part, "").find(keys)
        found = time.process_time() - began
    return {
        "nbytes": len(content),
        "build_s": built,
        "find_s": found,
        "read_nbytes": sum(read),
        "num_reads": len(read),
    }


def main() -> None:
    """Measure all of them."""
    parser = Parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse()
    hidden, num_layers = (64, 2) if options.smoke else (448, 19)
    num_blocks, repetitions = (1000, 1) if options.smoke else (100_000, options.repetitions)
    with open_output(options.out, __file__) as output, workspace(options.directory) as place:

        def write(kind: str, **content: Any) -> None:
            output.write(kind, **content)
            print(kind, *(f"{n}={_shown(v)}" for n, v in content.items()))  # noqa: T201

        for found in timed_ranges(place, hidden, num_layers, repetitions):
            with range_nbytes(found["range_nbytes"]):
                table = lay_out(gpt_shards(hidden, num_layers)).packs[0].num_ranges * 8
                read = read_of_needed(64 if options.smoke else 2048)
            write("range", **found, table_nbytes=table, read_of_needed=read)
        for num_keys in (1, num_blocks // 100, num_blocks):
            shards = numbered(num_blocks, num_keys)
            table_of_all = lay_out(shards).table
            for form in METADATA_FORMS:
                values = _medians(partial(metadata_form, form, place, shards))
                write("metadata", form=form, num_keys=num_keys, **values)
            for form in INDEX_FORMS:
                values = _medians(partial(index_form, form, table_of_all))
                write("index", form=form, num_keys=num_keys, **values)


def _medians(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    runs = [measure() for _ in range(3)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
