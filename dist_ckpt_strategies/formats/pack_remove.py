"""Remove arrays and objects from a checkpoint of packs: a new index no longer names them."""

from __future__ import annotations

import logging

import numpy as np

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.core.blocks import BlockTable, merged
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.index import INDEX_NAME, array_segments, build_full_index
from dist_ckpt_strategies.formats.pack_commit import NewSave, commit, current_save, new_save_id
from dist_ckpt_strategies.storage.bucket import Place

logger = logging.getLogger(__name__)


def remove_keys(store: Place, key_prefix: str) -> None:
    """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

    Their bytes stay in the packs, until the checkpoint is converted.

    Raises:
        IncompleteCheckpointError: there is no index.
    """
    current = current_save(store)
    if current is None:
        path = store.path(INDEX_NAME)
        raise IncompleteCheckpointError(f"{store} holds no packs: {path} is missing", path=path)
    index = current[1]
    kept: list[BlockTable] = []
    nbytes = 0
    for table in index.tables():
        goes = np.array([key.startswith(key_prefix) for key in table.keys], bool)[table.array]
        sizes = np.array([DType(facts.dtype).itemsize for facts in table.facts], np.int64)
        numels = table.extent.prod(axis=1)
        nbytes += int((numels * sizes[table.array])[goes].sum())
        kept.append(table.rows(np.flatnonzero(~goes)))
    objects = index.objects()
    stay = [found for found in objects if not found.id.key.startswith(key_prefix)]
    nbytes += sum(found.stored.nbytes for found in objects if found not in stay)
    packs = [*index.packs(range(index.num_packs)).values()]
    facts = {name: index.facts[name] for name in index.facts.keys() - {"save_id", "version"}}
    content, pointer = build_full_index(
        new_save_id(store), array_segments(merged(kept)[0]), stay, packs, index.common, facts
    )
    commit(store, NewSave(pointer, content, packs, marker=None))
    logger.warning(
        "%s: %d bytes of %s* stay in the packs; dist-ckpt convert leaves them out",
        store,
        nbytes,
        key_prefix,
    )
