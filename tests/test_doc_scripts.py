"""The Python of the pages runs, and prints what the pages say."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import dist_ckpt_strategies
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from tests.cli.commands import PROGRAM
from tests.golden.sets import FLAT, GoldenSet
from tests.support.checkpoints import (
    flip_at,
    header_of,
    write_checkpoint,
    write_metadata,
    write_object,
    write_packs,
)
from tests.support.pages import (
    PAGES,
    ROOT,
    commands_with_outputs,
    expected_outputs,
    python_blocks,
)
from tests.support.processes import finished
from tests.support.ranks import allow_processes, done_by, run_processes

_BETWEEN = "--- next block ---"

_WORLD_OF_ONE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

_STATE = f"""
{_WORLD_OF_ONE}
from pathlib import Path
from megatron.core.dist_checkpointing import ShardedTensor
import dist_ckpt_strategies as package
weight, checkpoint_dir, train_step = torch.arange(6.0), "ckpt", lambda: None
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets("w", weight), "iteration": 7}}
"""

_LOADED = "assert torch.equal(state_dict['w'], torch.arange(6.0)) and state_dict['iteration'] == 7"

_README_BEFORE = f"""
{_STATE}
restored, model = [], torch.nn.Linear(3, 2)
num_steps = 2000
get_state, set_state = (lambda: sharded_state_dict), restored.append
package.save(sharded_state_dict, "old/iter_0000100", ("zarr", 1))
weight.zero_()
"""

_README_AFTER = """
assert manager.all_steps() == [1000, 2000]
assert state_dict.keys() == {"w", "iteration"}, state_dict
assert torch.equal(weight, torch.arange(6.0)), state_dict
assert state["step"] == 10
"""

_FORMAT_BEFORE = f"""
{_STATE}
weight = torch.arange(32.0).reshape(4, 8)
package.save({{"w": ShardedTensor.from_rank_offsets("w", weight)}}, "ckpt", ("zarr", 1))
array_directory = Path("ckpt/w")
"""

_FORMAT_AFTER = """
assert (whole == weight.numpy()).all() and (chunk == whole).all() and part.shape == (2, 8)
"""

_CONTRIBUTING_AFTER = """
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.scan import scan, verify
for step in (1, 2):
    weight.fill_(step)
    package.save(sharded_state_dict, "memory://bucket/iter_1", overwrite=True)
    weight.zero_()
    package.load(sharded_state_dict, "memory://bucket/iter_1")
    assert weight.tolist() == [step] * 6
with package.TieredCheckpointManager(
    "memory://bucket/run", policy=package.SavePolicy(every_steps=1, keep_last=1)
) as manager:
    for step in (1, 2):
        manager.save(step, sharded_state_dict)
assert manager.all_steps() == [2]
place = located("memory://bucket/run/iter_0000002", None)
assert verify(scan(place)) == ()
(pack,) = (name for name in OBJECTS if "iter_0000002/packs" in name)
content = bytearray(OBJECTS[pack])
content[8 + int.from_bytes(content[:8], "little")] ^= 1  # of the first block
OBJECTS[pack] = bytes(content)
(issue,) = verify(scan(place))
assert issue.key == "w" and pack.endswith(issue.path)
"""

_PACKS_BEFORE = f"""
{_STATE}
weight, checkpoint_dir = torch.arange(32.0).reshape(4, 8), "iter_0001000"
name = "decoder.final_layernorm.weight"
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets(name, weight)}}
"""

_STORES_BEFORE = f"""
{_WORLD_OF_ONE}
import atexit, os
from tests.support.object_stores import Moto
from tests.support.ports import free_port
server = Moto(free_port())
atexit.register(server.kill)
server.store.make_bucket("checkpoints")
os.environ.update(server.store.variables)
"""

_LOCAL_BEFORE = f"""
{_STATE}
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
model, num_steps = torch.nn.Linear(3, 2), 100
earlier = {{name: torch.full_like(value, 7) for name, value in model.state_dict().items()}}
LocalCheckpointManager("local/checkpoints", "run-7").save(
    BasicTensorAwareStateDict({{"model": earlier, "step": 99}}), 99
)
Path("local/checkpoints/iter_0000100").mkdir()
"""

_LOCAL_AFTER = f"""
assert all(bool((value == 7).all()) for value in model.state_dict().values())
assert (iteration, rank, manager.find_latest()) == (99, 0, 100)
{_LOADED}
"""

_ADOPT_BEFORE = f"""
{_STATE}
from megatron.core import dist_checkpointing, parallel_state
parallel_state.initialize_model_parallel()
class Both(dict):
    def __call__(self):
        return Both(w=ShardedTensor.from_rank_offsets("w", weight))
