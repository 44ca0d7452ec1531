"""The manifest of a format 2 checkpoint: what it says of each file. CheckpointWriter writes it."""

from typing import Any, NamedTuple

import xxhash

from dist_ckpt_strategies.core.array import ARRAYS_NAME
from dist_ckpt_strategies.errors import similar_text as similar_text  # noqa: PLC0414 - for tools

MANIFEST_NAME = "manifest"
INDEX_NAME = f"{MANIFEST_NAME}/index.json"
SAVE_NAME = f"{MANIFEST_NAME}/save.json"
"""The first file of a save: by it the directory is known to be one of format 2."""

OBJECTS_NAME = "objects"

FOLDER_NAMES = (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME)
"""The folders of a save, which hold all its files but two; the one that it is known by last."""

HEADER = {"schema": "dist_ckpt_strategies.manifest", "version": 1}

INDEX_LEAD = b'{"digest":"'
"""How the index begins; the digest of all that follows comes next."""

Fields = dict[str, Any]

digest_of = xxhash.xxh3_128_hexdigest
"""The digest by which files are listed that are read whole."""


class SegmentEntry(NamedTuple):
    """One file of the manifest, a segment, as the index lists it; the field names are on disk.

    Attributes:
        name: of the file, below the checkpoint's directory.
        first: the first key in it; it ends before the first key of the next.
        nbytes: its size.
        digest: XXH3 of the file, 128 bits, in hexadecimal.
        num_arrays: arrays in it.
        num_objects: object shards in it.
    """

    name: str
    first: str
    nbytes: int
    digest: str
    num_arrays: int
    num_objects: int
