"""The command lines of the benchmarks: their options, and JSON lines of what they measure."""

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from benchmarks.common.disks import file_system, workspace
from benchmarks.common.rounds import run_on_ranks
from benchmarks.page.page import stem_tables
from benchmarks.page.results import Found
from dist_ckpt_strategies.cli.bench import GB
from dist_ckpt_strategies.cli.bench_rank import GptSize, Sample, gpt_size

ROOT: Final = Path(__file__).resolve().parents[2]
NOWHERE: Final = Path("/dev/null")
"""Where results go without ``--out``."""

_TOY: Final = GptSize(num_layers=2, hidden=32, vocabulary=64)
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a file system
_VERSIONS_OF: Final = ("megatron-core", "numpy", "tensorstore", "torch", "zarr")


class Parser(argparse.ArgumentParser):
    """The options that all benchmarks have; a script adds its own."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._repeated: dict[str, Sequence[Any]] = {}
        self.add_argument("--out", type=Path, default=NOWHERE, help="JSON lines go here")
        self.add_argument("--smoke", action="store_true", help="toy size: does it all run?")
        self.add_argument(
            "--timeout-s", type=float, default=3600.0, help="longest time for one case"
        )

    def add_repeated(self, name: str, default: Sequence[Any], text: str, **options: Any) -> None:
        """Add an option that may be given several times."""
        self._repeated[name] = default
        shown = ", ".join(map(str, default))
        self.add_argument(f"--{name}", action="append", help=f"{text} ({shown})", **options)

    def add_comparison(
        self,
        candidates: Collection[str],
        baselines: Collection[str],
        *,
        sizes_gb: Sequence[float] = (0.5, 1.0),
        in_memory: bool = True,
        repetitions: int = 7,
    ) -> None:
        """Add the options of a comparison of candidates.

        Args:
            candidates: in the order of the first round.
            baselines: those that take part without being asked for.
            sizes_gb: default sizes of the state in GB; without any there is no such option.
            in_memory: whether /dev/shm is written to by default, beside the temporary directory.
            repetitions: default number of measured rounds.
        """
        places = [Path(tempfile.gettempdir()), *([_MEMORY] if in_memory else [])]
        names = list(candidates)
        if sizes_gb:
            self.add_repeated("size", sizes_gb, "GB of the whole state", type=float)
        self.add_repeated("directory", places, "where to write", type=Path)
        self.add_repeated("candidate", names, "only these, and the baselines", choices=names)
        self.set_defaults(baselines=baselines)
        self.add_argument("--repetitions", type=int, default=repetitions, help="measured rounds")

    def parse(self) -> argparse.Namespace:
        """The options, and what they amount to: ``sizes``, which are models, and ``names``.

        With ``--smoke`` there are one toy model and one round.
        """
        options = vars(self.parse_args())
        for name, default in self._repeated.items():
            options[name] = options[name] or default
        if "size" in options:
            sizes = [gpt_size(int(gb * GB)) for gb in options["size"]]
            options["sizes"] = [_TOY] if options["smoke"] else sizes
        if "candidate" in options:
            wanted = {*options["candidate"], *options["baselines"]}
            options["names"] = [name for name in self._repeated["candidate"] if name in wanted]
            options["repetitions"] = 1 if options["smoke"] else options["repetitions"]
        return argparse.Namespace(**options)


class Output:
    """Where the results go: to a file, and to the screen at the end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, **content: Any) -> None:
        """Add a line."""
        text = json.dumps({"kind": kind, **content})
        self._file.write(text + "\n")
        self._file.flush()
        self.lines.append(json.loads(text))

    def write_samples(self, case: Mapping[str, Any], samples: Iterable[Sample]) -> None:
        """Add a line for each."""
        for sample in samples:
            self.write("sample", **asdict(sample), case=case)

    def skip(self, candidate: str, reason: str) -> None:
        """Report what is left out, and why."""
        self.write("skipped", candidate=candidate, reason=reason)
        print(f"{candidate}: skipped, {reason}")  # noqa: T201 - a command's output


def case_of(size: GptSize, parent: Path, num_ranks: int) -> dict[str, Any]:
    """A state on a file system, as the results describe it."""
    about = {"nbytes": size.nbytes, "num_arrays": size.num_arrays, "num_ranks": num_ranks}
    return {"file_system": file_system(parent), **about}


def run_cases(
    options: argparse.Namespace,
    output: Output,
    num_ranks: int,
    measure: Callable[..., list[Sample]],
    *args: Any,
    **case: Any,
) -> None:
    """Write what ``measure(size, place, repetitions, names, *args)`` returns on the first rank.

    It runs for each size in a workspace of each place, on ranks of its own.
    """
    for size in options.sizes:
        for parent in options.directory:
            with workspace(parent) as place:
                all_args = (size, place, options.repetitions, options.names, *args)
                found = run_on_ranks(num_ranks, measure, *all_args, timeout_s=options.timeout_s)
            output.write_samples({**case_of(size, parent, num_ranks), **case}, found[0])


@contextmanager
def open_output(out: Path, script: str) -> Iterator[Output]:
    """Write what is run, and then results, whose tables are shown at the end.

    SIGTERM ends the block through every ``finally``, so that nothing stays behind.
    """
    signal.signal(signal.SIGTERM, _stop)
    stem = Path(script).stem
    with out.open("w") as file:
        output = Output(file)
        shown = [out.name if argument == str(out) else argument for argument in sys.argv[1:]]
        output.write("run", **_about_run(["python", f"benchmarks/{stem}.py", *shown]))
        yield output
    for text in stem_tables(stem, Found(tuple(output.lines))):
        print(text)  # noqa: T201


def _stop(signal_number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


def _about_run(command: Iterable[str]) -> dict[str, Any]:
    """Commit, command, versions and machine."""
    installed = {package.name: package.version for package in distributions()}
    return {
        "commit": _git("rev-parse", "HEAD"),
        "has_local_changes": _git("status", "--porcelain") != "",
        "command": shlex.join(command),
        "python": platform.python_version(),
        "versions": {name: installed.get(name) for name in _VERSIONS_OF},
        "machine": {
            "processor": _processor(),
            "num_cores": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
        },
    }


def _git(*args: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
