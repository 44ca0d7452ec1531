"""Arguments of ``convert``, ``copy``, ``upgrade`` and ``diff``."""

from typing import Annotated, Any

from dist_ckpt_strategies.cli.command import (
    Debug,
    Json,
    Keys,
    Memory,
    Nproc,
    Source,
    Target,
    argument,
    command,
    flag,
    prepare,
    value,
)

_STATUS = (
    "0 done, 1 SRC is damaged or incomplete, also where the rest was converted, 2 wrong usage, "
    "3 could not read or write."
)


@command("dist-ckpt convert SRC DST --to torch_dist", _STATUS)
def convert(
    source: Source,
    target: Target,
    *,
    to: Annotated[
        str, value(metavar="FORMAT", help="pack, zarr@1, zarr@3, torch_dist or safetensors.")
    ],
    keys: Keys = None,
    skip_damaged: Annotated[
        bool, flag("--skip-damaged", help="Leave out what is damaged, and list it.")
    ] = False,
    max_file: Annotated[
        int | None,
        value(
            metavar="MB",
            min=1,
            help="Size of a file of safetensors (5000), a pack or torch_dist (537), in MB.",
        ),
    ] = None,
    memory: Memory = None,
    nproc: Nproc = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Convert a checkpoint to another format, bit for bit.

    From and to pack, which is ("safetensors", 1); ("zarr", 1); plain Zarr v3; torch_dist of
    Megatron-Core 0.16; and files of safetensors with whole arrays of a model, without optimizer
    state, objects and common state. Memory is bounded. DST must be new or empty; nothing is visible
    there until the conversion is complete. After an interruption the same command starts over.
    """
    prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments: dict[str, Any] = {"source": source, "target": target, "to": to, "keys": keys}
    arguments |= {"skip_damaged": skip_damaged, "max_file": max_file, "memory": memory}
    return convert_checkpoint("convert", arguments, nproc, as_json=as_json)


@command("dist-ckpt copy SRC s3://bucket/run/iter_0000100 --keys 'model.*'", _STATUS)
def copy(
    source: Source,
    target: Target,
    *,
    keys: Keys = None,
    memory: Memory = None,
    nproc: Nproc = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Copy a checkpoint, or a part of it, in its own format.

    Only the bytes of the keys that match are read, and the common state. Those of packs are
    compared with their digests, which are copied. Otherwise like convert.
    """
    prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments = {"source": source, "target": target, "keys": keys, "memory": memory}
    return convert_checkpoint("copy", arguments, nproc, as_json=as_json)


@command("dist-ckpt upgrade SRC DST --to pack", _STATUS)
def upgrade(
    source: Source,
    target: Target,
    *,
    to: Annotated[
        str | None,
        value(
            metavar="FORMAT",
            help="pack, zarr@1, zarr@3 or torch_dist; by default the format of SRC.",
        ),
    ] = None,
    memory: Memory = None,
    nproc: Nproc = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Convert a checkpoint of Megatron-Core <= 0.15 or NeMo 1.x so that training can continue.

    Optimizer state of the form fully_sharded_model_space (optimizer.state.fp32_param.*), which
    Megatron-Core 0.16 cannot load, becomes fully_reshardable (optimizer.state.param.*). Otherwise
    like convert.
    """
    prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments = {"source": source, "target": target, "to": to, "memory": memory}
    return convert_checkpoint("upgrade", arguments, nproc, as_json=as_json)


@command(
    "dist-ckpt diff A B --keys 'decoder.*'",
    "0 equal, 1 different, or one is damaged or incomplete, 2 wrong usage, 3 could not read.",
)
def diff(
    a: Annotated[str, argument("A", "A checkpoint.")],
    b: Annotated[str, argument("B", "Another checkpoint.")],
    *,
    keys: Annotated[
        str | None,
        value(metavar="GLOB", help="Compare only arrays whose keys match, and no objects."),
    ] = None,
    values: Annotated[
        bool,
        flag("--values", help="Compare arrays of different dtypes too, as numbers."),
    ] = False,
    memory: Memory = None,
    nproc: Nproc = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Compare two checkpoints of any formats: keys, shapes, dtypes, elements and objects.

    For each array that differs it shows the first such element, their number, the largest absolute
    difference, and where it is. Equal means equal to the bit. Blocks of packs are compared by their
    digests, and read if these differ. Damage is a difference too. After upgrade, arrays are
    compared under both names.
    """
    prepare(a, b)
    from dist_ckpt_strategies.cli.convert import diff_checkpoints  # noqa: PLC0415

    arguments = {"a": a, "b": b, "keys": keys, "values": values, "memory": memory}
    return diff_checkpoints(arguments, nproc, as_json=as_json)
