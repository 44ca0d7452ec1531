"""What the page says before its tables."""

from __future__ import annotations

from typing import Final

GOALS: Final = """\
What this package aims at, and how the medians below compare. Ratios are of seconds; smaller is
better."""

SAVE_LOAD: Final = """\
`durable save` is until all files are on the disk; `save` until the call returns. The floor is one
plain stream of the same bytes per rank: `raw write` for a save, `raw write+fsync` for a durable
one, and its read for a load. `raw write+fsync in Megatron-Core` is that stream as a strategy that
`dist_checkpointing.save` and `load` call: what lies between it and the floor is Megatron-Core's own
part, in all other rows too. A cold load reads files that the page cache has forgotten."""

TWO_STAGE: Final = """\
Every rank wants the whole state. The floor of a round is the longer of `raw read` (each rank reads
its share) and `gloo exchange` (each sends its share to all others)."""

RESHARD: Final = """\
The floor is that each rank reads its own bytes from a file of its own. `read by calls` and `from
the device` are the bytes that all ranks have read, over those that they wanted: medians."""

TOOLS: Final = """\
`raw read` reads the same files, `raw copy` copies and flushes them, with as many threads. The peak
is of the whole process, the largest of all rounds."""

STORES: Final = """\
The server runs beside the ranks, on the same cores. The floor puts and gets the same bytes as plain
objects through TensorStore's key-value store."""

LOCAL: Final = """\
Every rank is a node of its own here; each part is kept by two. The floor moves and writes the same
bytes in the plainest way. `nvrx` is NVIDIA's resiliency extension."""

ASYNC: Final = """\
**blocking** is the time until training may go on, beside a copy of the rank's bytes (`memcpy`). In
**training**, steps on one core are compared with the idle steps just before and after, while all
else is held to another core; `raw writer` is a plain process there that writes as many bytes."""

RECOVERY: Final = """\
Four ranks train under `dist-ckpt run`. Seconds are from the fault until the last rank is in a step
again; of `SIGSTOP` and `stuck` from its detection on. A spare is a process that waits to take
over."""

RECOVERED: Final = """\
weights, moments, random numbers and every loss are those of a run without a fault, to the bit."""

DAMAGE: Final = """\
Files of checkpoints are damaged at random, and ranks are killed in saves. A violation is anything
loaded that was not saved, an error that does not say what is damaged, or a rank that waits for
ever."""

SCALING: Final = """\
Arrays of equal size, divided by rows. One of bytes, arrays and ranks grows while the others stay.
More ranks than cores share the cores."""

TIMELINES: Final = """\
The call whose seconds are the median of some. Each rank has three lanes: what its main thread does
or waits for, when its storage threads are at work, and when bytes travel between the ranks. Spans
that are closer than a thousandth of the call are drawn as one. `the rest` is Megatron-Core's part
of the call, and Python."""

PLANNING: Final = """\
What each rank spends on the plan of a two-stage load. `shared`: all ranks want the same shards;
`distinct`: each its own. See [how it grows](design/two_stage_scale.md)."""

HEAD: Final = """\
# Measured

This page is made by `python benchmarks/report.py page` from the files in `benchmarks/results`; no
figure in it is written by hand. `benchmarks/README.md` says how each is measured. Planning at
scale, and how long the package takes to start, are on [another page](scale.md).

Seconds and ratios are medians over the rounds that count, with the least and the greatest behind
them in brackets. Everybody takes a turn in every round, forwards and backwards. A ratio is taken
within a round, so that what slows the machine for a while slows both. The bars show ratios, with
whiskers from the least to the greatest; the red line is the floor, blue is this package."""
