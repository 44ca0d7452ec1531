"""``python docs/pictures.py [NAME...]``: draw docs/drawings from what the commands print.

Each picture shows the output of real commands, run in a temporary directory. ``demo`` takes some
minutes, ``recovery`` about one, ``inspect`` and ``verify`` some seconds.
"""

import argparse
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
ARCHIVE = DOCS.parent / "tests" / "golden" / "data" / "m0153_tp2pp2dp2_flat.tar.xz"
COMMAND = (sys.executable, "-m", "dist_ckpt_strategies.cli")
WIDTH = 100

SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>%s</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Draw the pictures named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=DOCS / "drawings", help="where they go")
    arguments = parser.parse_args()
    for name in arguments.names or PICTURES:
        with TemporaryDirectory() as directory:
            picture = draw(name, "".join(PICTURES[name](Path(directory))))
        (arguments.out / f"{name}.svg").write_text(picture, encoding="utf-8")


def draw(name: str, output: str) -> str:
    """The SVG of a terminal with that output."""
    text = Text.from_ansi(output.replace(socket.gethostname(), "node0"))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), legacy_windows=False)
    console.print(text)
    title = f"dist-ckpt {'run' if name == 'recovery' else name}"
    return console.export_svg(title=title, code_format=SVG % title, unique_id=name)


def shown(directory: Path, words: str) -> str:
    """The command line, and what it prints."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "dumb"}
    done = subprocess.run(
        [*COMMAND, *shlex.split(words)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    printed = done.stdout.replace(f"{directory}/", "")
    return f"\033[32m$ dist-ckpt {words}\033[0m\n{printed}"


def demo(directory: Path) -> Iterator[str]:
    """Train, save, resume at three layouts."""
    yield shown(directory, "demo")


def inspect(directory: Path) -> Iterator[str]:
    """A checkpoint of Megatron-Core 0.15.3, as packs."""
    make_checkpoint(directory)
    yield shown(directory, "inspect checkpoint --keys 'decoder.layers.mlp.*' --no-objects")


def verify(directory: Path) -> Iterator[str]:
    """The same, whole and with one changed byte."""
    make_checkpoint(directory)
    yield shown(directory, "verify checkpoint")
    yield "\n\033[2m# one byte of one file changes\033[0m\n"
    file = max(directory.glob("checkpoint/packs/*/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    yield shown(directory, "verify checkpoint")


def make_checkpoint(directory: Path) -> None:
    """Convert the one that the tests have."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        archive.extractall(directory)  # noqa: S202 - our own
    old = next(directory.glob("*/ckpt"))
    shown(directory, f"convert {old.relative_to(directory)} checkpoint --to pack")


def recovery(directory: Path) -> Iterator[str]:
    """The first script of the page on recovery, a rank of which is killed in step 4."""
    script = next(iter(re.findall(r"^```python\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL)))
    slow = script.replace("call.ping()", "call.ping(); __import__('time').sleep(0.5)")
    slow = slow.replace("NUM_STEPS, SAVE_EVERY = 12", "NUM_STEPS, SAVE_EVERY = 7")
    (directory / "train.py").write_text(slow)
    words = "run --nproc 2 --spares 1 train.py"
    yield f"\033[32m$ dist-ckpt {words}\033[0m\n"
    launcher = subprocess.Popen(
        [*COMMAND, *words.split()],
        cwd=directory,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout
    for line in launcher.stdout:
        if "step " in line or "is gone" in line:
            yield line.replace("dist_ckpt_strategies.", "")
        if line.startswith("[1] step 3"):
            yield "\033[2m# kill -9 of rank 1\033[0m\n"
            os.kill(pid_of_rank(launcher.pid, 1), signal.SIGKILL)
    launcher.wait()


def page() -> str:
    """The page on recovery."""
    return (DOCS / "recovery.md").read_text()


def pid_of_rank(launcher: int, rank: int) -> int:
    """The worker with that rank, among the children of the launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    wanted = f"RANK={rank}".encode()
    return next(
        int(pid)
        for pid in children
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )


PICTURES: dict[str, Callable[[Path], Iterator[str]]] = {
    "demo": demo,
    "inspect": inspect,
    "verify": verify,
    "recovery": recovery,
}

if __name__ == "__main__":
    main()
