"""What the environment with Megatron-Core 0.15.3 does for the tests: ``peer.py FOLDER``.

Nothing of this package is imported, and it is not installed there. ``state_of`` and ``is_same``
are also used by the tests' own ranks, so that both sides mean the same by a layout.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import mapping, serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch._C._distributed_c10d import TCPStore

ZARR = ("zarr", 1)
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def state_of(job: dict[str, Any], rank: int, tensors: Any, objects: Any) -> dict[str, Any]:
    """The sharded state dict of a rank; with the given values, or with zeros for None."""
    state: dict[str, Any] = {"tensors": {}, "objects": {}}
    for number, shard in enumerate(job["layout"][rank]):
        whole = job["arrays"][shard["key"]]
        tensor = mapping.ShardedTensor(
            shard["key"],
            None,
            getattr(torch, whole["dtype"]),
            tuple(shard["local_shape"]),
            tuple(whole["shape"]),
            tuple(shard["offset"]),
            None if shard["fragments"] is None else tuple(shard["fragments"]),
            tuple(shard["replica_id"]),
            shard["prepend_axis_num"],
        )
        tensor.data = torch.zeros(tensor.local_shape, dtype=tensor.dtype)
        if tensors is not None:
            tensor.data.copy_(tensors[tensor.key][tensor.global_slice()])
        state["tensors"][str(number)] = tensor
    for number, shard in enumerate(job["objects"][rank]):
        places = (tuple(shard[name]) for name in ("shape", "offset", "replica_id"))
        found = mapping.ShardedObject(shard["key"], None, *places)
        found.data = None if objects is None else objects[found.unique_key]
        state["objects"][str(number)] = found
    return state


def is_same(found: Any, expected: Any) -> bool:
    """Whether two nested values are equal, tensors by their bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return has_same_bits(found, expected)
    if isinstance(expected, dict):
        same_keys = found.keys() == expected.keys()
        return same_keys and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(is_same(*pair) for pair in pairs)
    return bool(found == expected)


def has_same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    ours, theirs = (t.detach().contiguous().reshape(-1) for t in (found, expected))
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


class Folder:
    """Where a job and its values lie."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = str(path / "checkpoint")
        self.job: dict[str, Any] = json.loads((path / "job.json").read_text())
        self.tensors, self.objects, self.common = (
            torch.load(path / f"{name}.pt", weights_only=False)
            for name in ("tensors", "objects", "common")
        )


def save(rank: int, folder: Folder) -> list[str]:
    """Save the job's state with ("zarr", 1)."""
    state = state_of(folder.job, rank, folder.tensors, folder.objects)
    dist_checkpointing.save({**state, **folder.common}, folder.checkpoint, ZARR)
    return []


def load(rank: int, folder: Folder) -> list[str]:
    """Load the job's layout with each strategy of 0.15.3; what differs from the job's values."""
    # Only 0.15.3 has them, and this module is also imported beside 0.16.
    old = "megatron.core.dist_checkpointing.strategies"
    zarr, tensorstore = (import_module(f"{old}.{name}") for name in ("zarr", "tensorstore"))
    strategies = {
        "default": None,
        "zarr": zarr.ZarrLoadShardedStrategy(),
        "tensorstore": tensorstore.TensorStoreLoadShardedStrategy(),
        "in place": tensorstore.TensorStoreLoadShardedStrategy(load_directly_on_device=True),
    }
    wrong = []
    expected = state_of(folder.job, rank, folder.tensors, folder.objects)
    for name, strategy in strategies.items():
        state = state_of(folder.job, rank, None, None)
        found = dist_checkpointing.load(state, folder.checkpoint, strategy)
        wrong += [f"{name}: {what}" for what in wrong_of(found, expected, folder.common)]
    return wrong


def wrong_of(found: dict[str, Any], expected: dict[str, Any], common: Any) -> list[str]:
    """Keys of the shards that came out wrong, and the common state where it did."""
    wrong = [
        f"{kind} {value.key}"
        for kind in ("tensors", "objects")
        for number, value in expected[kind].items()
        if number not in found[kind] or not is_same(found[kind][number], value.data)
    ]
    rest = {key: value for key, value in found.items() if key not in expected}
    return wrong if is_same(rest, common) else [*wrong, f"common state {rest}"]


def load_whole(rank: int, folder: Folder) -> list[str]:
    """Load every array whole, and list all there is; what differs from the job's values."""
    found = dist_checkpointing.load_plain_tensors(folder.checkpoint)
    wrong = [k for k, t in folder.tensors.items() if k not in found or not is_same(found[k], t)]
    tensors = dist_checkpointing.load_tensors_metadata(folder.checkpoint)
    if tensors.keys() != folder.tensors.keys():
        wrong.append(f"rank {rank}, arrays: {sorted(tensors.keys() ^ folder.tensors.keys())}")
    listed = serialization.load_sharded_metadata(folder.checkpoint)
    if listed.keys() != folder.tensors.keys() | folder.objects.keys():
        wrong.append(f"rank {rank}, listed: {sorted(listed)}")
    return wrong


def load_gpt(rank: int, folder: Folder) -> list[str]:
    """Load a GPTModel of 0.15.3 at the job's layout; what its parameters differ in."""
    parallel_state.initialize_model_parallel(folder.job["tp"], folder.job["pp"])
    model = gpt_model(folder.job["tp"], folder.job["pp"])
    state = model.sharded_state_dict(metadata=METADATA)
    model.load_state_dict(dist_checkpointing.load({"m": state}, folder.checkpoint)["m"])
    after = model.sharded_state_dict(metadata=METADATA)
    mapping.apply_factories(after)
    shards = [v for v in nested_values(after) if isinstance(v, mapping.ShardedTensor)]
    wrong = [
        shard.key
        for shard in shards
        if not is_same(shard.data.detach(), folder.tensors[shard.key][shard.global_slice()])
    ]
    return wrong if shards else [f"rank {rank} has no shards"]


def gpt_model(tp: int, pp: int) -> Any:
    """The model of the golden sets."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=256,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=128,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    return model.bfloat16()


ACTIONS = {"save": save, "load": load, "load_whole": load_whole, "load_gpt": load_gpt}


def run_rank(rank: int, path: Path, port: int, timeout_s: float) -> None:
    """Carry out the job on one rank and note what is wrong."""
    torch.set_num_threads(1)
    # 0.15.3 waits for CUDA after every tensor that it saves.
    vars(torch.cuda)["synchronize"] = lambda *_: None
    folder = Folder(path)
    limit = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=folder.job["size"], timeout=limit
    )
    try:
        findings = ACTIONS[folder.job["action"]](rank, folder)
    except Exception:  # noqa: BLE001 - handed to the test
        findings = [traceback.format_exc()]
    (path / f"rank{rank}.json").write_text(json.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()


def main(path: Path) -> int:
    """Run the job of a folder in one process per rank; 0 once all of them have ended well."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    job = json.loads((path / "job.json").read_text())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Forked after the imports, and before anything has used TensorStore.
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=run_rank, args=(rank, path, store.port, job["timeout_s"]), daemon=True
        )
        for rank in range(job["size"])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(job["timeout_s"])
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return 0 if not any(codes) and None not in codes else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
