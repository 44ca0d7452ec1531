"""The Python of the pages runs, and prints what the pages say."""

import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, expected_outputs, python_blocks
from tests.support.processes import finished, run_script

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
restored = []
num_steps = 2000
get_state, set_state = (lambda: sharded_state_dict), restored.append
package.save(sharded_state_dict, "old/iter_0000100", ("zarr", 1))
weight.zero_()
"""

_README_AFTER = """
assert manager.all_steps() == [1000, 2000]
assert state_dict.keys() == {"w", "iteration"}, state_dict
assert torch.equal(weight, torch.arange(6.0)), state_dict
"""

_FORMAT_BEFORE = f"""
{_STATE}
from dist_ckpt_strategies.formats.zarr2_python import register_extension_dtypes
register_extension_dtypes()
weight = torch.arange(32.0, dtype=torch.bfloat16).reshape(4, 8)
package.save({{"w": ShardedTensor.from_rank_offsets("w", weight)}}, "ckpt", ("zarr", 1))
array_directory = Path("ckpt/w")
"""

_FORMAT_AFTER = """
assert (whole == weight.float().numpy()).all() and (chunk == whole).all() and part.shape == (2, 8)
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
(chunk,) = (name for name in OBJECTS if "iter_0000002" in name and name.endswith("/w/c.0"))
OBJECTS[chunk] = bytes([OBJECTS[chunk][0] ^ 1]) + OBJECTS[chunk][1:]
(issue,) = verify(scan(place))
assert issue.path == "arrays/w/c.0"
"""

_FORMAT2_BEFORE = f"""
{_STATE}
weight, checkpoint_dir = torch.arange(32.0).reshape(4, 8), "iter_0000999"
name = "decoder.final_layernorm.weight"
sharded_state_dict = {{"w": ShardedTensor.from_rank_offsets(name, weight)}}
"""

_FORMAT2_AFTER = """
assert torch.equal(state_dict["w"], weight)
assert (array.read().result() == weight.numpy()).all()
assert (whole == weight.numpy()).all()
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
"""

_MEGATRON_LM_AFTER = """
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
def save(prefix):
    state = {{"model": model.sharded_state_dict(prefix)}}
    package.save(state, "old", ("zarr", 1), content_metadata=kind)
    for value in model.parameters():
        value.data.zero_()
"""

_MIGRATE_AFTER = """
assert all(map(torch.equal, model.parameters(), saved))
assert (missing, unexpected) == (set(), set())
assert dist_checkpointing.load_content_metadata(checkpoint_dir) == kind
"""

_NEMO_AFTER = """
assert all(map(torch.equal, model.parameters(), saved))
arrays = package.load({}, "converted/iter_0000001", strict="return_all")[1]
assert arrays == {"weight", "bias"}
"""

SCRIPTS = {
    **{f"docs/{name}.md": ("", "") for name in ("quickstart", "errors", "tuning", "operations")},
    "README.md": (_README_BEFORE, _README_AFTER),
    "docs/releases.md": (f"{_STATE}\nPath(checkpoint_dir).mkdir()", _LOADED),
    "docs/stores.md": (_STORES_BEFORE, "server.kill()"),
    "docs/contributing.md": (_STATE, _CONTRIBUTING_AFTER),
    "docs/convert.md": (f"{_STATE}\npackage.save(sharded_state_dict, 'old', ('zarr', 1))", ""),
    "docs/format.md": (_FORMAT_BEFORE, _FORMAT_AFTER),
    "docs/format2.md": (_FORMAT2_BEFORE, _FORMAT2_AFTER),
    "docs/local.md": (_LOCAL_BEFORE, _LOCAL_AFTER),
    "docs/migrate.md": (f"{_MODEL}\nsave('')", _MIGRATE_AFTER),
    "docs/nemo.md": (f"{_MODEL}\nsave('model.')", _NEMO_AFTER),
    "docs/two_stage.md": (_TWO_STAGE_BEFORE, "assert torch.equal(weight, torch.arange(6.0))"),
    "docs/cli.md": ("import os\nos.mkdir('checkpoints')", "assert report.removed == ()"),
    "docs/adopt.md": (_MEGATRON_LM_BEFORE, _MEGATRON_LM_AFTER),
}

CHANGES = {
    "docs/format2.md": {
        '"iter_0001000': '"iter_0000999',
        "save_async(sharded_state_dict, checkpoint_dir": "save_async(sharded_state_dict, 'later'",
    },
    "docs/local.md": {
        '"/local/': '"local/',
        '"/shared/': '"shared/',
        "replication_jump=8, replication_factor=2": "replication_jump=1, replication_factor=1",
    },
    "docs/cli.md": {'"/checkpoints"': '"checkpoints"'},
}
"""What one process has not: other nodes and their directories."""


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

    done = run_script(script)

    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{_BETWEEN}\n")[1:-1]
    expected = expected_outputs(page)
    assert [None if e is None else p for p, e in zip(printed, expected, strict=True)] == expected


@pytest.mark.multiprocess
def test_the_terminal_pictures_can_be_drawn(tmp_path: Path) -> None:
    script = ROOT / "docs" / "pictures.py"

    finished(
        sys.executable, script, "--out", tmp_path, "verify", variables={"PYTHONPATH": str(ROOT)}
    )

    drawn = (tmp_path / "verify.svg").read_text().replace("&#160;", " ")
    assert "$ dist-ckpt verify checkpoint" in drawn
    assert "arrays/decoder.layers.mlp.linear_fc2.weight/c.1.0.0" in drawn
