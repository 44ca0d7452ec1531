"""Where a NeMo training is in its data. Imports nothing of NeMo.

A step of NeMo's draws as many micro-batches from the loader as it needs, so that Lightning's
count of batches does not say how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import torch

from dist_ckpt_strategies.integrations.lightning_steps import set_epoch
from dist_ckpt_strategies.megatron.microbatches import set_num_microbatches
from dist_ckpt_strategies.recovery.json_values import from_json_value, to_json_value

_FIRST_STEP = "init_global_step"
_NUM_SAMPLES = "prev_consumed_samples"
_OF_SAMPLER = (
    "init_consumed_samples",
    _NUM_SAMPLES,
    "if_first_step",
    "prev_global_batch_size",
    _FIRST_STEP,
)
"""What NeMo's MegatronDataSampler counts."""

_PASSED = "consumed_samples"
_PER_BATCH = "micro_batch_times_data_parallel_size"
"""What NeMo's samplers of batches begin after, and by how much each batch of all ranks moves it."""


class DataPosition:
    """The micro-batches that have been drawn in this epoch, and what NeMo counts besides.

    After a recovery the loader begins where that of the first attempt began, and is moved to the
    position; so its length, its later epochs and what NeMo counts from its beginning are those of
    a training without faults.
    """

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self._sampler = trainer.strategy.data_sampler
        self._module = trainer.datamodule
        self._drawn: dict[str, Any] = {"num_drawn": 0, "num_fetched": 0, "is_last": False}
        self._loaded: dict[str, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether what was drawn last was the end of an epoch."""
        return bool(self._drawn["is_last"])

    def note(self) -> None:
        """Take the loader's position, once a step's data is drawn: a teardown forgets it."""
        fetcher = self._fit._data_fetcher  # noqa: SLF001 - there is no public place
        self._drawn = {
            "num_drawn": fetcher._batch_idx + 1,  # noqa: SLF001
            "num_fetched": fetcher.fetched,
            "is_last": fetcher.done,
        }

    def objects(self) -> dict[str, Any]:
        """As it was noted, with what the sampler and the datamodule say now, as JSON types."""
        counts = {
            name: _plain(getattr(self._sampler, name))
            for name in _OF_SAMPLER
            if hasattr(self._sampler, name)
        }
        module = {} if self._module is None else self._module.state_dict()
        return {**self._drawn, "counts": counts, "module": to_json_value(module or {})}

    def load(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave; the loader is made next."""
        self._loaded = dict(objects)
        self._drawn = {name: objects[name] for name in self._drawn}
        module = from_json_value(objects["module"])
        if module and self._module is not None:
            self._module.load_state_dict(module)
        self._set_counts(objects["counts"])

    def go_on(self) -> bool:
        """Move the loader, which is made by now, to the position that was loaded; if one was."""
        loaded, self._loaded = self._loaded, {}
        if not loaded:
            return False
        self._set_counts(loaded["counts"])  # the loader that was made begins its own
        fetcher: Any = self._fit._data_fetcher  # noqa: SLF001 - there is no public place
        if not self._begins_there(loaded):
            set_epoch(self._fit)
            _draw(fetcher, loaded["num_drawn"], jumps=not loaded["is_last"])
        if loaded["is_last"]:
            iter(fetcher)
            return True
        # The epoch's loop adds the batches that it has counted.
        counted = self._fit.epoch_loop.batch_progress.current.ready
        fetcher.fetched = loaded["num_fetched"] - counted
        return True

    def _begins_there(self, loaded: Mapping[str, Any]) -> bool:
        """Whether loaders or the datamodule have a state of their own, and go on from that."""
        loaders = self._fit._combined_loader.flattened  # noqa: SLF001
        has_state = not loaded["counts"] and bool(from_json_value(loaded["module"]))
        return has_state or any(hasattr(one, "load_state_dict") for one in loaders)

    def _set_counts(self, counts: Mapping[str, Any]) -> None:
        for name, value in counts.items():
            setattr(self._sampler, name, value)
        if _NUM_SAMPLES in counts:
            set_num_microbatches(counts[_NUM_SAMPLES])
        if _FIRST_STEP in counts and hasattr(self._module, _FIRST_STEP):
            setattr(self._module, _FIRST_STEP, counts[_FIRST_STEP])


def _draw(fetcher: Any, num_batches: int, *, jumps: bool) -> None:
    """Begin the loader anew, and draw so many batches; all but the last one unread if possible."""
    length = fetcher.length
    num_jumped = _jump(fetcher, num_batches - 1) if jumps and num_batches > 1 else 0
    if not num_jumped:
        iter(fetcher)
    fetcher.length = length  # a sampler that begins elsewhere may say another one
    for _ in range(num_batches - num_jumped):
        next(fetcher.iterator_wrapper)


def _jump(fetcher: Any, num_batches: int) -> int:
    """Begin the loader anew behind so many batches, if its sampler can; else 0.

    Afterwards the sampler says what it said, or what it has counted itself: the next epoch is to
    begin as ever.
    """
    loaders = fetcher.combined_loader.flattened
    samplers = [getattr(one, "batch_sampler", None) for one in loaders]
    if not all(hasattr(one, _PASSED) and hasattr(one, _PER_BATCH) for one in samplers):
        return 0
    before = [getattr(one, _PASSED) for one in samplers]
    passed = [
        start + num_batches * getattr(one, _PER_BATCH)
        for start, one in zip(before, samplers, strict=True)
    ]
    for one, start in zip(samplers, passed, strict=True):
        setattr(one, _PASSED, start)
    iter(fetcher)
    modes = fetcher.combined_loader._iterator  # noqa: SLF001 - there is no public place
    modes._idx = num_batches  # noqa: SLF001
    for loader in modes.iterators:
        _begin_sampling(loader)
    for one, start, was in zip(samplers, passed, before, strict=True):
        if getattr(one, _PASSED) == start:
            setattr(one, _PASSED, was)
    fetcher.fetched = num_batches
    return num_batches


def _begin_sampling(loader: Any) -> None:
    """Have an iterator of torch's ask its sampler, which looks only then where it begins."""
    sampling = loader._sampler_iter  # noqa: SLF001 - there is no public place
    loader._sampler_iter = chain(list(islice(sampling, 1)), sampling)  # noqa: SLF001


def _plain(count: Any) -> Any:
    """NeMo may have it as a tensor, for its log."""
    return count.item() if isinstance(count, torch.Tensor) else count
