"""The command lines of the benchmarks: their options, and JSON lines of what they measured."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TextIO

import typer
from rich.console import Console

from benchmarks.common.states import GB, GptSize, gpt_size
from benchmarks.page.page import stem_tables
from benchmarks.page.results import Found

ROOT = Path(__file__).resolve().parents[2]
SMOKE_SHARE = 20
"""A campaign of toy size has one case for so many."""

_TABLE_WIDTH = 160
_SMOKE = GptSize(num_layers=2, hidden=32, vocabulary=64)
_VERSIONS_OF = (
    "megatron-core",
    "ml_dtypes",
    "numpy",
    "safetensors",
    "tensorstore",
    "torch",
    "xxhash",
    "zarr",
)
NEEDED: Final = {
    "torch_dist": "psutil",
    "torch_dist, queue": "psutil",
    "two-stage, torch_dist": "psutil",
    "fully parallel": "psutil",
    "fully parallel, in place": "psutil",
    "safetensors": "safetensors",
    "boto3 put": "boto3",
    "nvrx": "nvidia_resiliency_ext",
    "nvrx, flushed": "nvidia_resiliency_ext",
}
"""Candidates that take part where a package is installed that is no dependency of this one."""

Directory = Annotated[
    Path | None, typer.Option(help="Where to write.", show_default="the temporary directory")
]
Repetitions = Annotated[int, typer.Option(min=1, help="Measured rounds.")]
Out = Annotated[Path, typer.Option(help="JSON lines go here.")]
Smoke = Annotated[bool, typer.Option("--smoke/--no-smoke", help="Toy size: does it all run?")]
TimeoutS = Annotated[float, typer.Option(help="Longest wait for one step.")]

NOWHERE = Path("/dev/null")
"""Where results go without ``--out``."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and how often.

    Attributes:
        sizes: of the state, one after the other; none where a benchmark has sizes of its own.
        places: where each is stored, one after the other.
        names: candidates, baselines among them.
        repetitions: measured rounds.
        timeout_s: longest wait for one step.
        is_smoke: toy size is asked for; sizes and repetitions are those of one.
    """

    sizes: tuple[GptSize, ...]
    places: tuple[Path, ...]
    names: tuple[str, ...]
    repetitions: int
    timeout_s: float
    is_smoke: bool


@dataclass(slots=True)
class Output:
    """Where the results go: to a file, each line at once, and to the screen at the end."""

    file: TextIO
    console: Console
    lines: list[dict[str, Any]] = field(default_factory=list)

    def write(self, kind: str, content: Any, **more: Any) -> None:
        """Add a line: the fields of ``content`` (a dataclass or a mapping), and ``more``."""
        line = {"kind": kind, **_plain(content), **{k: _plain(v) for k, v in more.items()}}
        text = json.dumps(line)
        self.file.write(text + "\n")
        self.file.flush()
        self.lines.append(json.loads(text))

    def write_samples(self, case: object, samples: Iterable[Any]) -> None:
        """Write each as it comes."""
        for sample in samples:
            self.write("sample", sample, case=case)

    def skip(self, candidate: str, reason: str) -> None:
        """Say who or what is left out, and why."""
        self.write("skipped", {"candidate": candidate, "reason": reason})
        self.console.print(f"{candidate}: skipped, {reason}")


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@contextmanager
def open_output(out: Path, script: str) -> Iterator[Output]:
    """Write what is run, and then results, whose tables are shown at the end.

    SIGTERM ends the block through every ``finally``, so that nothing stays behind.
    """
    signal.signal(signal.SIGTERM, _stop)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    with out.open("w") as file:
        output = Output(file, console)
        output.write("run", run_facts(["python", f"benchmarks/{script}", *sys.argv[1:]]))
        yield output
        for text in stem_tables(Path(script).stem, Found(tuple(output.lines))):
            console.print(text, markup=False, highlight=False)


def _stop(signal_number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


def run_facts(command: Iterable[str]) -> dict[str, Any]:
    """Commit, command, versions and machine."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "has_local_changes": _git("status", "--porcelain") != "",
        "command": shlex.join(command),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONS_OF},
        "machine": {
            "processor": _processor(),
            "num_cores": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


Command = Callable[..., None]


def comparison_command(
    known: Sequence[str],
    baselines: Collection[str],
    *,
    sizes_gb: Sequence[float] = (0.5, 1.0),
    in_memory: bool = True,
    repetitions: int = 7,
    timeout_s: float = 300.0,
) -> Callable[[Command], Command]:
    """Makes a command of a function that takes a comparison, its output, and options of its own.

    The command has the function's own options and those that all comparisons have.

    Args:
        known: candidates, in the order of the first round.
        baselines: candidates that take part without being asked for.
        sizes_gb: sizes of the state in GB, if it is not told. Without any there is no such option.
        in_memory: if it is not told where to write: to /dev/shm too.
        repetitions: measured rounds, if it is not told.
        timeout_s: longest wait for one step, if it is not told.
    """
    disk, memory = Path(tempfile.gettempdir()), Path("/dev/shm")  # noqa: S108 - a file system
    places = (disk, memory) if in_memory else (disk,)
    shown = " and ".join(["the temporary directory", *(["/dev/shm"] if in_memory else [])])  # noqa: S108
    shared: dict[str, tuple[Any, Any]] = {
        "size": (
            Annotated[list[float], typer.Option(help="GB of the whole state.")],
            list(sizes_gb),
        ),
        "directory": (
            Annotated[list[Path] | None, typer.Option(help="Where to write.", show_default=shown)],
            None,
        ),
        "candidate": (
            Annotated[
                list[str] | None,
                typer.Option(help="Only these, beside the baselines.", callback=among(known)),
            ],
            None,
        ),
        "repetitions": (Repetitions, repetitions),
        "out": (Out, NOWHERE),
        "smoke": (Smoke, False),
        "timeout_s": (TimeoutS, timeout_s),
    }
    if not sizes_gb:
        del shared["size"]

    def command_of(run: Command) -> Command:
        script = Path(inspect.getfile(run)).name

        def command(**options: Any) -> None:
            given = {name: options.pop(name) for name in shared}
            is_smoke = given["smoke"]
            sizes = tuple(gpt_size(int(gb * GB)) for gb in given.get("size", ()))
            with open_output(given["out"], script) as output:
                comparison = Comparison(
                    (_SMOKE,) if is_smoke else sizes,
                    tuple(given["directory"] or places),
                    _chosen_names(given["candidate"], known, baselines, output),
                    1 if is_smoke else given["repetitions"],
                    given["timeout_s"],
                    is_smoke,
                )
                run(comparison, output, **options)

        _, _, *own = inspect.signature(run, eval_str=True).parameters.values()
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)
            for name, (kind, value) in shared.items()
        ]
        command.__doc__ = run.__doc__
        command.__annotations__ = {option.name: option.annotation for option in [*own, *added]}
        vars(command)["__signature__"] = inspect.Signature([*own, *added])
        return command

    return command_of


def among(known: Collection[str]) -> Callable[[list[str] | None], list[str] | None]:
    """For an option that takes names: refuses those that are not known."""

    def checked(wanted: list[str] | None) -> list[str] | None:
        for name in wanted or ():
            if name not in known:
                raise typer.BadParameter(f"{name!r}: expected one of {list(known)}")
        return wanted

    return checked


def missing_package(package: str | None) -> str | None:
    """What is lacking, as a sentence; None where the package can be imported."""
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed"


def _chosen_names(
    wanted: Sequence[str] | None, known: Sequence[str], baselines: Collection[str], output: Output
) -> tuple[str, ...]:
    """The wanted candidates, or all, without those whose package is missing, which it reports."""
    found = []
    for name in known:
        if wanted and name not in {*wanted, *baselines}:
            continue
        reason = missing_package(NEEDED.get(name))
        if reason is None:
            found.append(name)
        else:
            output.skip(name, reason)
    return tuple(found)