sharded_state_dict = Both()()
"""

_MEGATRON_LM_BEFORE = f"""
{_ADOPT_BEFORE}
import sys, types
training = sys.modules["megatron.training"] = types.ModuleType("training")
checkpointing = sys.modules["megatron.training.checkpointing"] = types.ModuleType("checkpointing")
checkpointing.dist_checkpointing = dist_checkpointing
Path(checkpoint_dir).mkdir()
"""

_MEGATRON_LM_AFTER = """
assert torch.equal(state_dict["w"], torch.arange(6.0))
Path("later").mkdir()
checkpointing.dist_checkpointing.save(sharded_state_dict(), "later")
assert checkpointing.dist_checkpointing.load(Both()(), "later").keys() == {"w"}
"""

_TWO_STAGE_BEFORE = f"""
{_ADOPT_BEFORE}
package.register()
Path("ckpt").mkdir()
dist_checkpointing.save(sharded_state_dict, "ckpt", ("zarr", 1))
weight.zero_()
"""

_MODEL = f"""
{_STATE}
class Model(torch.nn.Linear):
    def sharded_state_dict(self, prefix=""):
        return {{
            prefix + name: ShardedTensor.from_rank_offsets(prefix + name, value.detach())
            for name, value in self.named_parameters()
        }}

model, checkpoint_dir = Model(3, 2), "old"
kind = {{"distrib_optim_sharding_type": "fully_reshardable"}}
saved = [value.clone() for value in model.parameters()]
def save(prefix, place):
    for value, old in zip(model.parameters(), saved):
        value.data.copy_(old)
    state = {{"model": model.sharded_state_dict(prefix)}}
    package.save(state, place, ("zarr", 1), content_metadata=kind)
    zero()
def zero():
    for value in model.parameters():
        value.data.zero_()
