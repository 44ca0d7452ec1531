"""A training job far larger than this machine, and what each of its ranks holds.

The shapes are those of Megatron-Core's GPTModel, one array for each kind of layer with the layers
as its first dim, and of its distributed optimizer in the form ``dp_reshardable``: flat buffers, cut
into as many parts as there are data-parallel ranks. Weights are written by the ranks that
Megatron-Core's FullyParallelSaveStrategyWrapper would choose: the largest first, each by the one
that has least.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from dist_ckpt_strategies.core.array import DType, RankShards, ShardId, ShardSpec
from dist_ckpt_strategies.core.balance import build_spread
from dist_ckpt_strategies.core.region import Region, Shape

BUCKET_NUMEL = 40_000_000
"""Parameters after which Megatron-Core's DDP begins another bucket."""

STATES = ("param", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of each parameter, in float32."""

_GELU_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Weight:
    """A kind of tensor of the model.

    Attributes:
        key: of its array.
        shape: of one layer's, in elements.
        split_dim: that tensor parallelism cuts; None where every rank has all.
        is_stacked: whether the array has a first dim that counts layers.
    """

    key: str
    shape: Shape
    split_dim: int | None
    is_stacked: bool = True


@dataclass(frozen=True)
class Job:
    """A GPT and its parallel layout: ranks count tensor-parallel first, then data, then pipeline.

    Attributes:
        layers: of the model; divisible by ``pipeline``.
        hidden: hidden size; divisible by ``tensor``.
        vocabulary: padded; divisible by ``tensor``.
        tensor: ranks that share a layer.
        pipeline: stages.
        data: ranks that hold the same weights.
    """

    layers: int
    hidden: int
    vocabulary: int
    tensor: int
    pipeline: int
    data: int

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def num_groups(self) -> int:
        """Groups of data-parallel ranks."""
        return self.tensor * self.pipeline

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(
            math.prod(weight.shape) * (self.layers if weight.is_stacked else 1)
            for stage in {0, self.pipeline - 1}
            for weight in self.weights(stage)
            if stage == 0 or not weight.is_stacked
        )

    def rank(self, tensor: int, data: int, pipeline: int) -> int:
        """The global rank at a place of the layout."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def weights(self, stage: int) -> list[Weight]:
        """The kinds of tensors of one pipeline stage; of the stacked ones it has some layers."""
        h = self.hidden
        found = [
            Weight(f"decoder.layers.{name}", shape, split_dim)
            for name, shape, split_dim in (
                ("self_attention.linear_proj.weight", (h, h), 1),
                ("self_attention.linear_proj.bias", (h,), None),
                ("self_attention.linear_qkv.layer_norm_weight", (h,), None),
                ("self_attention.linear_qkv.layer_norm_bias", (h,), None),
                ("self_attention.linear_qkv.weight", (3 * h, h), 0),
                ("self_attention.linear_qkv.bias", (3 * h,), 0),
                ("mlp.linear_fc1.layer_norm_weight", (h,), None),
                ("mlp.linear_fc1.layer_norm_bias", (h,), None),
                ("mlp.linear_fc1.weight", (_GELU_FACTOR * h, h), 0),
                ("mlp.linear_fc1.bias", (_GELU_FACTOR * h,), 0),
                ("mlp.linear_fc2.weight", (h, _GELU_FACTOR * h), 1),
                ("mlp.linear_fc2.bias", (h,), None),
            )
        ]
        table = (self.vocabulary, h)
        if stage == 0:
            found.append(Weight("embedding.word_embeddings.weight", table, 0, is_stacked=False))
        if stage == self.pipeline - 1:
            found += [
                Weight("decoder.final_layernorm.weight", (h,), None, is_stacked=False),
                Weight("decoder.final_layernorm.bias", (h,), None, is_stacked=False),
                Weight("output_layer.weight", table, 0, is_stacked=False),
            ]
        return found

    def weight_boxes(self, tensor: int, stage: int) -> Iterator[tuple[Weight, Shape, Region]]:
        """What the ranks at one place of a stage hold of the model: array shape and box of each."""
        per_stage = self.layers // self.pipeline
        for weight in self.weights(stage):
            local, offset = list(weight.shape), [0] * len(weight.shape)
            if weight.split_dim is not None:
                local[weight.split_dim] //= self.tensor
                offset[weight.split_dim] = tensor * local[weight.split_dim]
            if not weight.is_stacked:
                yield weight, weight.shape, Region(tuple(offset), tuple(local))
                continue
            for layer in range(stage * per_stage, (stage + 1) * per_stage):
                box = Region((layer, *offset), (1, *local))
                yield weight, (self.layers, *weight.shape), box

    def bucket_ends(self, stage: int) -> list[list[int]]:
        """Of each bucket of a stage's ranks, where its parameters end, in elements."""
        found: list[list[int]] = []
        ends: list[int] = []
        for _, _, box in reversed(list(self.weight_boxes(0, stage))):
            ends.append((ends[-1] if ends else 0) + box.numel)
            if ends[-1] >= BUCKET_NUMEL:
                found.append(ends)
                ends = []
        return [*found, ends] if ends else found

    @cached_property
    def _writers(self) -> Mapping[int, Mapping[int, int]]:
        """For each stage the data-parallel rank that writes each of its weights, by number."""
        found: dict[int, dict[int, int]] = {}
        for stage in {0, min(1, self.pipeline - 1), self.pipeline - 1}:
            ids = [ShardId(w.key, box) for w, _, box in self.weight_boxes(0, stage)]
            keepers = build_spread(
                dict.fromkeys(ids, range(self.data)), {one: one.region.numel for one in ids}
            )
            found[stage] = {number: keepers[one] for number, one in enumerate(ids)}
        return found

    def _writers_of(self, stage: int) -> Mapping[int, int]:
        kind = stage if stage in {0, self.pipeline - 1} else 1
        return self._writers[kind]

    def written_weights(self) -> Iterator[RankShards]:
        """What is written of the model, by the ranks that write it."""
        for stage in range(self.pipeline):
            writers = self._writers_of(stage)
            for tensor in range(self.tensor):
                for number, (weight, shape, box) in enumerate(self.weight_boxes(tensor, stage)):
                    if weight.split_dim is not None or tensor == 0:
                        spec = ShardSpec(ShardId(weight.key, box), shape, DType.BFLOAT16)
                        yield RankShards(self.rank(tensor, writers[number], stage), (spec,))

    def optimizer_of(self, tensor: int, stage: int) -> Iterator[RankShards]:
        """What the ranks of one data-parallel group hold of the optimizer."""
        group = stage * self.tensor + tensor
        for data in range(self.data):
            shards: list[ShardSpec] = []
            for number, ends in enumerate(self.bucket_ends(stage)):
                shards += self._fragments(group, number, ends, data)
            yield RankShards(self.rank(tensor, data, stage), tuple(shards))

    def shards_of(self, rank: int) -> RankShards:
        """All that a rank holds: replicas of weights, and its own part of the optimizer."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        data, stage = rest % self.data, rest // self.data
        writers = self._writers_of(stage)
        shards = [
            ShardSpec(
                ShardId(weight.key, box),
                shape,
                DType.BFLOAT16,
                # What is not cut is on all tensor-parallel ranks too, and written by the first.
                is_main=writers[number] == data and (weight.split_dim is not None or tensor == 0),
            )
            for number, (weight, shape, box) in enumerate(self.weight_boxes(tensor, stage))
        ]
        group = stage * self.tensor + tensor
        for number, ends in enumerate(self.bucket_ends(stage)):
            shards += self._fragments(group, number, ends, data)
        return RankShards(rank, tuple(shards))

    def _fragments(
        self, group: int, bucket: int, ends: list[int], data: int
    ) -> Iterator[ShardSpec]:
        """A rank's part of one bucket, parameter by parameter."""
        size = ends[-1]
        part = -(-size // self.data)
        first, stop = min(data * part, size), min((data + 1) * part, size)
        bounds = [first, *(end for end in ends if first < end < stop), stop]
        name = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.bucket_idx_{bucket}"
        for state in STATES:
            for low, high in pairwise(bounds):
                if low < high:
                    box = Region((low,), (high - low,))
                    yield ShardSpec(ShardId(f"{name}.{state}", box), (size,), DType.FLOAT32)


TRILLION = Job(128, 25_600, 51_200, tensor=8, pipeline=64, data=32)
"""The trillion-parameter GPT of Narayanan et al. 2021, on 16,384 ranks."""


def smaller(num_ranks: int) -> Job:
    """A part of the same job: fewer pipeline stages of as many layers, then fewer replicas."""
    per_stage = TRILLION.layers // TRILLION.pipeline
    tensor = min(TRILLION.tensor, max(1, num_ranks // 8))
    data = min(TRILLION.data, num_ranks // (2 * tensor))
    pipeline = num_ranks // (tensor * data)
    return Job(per_stage * pipeline, TRILLION.hidden, TRILLION.vocabulary, tensor, pipeline, data)


def bytes_by_rank(job: Job, stage: int) -> dict[int, int]:
    """Bytes that the ranks of one stage write, by global rank."""
    found: dict[int, int] = defaultdict(int)
    for data in range(job.data):
        for tensor in range(job.tensor):
            rank = job.rank(tensor, data, stage)
            found[rank] += sum(s.nbytes for s in job.shards_of(rank).shards if s.is_main)
    return dict(found)
