"""Where a NeMo training is in its data. Imports nothing of NeMo.

A step of NeMo's draws as many micro-batches from the loader as it needs, so that Lightning's
count of batches does not say how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import torch

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.integrations.lightning_steps import set_epoch
from dist_ckpt_strategies.megatron.process_state import set_num_microbatches
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
"""What NeMo's samplers of batches begin after."""

_PER_BATCH = "micro_batch_times_data_parallel_size"
_MICRO_BATCHES = frozenset(
    {
        "MegatronCorePretrainingSampler",
        "MegatronPretrainingRandomSampler",
        "MegatronPretrainingSampler",
    }
)
"""Those of them that give micro-batches, each of which moves that by ``_PER_BATCH``."""

_NOTHING = {"num_drawn": 0, "num_fetched": 0, "is_last": False}


class DataPosition:
    """The micro-batches that have been drawn in this epoch, and what NeMo counts besides.

    After a recovery the loader begins where it began before the fault, and is moved to the
    position; so its length, its later epochs and what NeMo counts from its beginning are those of
    a training without faults.
    """

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self._sampler = trainer.strategy.data_sampler
        self._module = trainer.datamodule
        self._drawn: dict[str, Any] = _NOTHING
        self._samplers: list[Any] = []
        self._starts: list[int] | None = None
        self._is_known = True
        self._loaded: dict[str, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether what was drawn last was the end of an epoch."""
        return bool(self._drawn["is_last"])

    def note(self) -> None:
        """Take the loader's position, once a step's data is drawn: a teardown forgets it."""
        fetcher = self._fit._data_fetcher  # noqa: SLF001 - there is no public place
        if fetcher._batch_idx < self._drawn["num_drawn"]:  # noqa: SLF001
            # An epoch ended within a step, which nobody could tell before the loader's end.
            self._is_known = self._is_known and self._consumed() == self._starts
        self._drawn = {
            "num_drawn": fetcher._batch_idx + 1,  # noqa: SLF001
            "num_fetched": fetcher.fetched,
            "is_last": fetcher.done,
        }

    def end_epoch_if_over(self) -> None:
        """After an epoch's last step: nothing is drawn of the next one, which begins here."""
        if self.is_last:
            self._drawn, self._starts = _NOTHING, self._consumed()

    def objects(self) -> dict[str, Any]:
        """As it was noted, with what the sampler and the datamodule say now, as JSON types."""
        counts = {
            name: _plain(getattr(self._sampler, name))
            for name in _OF_SAMPLER
            if hasattr(self._sampler, name)
        }
        module = {} if self._module is None else self._module.state_dict()
        return {
            **self._drawn,
            "starts": self._starts,
            "is_known": self._is_known,
            "counts": counts,
            "module": to_json_value(module or {}),
        }

    def load(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave; the loader is made next.

        Raises:
            RestartError: nobody knows where the epoch began.
        """
        if not objects["is_known"]:
            raise RestartError(
                "the position in the data is not known: an epoch ended within a step, and its "
                "sampler goes on from there; let limit_train_batches be a multiple of the "
                "micro-batches of a step"
            )
        self._loaded, self._starts = dict(objects), objects["starts"]
        self._drawn = {name: objects[name] for name in self._drawn}
        module = from_json_value(objects["module"])
        if module and self._module is not None:
            self._module.load_state_dict(module)
        self._set_counts(objects["counts"])

    def go_on(self) -> bool:
        """Move the loader, which is made by now, to the position that was loaded; if one was."""
        loaded, self._loaded = self._loaded, {}
        loaders = self._fit._combined_loader.flattened  # noqa: SLF001 - there is no public place
        found = [getattr(one, "batch_sampler", None) for one in loaders]
        self._samplers = [one for one in found if hasattr(one, _PASSED)]
        if not loaded:
            self._starts = self._consumed()
            return False
        self._set_counts(loaded["counts"])  # the loader that was made begins its own
        fetcher: Any = self._fit._data_fetcher  # noqa: SLF001 - there is no public place
        if not self._begins_there(loaded):
            set_epoch(self._fit)
            self._set_consumed(loaded["starts"])
            _draw(fetcher, loaded["num_drawn"])
        if loaded["num_drawn"]:
            # The epoch's loop adds the batches that it has counted.
            counted = self._fit.epoch_loop.batch_progress.current.ready
            fetcher.fetched = loaded["num_fetched"] - counted
        return True

    def _consumed(self) -> list[int]:
        return [getattr(one, _PASSED) for one in self._samplers]

    def _set_consumed(self, starts: list[int] | None) -> None:
        for one, start in zip(self._samplers, starts or [], strict=False):
            setattr(one, _PASSED, start)

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


def _draw(fetcher: Any, num_batches: int) -> None:
    """Begin the loader anew, and draw so many batches; all but the last one unread if possible."""
    length = fetcher.length
    num_jumped = _jump(fetcher, num_batches - 1) if num_batches > 1 else 0
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
    if not all(type(one).__name__ in _MICRO_BATCHES for one in samplers):
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