"""

_MIGRATE_AFTER = """
assert all(map(torch.equal, model.parameters(), saved))
assert (missing, unexpected) == (set(), set())
assert dist_checkpointing.load_content_metadata(checkpoint_dir) == kind
arrays = package.load({}, "converted/iter_0000001", strict="return_all")[1]
assert arrays == {"weight", "bias"}
"""

_DCP_BEFORE = f"""
{_WORLD_OF_ONE}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(3, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(model.parameters())
"""

_RIGHT_STATE_BEFORE = f"""
{_WORLD_OF_ONE}
import torch
import dist_ckpt_strategies
from dist_ckpt_strategies.integrations import dcp
from megatron.core.dist_checkpointing import ShardedTensor
def get_state(moment=0.5, num_steps=20):
    moments = torch.full((64, 96), moment)
    arrays = {{"layer.weight": torch.ones(64, 96), "optimizer.state.exp_avg.layer.weight": moments}}
    shards = {{key: ShardedTensor.from_rank_offsets(key, t) for key, t in arrays.items()}}
    return {{"arrays": shards, "scheduler": {{"num_steps": num_steps}}}}
dist_ckpt_strategies.save(get_state(), "checkpoints/iter_0000020")
state_dict, state = get_state(0.0, 0), {{"weight": torch.ones(64, 96)}}
manager = dist_ckpt_strategies.TieredCheckpointManager("run")
manager.save(20, get_state, force=True)
"""

_ADAPTERS_BEFORE = f"""
{_STATE}
from tests.support.checkpoints import header_of
names = ["layer.weight", "layer.lora_a", "layer.lora_b"]
tensors = [torch.full((3,), float(n)) for n in range(3)]
sharded_state_dict = {{
    n: ShardedTensor.from_rank_offsets(n, tensor) for n, tensor in zip(names, tensors)
}}
package.save(sharded_state_dict, "pretrained")
tensors[1].fill_(7)
"""

_ADAPTERS_AFTER = """
assert [state[name].tolist() for name in names] == [[0.0] * 3, [7.0] * 3, [2.0] * 3]
(pack,) = Path("run/step_10").rglob("*.safetensors")
blocks = {name.rpartition("@")[0] for name in header_of(pack)[0] if "@" in name}
assert blocks == set(names[1:]), blocks
"""

SCRIPTS = {
    **{f"docs/{name}.md": ("", "") for name in ("quickstart", "errors", "tuning", "operations")},
    "README.md": (_README_BEFORE, _README_AFTER),
    "docs/stores.md": (_STORES_BEFORE, "server.kill()"),
    "docs/contributing.md": (_STATE, _CONTRIBUTING_AFTER),
    "docs/convert.md": (f"{_STATE}\npackage.save(sharded_state_dict, 'old', ('zarr', 1))", ""),
    "docs/format.md": (_FORMAT_BEFORE, _FORMAT_AFTER),
    "docs/packs.md": (_PACKS_BEFORE, ""),
    "docs/local.md": (_LOCAL_BEFORE, _LOCAL_AFTER),
    "docs/migrate.md": (
        f"{_MODEL}\nsave('model.', 'model/model_weights')\nsave('', 'old')",
        _MIGRATE_AFTER,
    ),
    "docs/two_stage.md": (_TWO_STAGE_BEFORE, "assert torch.equal(weight, torch.arange(6.0))"),
    "docs/cli.md": ("import os\nos.mkdir('checkpoints')", "assert report.removed == ()"),
    "docs/manager.md": (_WORLD_OF_ONE, ""),
    "docs/dcp.md": (_DCP_BEFORE, "assert state['step'] == 10"),
    "docs/right_state.md": (_RIGHT_STATE_BEFORE, "manager.close()"),
    "docs/adopt.md": (_MEGATRON_LM_BEFORE, _MEGATRON_LM_AFTER),
    "docs/adapters.md": (_ADAPTERS_BEFORE, _ADAPTERS_AFTER),
    "docs/examples.md": ("", ""),
}

CHANGES = {
    "docs/packs.md": {
        "save_async(sharded_state_dict, checkpoint_dir": "save_async(sharded_state_dict, 'later'",
    },
    "docs/local.md": {
        '"/local/': '"local/',
        '"/shared/': '"shared/',
        "replication_jump=8, replication_factor=2": "replication_jump=1, replication_factor=1",
    },
    "docs/cli.md": {'"/checkpoints"': '"checkpoints"'},
    "docs/migrate.md": {
        'sharded = model.sharded_state_dict(prefix="model.")': """
assert all(map(torch.equal, model.parameters(), saved))
zero()
sharded = model.sharded_state_dict(prefix="model.")"""
    },
    "docs/dcp.md": {'if __name__ == "__main__"': "if None"},
    "docs/adapters.md": {"state = load(": "[t.zero_() for t in tensors]\nstate = load("},
}
"""What one process has not: other nodes and their directories, and ranks to start."""


def run_page(_: int, script: Path) -> str:
    """What a script prints, in its directory. Body of a rank: it starts without an import."""
    allow_processes()
    os.chdir(script.parent)
    with redirect_stdout(StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    page = ROOT / name
    before, after = SCRIPTS[name]
    script = tmp_path / "page.py"
    parts = [before, *python_blocks(page), after]
    code = f"\nprint({_BETWEEN!r})\n".join(parts)
    for old, new in CHANGES.get(name, {}).items():
        assert old in code
        code = code.replace(old, new)
    script.write_text(code)

    (output,) = done_by(1, run_page, script, makes_group=False)

    printed = output.split(f"{_BETWEEN}\n")[1:-1]
    expected = expected_outputs(page)
    assert [None if e is None else p for p, e in zip(printed, expected, strict=True)] == expected


# Commands


def make_old(root: Path) -> None:
    """The checkpoint that Megatron-Core 0.15.3 saved with the optimizer in its old form."""
    shutil.copytree(GoldenSet.unpack(FLAT, root / "unpacked").checkpoint, root / "OLD")


def make_different(root: Path) -> None:
    """The same as NeMo's, and two iterations of it with one difference of each kind."""
    make_old(root)
    for name in ("nemo/model_weights", "checkpoints/iter_0000003", "checkpoints/iter_0000200"):
        shutil.copytree(root / "OLD", root / name)
    later = root / "checkpoints" / "iter_0000200"
    flip_at(later / "decoder.final_layernorm.weight" / "0", *range(0, 128, 2))
    (later / "rng_state" / "shard_1.1_2.2.pt").unlink()
    common = torch.load(later / "common.pt", weights_only=False)
    write_object(later / "common.pt", common | {"iteration": 200})
    damaged = root / "checkpoints" / "damaged"
    dist_ckpt_strategies.convert(root / "OLD", damaged, "pack")
    for pack in damaged.rglob("*.safetensors"):
        header, start = header_of(pack)
        for name, tensor in header.items():
            if name == "decoder.layers.mlp.linear_fc1.weight@0.0.0":
                flip_at(pack, start + tensor["data_offsets"][0])


def save_locally(rank: int, root: Path) -> None:
    cliques = CliqueReplicationStrategy.from_replication_params(2, 2)
    manager = LocalCheckpointManager(root, "run-7", repl_strategy=cliques)
    state = {"w": torch.ones(1000), "b": torch.ones(1000), "step": 100}
    manager.save(BasicTensorAwareStateDict(state), 100)


def make_all(root: Path) -> None:
    """Large checkpoints of sparse files, one killed hours ago; local ones; a script for ranks."""
    for number in (800, 900, 1000, 1100, 1150):
        place = root / "checkpoints" / f"iter_{number:07d}"
        if number == 1150:
            array = write_packs(place, is_finished=False) / ".partial-0" / "more"
        else:
            array = write_checkpoint(place) / "more"
        num_elements = {800: 262_500_000, 1150: 102_700_000}.get(number, 100)
        write_metadata(array, shape=[num_elements], chunks=[num_elements])
        (array / "0").touch()
        os.truncate(array / "0", 4 * num_elements)
        for path in (place, *place.rglob("*")):
            os.utime(path, (number, number))
    local = root / "local" / "checkpoints"
    assert run_processes(4, save_locally, local) == [None] * 4
    for rank in "123":
        shutil.rmtree(local / "run-7" / rank)
    (root / "train.py").write_text(_TRAIN)


_TRAIN = """
import os, signal, time
from pathlib import Path
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
wait_rank()
rank, killed, replaced = os.environ["RANK"], Path("killed"), Path("replaced")
if rank == "2":
    print("step 41: loss 3.127", flush=True)
if rank == "1" and not killed.exists():
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1":
    replaced.touch()
while not replaced.exists():
    time.sleep(0.01)
"""

_SCENES = {
    "docs/migrate.md": make_old,
    "docs/convert.md": make_different,
    "docs/cli.md": make_all,
}
"""What makes the directories that the commands of a page name."""

_QUIET = {
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_SMALLER = {"bench /checkpoints": "bench /checkpoints --size 0.002 --repetitions 2"}
_VARYING = {
    r"[0-9]+\.[0-9] s\b": "0.0 s",
    r"_local_[0-9a-f]+": "_local_ID",
    r"[0-9a-f]{2}/[0-9a-f]{16}\.safetensors": "PACK",
    r"(digest|expected) [0-9a-f]{16}": r"\1 DIGEST",
    r"(run-7 .*)\b[0-9a-f]+$": r"\1ID",
    r"-{10,}|  +": "  ",
}
"""What differs from run to run: times, names that are drawn, and the widths that follow."""
_FIGURES = r"[0-9][0-9.,]*( [kMG]?B(/s)?\b)?"


def outlined(text: str, command: str) -> list[str]:
    """The lines without what varies; of a measurement without all figures."""
    for varying, constant in _VARYING.items():
        text = re.sub(varying, constant, text, flags=re.MULTILINE)
    if command.startswith("dist-ckpt bench"):
        text = re.sub(r" +", " ", re.sub(_FIGURES, "N", text))
    lines = [line.rstrip() for line in text.splitlines()]
    return sorted(lines) if command.startswith("dist-ckpt run") else lines


def test_every_page_with_outputs_of_commands_has_a_scene() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES if commands_with_outputs(page)}
    assert pages == set(_SCENES)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", _SCENES)
def test_the_commands_of_a_page_print_what_the_page_says(name: str, tmp_path: Path) -> None:
    _SCENES[name](tmp_path)
    program = f'dist-ckpt() {{ {shlex.join(PROGRAM)} "$@"; }}'
    for commands, expected in commands_with_outputs(ROOT / name):
        script = commands
        for old, new in _SMALLER.items():
            script = script.replace(old, new)
        script = re.sub(r"(?<= )/(?=nemo|checkpoints|local)", f"{tmp_path}/", script)
        done = subprocess.run(
            ["/bin/bash", "-c", f"{program}\n{script}"],
            cwd=tmp_path,
            env=os.environ | _QUIET,
            input="n\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        printed = done.stdout.replace(f"{tmp_path}/OLD", "OLD").replace(f"{tmp_path}/NEW", "NEW")
        found = outlined(printed.replace(str(tmp_path), ""), commands)
        shown = outlined(expected, commands)
        if "..." in shown:
            rest = iter(found)
            assert [line for line in shown if line != "..." and line not in rest] == [], found
        else:
            assert found == shown


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_terminal_pictures_can_be_drawn(tmp_path: Path) -> None:
    script = ROOT / "docs" / "pictures.py"

    finished(sys.executable, script, "--out", tmp_path, "verify")

    drawn = (tmp_path / "verify.svg").read_text().replace("&#160;", " ")
    assert "$ dist-ckpt verify checkpoint" in drawn
    assert "checkpoint is NOT whole: 1 issue in 1 file" in drawn
