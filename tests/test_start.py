"""What is not loaded before somebody needs it: the package and its command start at once."""

import sys
from pathlib import Path

import pytest

from dist_ckpt_strategies.megatron.types import TENSOR_AWARE_CLASS
from tests.support.checkpoints import write_checkpoint, write_packs
from tests.support.pages import ROOT
from tests.support.processes import finished

pytestmark = pytest.mark.multiprocess

HEAVY = {"torch", "megatron", "tensorstore", "zarr", "numpy", "ml_dtypes", "xxhash"}
PRINTING = {"typer", "rich"}

IMPORTS = """
import dist_ckpt_strategies
import dist_ckpt_strategies.errors
dir(dist_ckpt_strategies)
dist_ckpt_strategies.Options()
"""
COMMANDS = """
import sys
from typer.testing import CliRunner
from dist_ckpt_strategies.cli.app import app
for args in sys.argv[1:]:
    assert CliRunner().invoke(app, args.split(",")).exit_code < 2
"""
HELP = ("--help", "--version", "inspect,--help", "run,-h")


LISTING = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"


def loaded_by(code: str, *args: str) -> set[str]:
    """The top-level modules that are there after the code, without what the tests add to one."""
    command = (sys.executable, "-c", f"{code}\n{LISTING}", *args)
    found = set(finished(*command, variables={"PYTHONPATH": str(ROOT)}).stdout.split())
    assert "dist_ckpt_strategies" in found
    return found


def test_libraries_are_loaded_when_they_are_needed(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "ckpt")
    killed = write_packs(tmp_path / "iter_0000001", is_finished=False)
    looking = [
        f"{command},{place}" for command in ("inspect", "verify") for place in (whole, killed)
    ]
    looking.append(f"prune,{tmp_path},--unfinished,--older-than,0,--yes")

    assert loaded_by(IMPORTS) & (HEAVY | PRINTING) == set()
    assert loaded_by(COMMANDS, *HELP) & HEAVY == set()
    assert loaded_by(COMMANDS, *looking) & {"torch", "tensorstore", "zarr", "megatron"} == set()
    assert not killed.exists()


MORE = """
import dist_ckpt_strategies.integrations.nemo
from dist_ckpt_strategies.local import LocalCheckpointManager
LocalCheckpointManager("local")
"""


def test_a_rank_that_replaces_another_loads_torch_and_little_more(tmp_path: Path) -> None:
    """Neither the integrations nor the managers import other frameworks."""
    code = "import sys, dist_ckpt_strategies.inprocess, dist_ckpt_strategies.recovery"
    code = f"{code}\nprint(*sys.modules)\n{MORE}\nprint(*sys.modules)"
    done = finished(sys.executable, "-c", code, cwd=tmp_path)
    loaded, later = (line.split() for line in done.stdout.splitlines())

    assert {"torch", "dist_ckpt_strategies.recovery.manager"} <= set(loaded)
    slow = {"megatron", "tensorstore", "zarr", "torch.distributed.checkpoint"}
    assert not slow.intersection(loaded)
    frameworks = {"nemo", "lightning", "pytorch_lightning", "nvidia_resiliency_ext"}
    assert not frameworks & {name.partition(".")[0] for name in later}
    assert TENSOR_AWARE_CLASS.rpartition(".")[0] not in later
