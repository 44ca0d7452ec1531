"""A small GPT with dropout and a sharded Adam: ranks in replicas, each cut into equal shards.

Rank ``r`` of ``replicas * shards`` is shard ``r % shards`` of replica ``r // shards``. All draw
different batches and different dropout masks; their gradients are averaged over the world.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dist_ckpt_strategies.local import BasicTensorAwareStateDict

VOCAB = 32
WIDTH = 16
LENGTH = 12
_BETAS = (0.9, 0.95)
_EPS = 1e-8


class TinyGpt(nn.Module):
    """Embeddings, two causal blocks with dropout, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 1, 4 * WIDTH, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


@dataclass(frozen=True, slots=True)
class Groups:
    """Where a rank stands, and with whom; made anew in every attempt."""

    shard: int  # number of its shard
    num_shards: int  # that a replica is cut into
    replica: Any  # ranks that share the weights of one replica, one for each shard
    twins: Any  # ranks that hold the same shard


def make_groups(num_shards: int) -> Groups:
    """This rank's groups. Collective: world."""
    world = range(dist.get_world_size())
    replica, _ = dist.new_subgroups(num_shards)
    of_shards = [list(world[shard::num_shards]) for shard in range(num_shards)]
    twins, _ = dist.new_subgroups_by_enumeration(of_shards)
    return Groups(dist.get_rank() % num_shards, num_shards, replica, twins)


class ShardedTraining:
    """A rank's training, and its StateProvider.

    Parts: the weights, which all ranks hold and gather anew; and a shard of master weights and
    moments, which the twins hold.
    """

    def __init__(self, groups: Groups, *, seed: int = 7) -> None:
        torch.manual_seed(seed)
        self.groups = groups
        self.model = TinyGpt()
        sizes = [p.numel() for p in self.model.parameters()]
        total = sum(sizes)
        self.shard_size = -(-total // groups.num_shards)
        self.flat = torch.zeros(self.shard_size * groups.num_shards)
        self.grads = torch.zeros_like(self.flat)
        at = 0
        for param, size in zip(self.model.parameters(), sizes, strict=True):
            self.flat[at : at + size] = param.detach().reshape(-1)
            param.data = self.flat[at : at + size].view(param.shape)
            param.grad = self.grads[at : at + size].view(param.shape)
            at += size
        self.start = groups.shard * self.shard_size
        self.master = self.flat[self.start : self.start + self.shard_size].clone()
        self.moments = {name: torch.zeros(self.shard_size) for name in ("first", "second")}
        self.scale = 1.0
        self.step = 0
        self.num_updates = 0
        torch.manual_seed(1000 * seed + dist.get_rank())

    def forward_backward(self) -> float:
        """The loss on a batch of this rank's own; its gradients are ready."""
        self.grads.zero_()
        tokens = torch.randint(VOCAB, (2, LENGTH + 1))
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def reduce_gradients(self) -> None:
        """Average over the world, and the factor that keeps their norm at one. Collective."""
        dist.all_reduce(self.grads)
        self.grads /= dist.get_world_size()
        self.scale = min(1.0, 1.0 / (float(self.grads.norm()) + _EPS))

    def set_step(self, step: int) -> None:
        self.step = step

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {
            "weights": dict(self.model.named_parameters()),
            f"shard/{self.groups.shard}": {"master": self.master, **self.moments},
        }

    def gathered_parts(self) -> frozenset[str]:
        return frozenset({"weights"})

    def objects(self) -> Mapping[str, Any]:
        return {"num_updates": self.num_updates}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        self.num_updates = int(objects["num_updates"])

    def apply_update(self) -> None:
        """See StateProvider: Adam on this rank's shard, with a rate that the objects make up."""
        self.num_updates += 1
        grad = self.grads[self.start : self.start + self.shard_size] * self.scale
        first, second = self.moments["first"], self.moments["second"]
        first.lerp_(grad, 1 - _BETAS[0])
        second.lerp_(grad * grad, 1 - _BETAS[1])
        rate = 0.01 / self.num_updates**0.5
        self.master.addcdiv_(first, second.sqrt() + _EPS, value=-rate)

    def gather_weights(self) -> None:
        dist.all_gather_into_tensor(self.flat, self.master, group=self.groups.replica)


def step_once(training: ShardedTraining) -> None:
    """One step of training. Collective: world."""
    training.forward_backward()
    training.reduce_gradients()
    training.apply_update()
    training.gather_weights()
    training.set_step(training.step + 1)


def undisturbed(_rank: int, num_shards: int, seed: int, num_steps: int) -> list[str]:
    """Body of a rank: the digests of the state before each step, and of the last one."""
    torch.set_num_threads(1)
    training = ShardedTraining(make_groups(num_shards), seed=seed)
    digests = [state_digest(training)]
    for _ in range(num_steps):
        step_once(training)
        digests.append(state_digest(training))
    return digests


def state_digest(training: ShardedTraining) -> str:
    """Of all tensors, of the objects, and of the state of the random numbers."""
    found = hashlib.sha256(f"{training.step} {training.objects()}".encode())
    tensors = [training.flat, training.master, *training.moments.values(), torch.get_rng_state()]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def to_global(training: ShardedTraining) -> dict[str, Any]:
    """What a global checkpoint holds; the tensors are filled in place by a load."""
    # Megatron-Core takes seconds, and not every training is saved.
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: PLC0415

    groups, size, rank = training.groups, dist.get_world_size(), dist.get_rank()
    replica = rank // groups.num_shards
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(
            f"optimizer.{name}", tensor, (0, groups.shard, groups.num_shards), replica_id=replica
        )
        for name, tensor in shards_of(training).items()
    }
    state["random"] = ShardedObject("random", torch.get_rng_state(), (size,), (rank,))
    return state | {"step": training.step, "objects": dict(training.objects())}


def to_local(training: ShardedTraining) -> BasicTensorAwareStateDict:
    """What a local checkpoint holds."""
    return BasicTensorAwareStateDict(
        {
            **shards_of(training),
            "random": torch.get_rng_state(),
            "step": training.step,
            "objects": dict(training.objects()),
        }
    )


def from_local(training: ShardedTraining, state: BasicTensorAwareStateDict) -> None:
    """Take over what a load has brought. Collective: the replica."""
    found = state.state_dict
    for name, tensor in shards_of(training).items():
        tensor.copy_(found[name])
    take(training, int(found["step"]), found["objects"], found["random"])


def shards_of(training: ShardedTraining) -> dict[str, torch.Tensor]:
    return {"master": training.master, **training.moments}


def take(
    training: ShardedTraining, step: int, objects: Mapping[str, Any], random: torch.Tensor
) -> None:
    training.load_objects(objects)
    training.set_step(step)
    training.gather_weights()
    torch.set_rng_state(random.clone())
