"""The subjects of the page that compare candidates: what is measured, and how a row is made."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from benchmarks.page.results import Found, Line
from dist_ckpt_strategies.cli.bench import BASELINE

TORCH_DIST: Final = "torch_dist"
PLAIN_STREAM = "one stream, not flushed"
FILE_SYSTEM_WRITER: Final = "FileSystemWriter"
ORBAX: Final = "Orbax"
READ_SHARES, SEND_SHARES = "raw read", "gloo exchange"
PARALLEL, LOCAL_BASELINE, MEMCPY = "fully parallel", "baseline", "memcpy"
NVRX, FLUSHED_NVRX = "nvrx", "nvrx, flushed"
_GB, _MIB = 10**9, 1 << 20


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of some values."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, own: Mapping[int, float], other: Mapping[int, float]) -> Self:
        """That of the ratios within a round; both are seconds by round, and share at least one."""
        return cls.of([own[number] / other[number] for number in own if number in other])


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate in one step of a case; ratios to each baseline are within a round."""

    fields: Mapping[str, Any]
    step: str
    candidate: str
    seconds: Spread
    ratios: Mapping[str, Spread]
    more: Mapping[str, float]

    @property
    def label(self) -> str:
        """Such as ``TP2 to TP4, 0.49 GB, 291 arrays, 2 ranks, ext4: load cold``."""
        fields = self.fields
        parts = [fields["move"]] if "move" in fields else []
        parts += [f"from {fields['source']}"] if "source" in fields else []
        if "rank_nbytes" in fields:
            parts.append(f"{fields['rank_nbytes'] / _MIB:.0f} MiB a rank")
        else:
            parts += [f"{fields['nbytes'] / _GB:.2g} GB", f"{fields['num_arrays']:,} arrays"]
        ranks = fields["num_ranks"]
        parts += [f"{ranks} rank{'s' * (ranks > 1)}", fields["file_system"]]
        return f"{', '.join(parts)}: {self.step}"


@dataclass(frozen=True, slots=True)
class Subject:
    """One table of the page.

    Attributes:
        stem: name of the benchmark.
        title: of the table.
        words: what the rows are.
        baseline: that seconds are compared with; the bars of the figure are these ratios.
        peer: the other candidate to compare with; empty for none.
        more: further columns: title, name of the value, unit, and what is made of all rounds.
        part: of the samples that count; empty for all.
        figure: whether there is one.
    """

    stem: str
    title: str
    words: str
    baseline: str
    peer: str = ""
    more: tuple[tuple[str, str, float, Callable[[Sequence[float]], float]], ...] = ()
    part: str = ""
    figure: bool = False

    def rows(self, found: Found) -> Iterator[Row]:
        """All rows, case by case, the baseline before the others."""
        for fields, step, samples in found.groups():
            if self.part in {"", fields.get("part")}:
                yield from self._rows(fields, step, samples)

    def _rows(self, fields: dict[str, Any], step: str, samples: list[Line]) -> Iterator[Row]:
        baseline, name = self.baseline, "seconds"
        if self.stem in {"save_load", "dcp", "one_process"} and step == "save":
            is_disk = fields["file_system"] != "tmpfs"
            step, name = ("durable save", "durable_seconds") if is_disk else (step, name)
            baseline = baseline if is_disk else PLAIN_STREAM
        rounds: dict[str, dict[int, Line]] = {}
        for line in samples:
            values = line["values"]
            if values.get(name) is not None:
                rounds.setdefault(line["candidate"], {})[line["repetition"]] = values
        seconds = {
            candidate: {number: float(values[name]) for number, values in own.items()}
            for candidate, own in rounds.items()
        }
        for candidate in sorted(rounds, key=lambda one: (one != baseline, one)):
            own = seconds[candidate]
            ratios = {
                other: Spread.of_ratios(own, seconds[other])
                for other in (baseline, self.peer)
                if own.keys() & seconds.get(other, {}).keys()
            }
            more = {
                title: combine([values[value] for values in rounds[candidate].values()]) / unit
                for title, value, unit, combine in self.more
            }
            yield Row(fields, step, candidate, Spread.of([*own.values()]), ratios, more)


SUBJECTS: Final = (
    Subject(
        "save_load",
        "Saves and loads",
        "Baseline: one stream of the same bytes per rank (write in memory, write and fsync on "
        "disk, or read into the tensors). `load cold` reads files that are not in the page cache. "
        "`packs` digests all it writes and verifies all it reads.",
        BASELINE,
        TORCH_DIST,
        figure=True,
    ),
    Subject(
        "dcp",
        "torch.distributed.checkpoint",
        "DTensors cut into rows, as FSDP2 has them. Baseline: as for saves and loads. `packs` are "
        "PackStorageWriter and PackStorageReader; `FileSystemWriter`, with its reader, is DCP's "
        "own, which has no digests.",
        BASELINE,
        FILE_SYSTEM_WRITER,
    ),
    Subject(
        "one_process",
        "One process, beside Orbax",
        "Baseline: as for saves and loads. Orbax's StandardCheckpointer has numpy arrays and its "
        "default settings, and returns new arrays, which are copied into the tensors.",
        BASELINE,
        ORBAX,
    ),
    Subject(
        "two_stage",
        "Two-stage loads",
        "Every rank requests the whole state. Baseline: each rank reads its share, then those of "
        "the others from the page cache of the host. `gloo exchange`: each rank sends its share to "
        "all others, as between hosts. `fully parallel` is Megatron-Core's "
        "FullyParallelLoadStrategyWrapper; `in place` lets it receive into the state's own "
        "tensors, as on a GPU.",
        READ_SHARES,
        PARALLEL,
        figure=True,
    ),
    Subject(
        "reshard",
        "Loads in another layout",
        "Baseline: each rank reads its bytes from its own file. `read` and `from the device` are "
        "the bytes read by all ranks, divided by the bytes requested. Megatron-Core never divides "
        "a parameter along another axis than before; rows to columns shows what that would cost.",
        READ_SHARES,
        TORCH_DIST,
        (
            ("read", "read_by_calls", 1, statistics.median),
            ("from the device", "read_from_device", 1, statistics.median),
        ),
        figure=True,
    ),
    Subject(
        "many_shards",
        "Many small shards",
        "Both through their own `save` and `load`. `arrays`: 10,000 arrays of 4 KB, cut in two. "
        "`experts`: one array of 48 x 128 experts, half of them on each rank; each loads all.",
        TORCH_DIST,
        more=(("files", "files", 1, statistics.median),),
    ),
    Subject(
        "local_replicated",
        "Local checkpoints",
        "Every rank acts as one node; two ranks hold each state. The baseline moves and writes the "
        "same bytes. `nvrx` is nvidia-resiliency-ext, which does not flush and takes no digests; "
        "`nvrx, flushed` is the same with its files flushed.",
        LOCAL_BASELINE,
        FLUSHED_NVRX,
        figure=True,
    ),
    Subject(
        "async_save",
        "Asynchronous saves",
        "Seconds until training continues. Baseline: a copy of the rank's bytes to memory in use.",
        MEMCPY,
        "torch_dist, queue",
        (("seconds until durable", "until_there", 1, statistics.median),),
        part="blocking",
    ),
    Subject(
        "tools",
        "Verify and convert",
        "`raw read` reads the same files and `raw copy` copies and flushes them, with the same "
        "number of threads.",
        READ_SHARES,
        "raw copy",
        (
            ("GB/s", "nbytes_per_second", _GB, statistics.median),
            ("peak memory, MiB", "peak_nbytes", _MIB, max),
        ),
    ),
    Subject(
        "object_stores",
        "Object stores",
        "The server shares the ranks' cores. Baseline: the same bytes as plain objects through "
        "TensorStore's key-value store. Requests are those of both ranks.",
        "tensorstore put",
        more=(("requests", "requests", 1, statistics.median),),
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the first table: this package beside what the reader has today.

    Compared are the candidates ``ours`` and ``theirs``, one of which is the other's baseline or
    peer, in the first row on a disk, or in memory if there is none, of a step and case that begin
    so.
    """

    text: str
    stem: str
    ours: str
    theirs: str
    step: str
    case: str = ""

    def rows(self, rows: Sequence[Row]) -> tuple[Row, Row] | None:
        """Our row and theirs; None if they are not measured."""
        fitting = [r for r in rows if r.step == self.step and r.label.startswith(self.case)]
        for ours in sorted(fitting, key=lambda row: row.fields["file_system"] == "tmpfs"):
            for theirs in fitting:
                is_pair = (ours.candidate, theirs.candidate) == (self.ours, self.theirs)
                if is_pair and theirs.fields == ours.fields and self.theirs in ours.ratios:
                    return ours, theirs
        return None


QUESTIONS: Final = (
    Question("save, until it is on the disk", "save_load", "packs", TORCH_DIST, "durable save"),
    Question("load, from the disk", "save_load", "packs", TORCH_DIST, "load cold"),
    Question("load, from the page cache", "save_load", "packs", TORCH_DIST, "load warm"),
    Question("training stops for a background save", "async_save", "packs", "torch_dist, queue",
             "blocking"),
    Question("save of 10,000 small arrays", "many_shards", "packs", TORCH_DIST, "save",
             "from arrays"),
    Question("load of 48 x 128 experts", "many_shards", "packs", TORCH_DIST, "load",
             "from experts"),
    Question("load of TP 2 at TP 4, from the disk", "reshard", "packs", TORCH_DIST, "load cold",
             "TP2 to TP4"),
    Question("load by two ranks that want the same", "two_stage", "two-stage, packs", PARALLEL,
             "load warm"),
    Question("FSDP2: save, until it is on the disk", "dcp", "packs", FILE_SYSTEM_WRITER,
             "durable save"),
    Question("FSDP2: load, from the disk", "dcp", "packs", FILE_SYSTEM_WRITER, "load cold"),
    Question("one process: save, until it is on the disk", "one_process", "packs", ORBAX,
             "durable save"),
    Question("one process: load, from the disk", "one_process", "packs", ORBAX, "load cold"),
    Question("local save with a copy at a peer", "local_replicated", "local manager",
             FLUSHED_NVRX, "save"),
    Question("local load after a lost directory", "local_replicated", "local manager",
             FLUSHED_NVRX, "recovery"),
    Question("save to an object store", "object_stores", "packs", "tensorstore put", "save"),
    Question("load from an object store", "object_stores", "packs", "tensorstore put", "load"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """The largest value that is good enough, for the rows of a candidate in a subject.

    Values are ratios to the baseline ``of``, or those of the column with that title. The steps
    that count begin with ``step``, their labels with ``case``.
    """

    text: str
    limit: float
    stem: str
    candidate: str
    of: str
    step: str = ""
    case: str = ""

    def values(self, rows: Sequence[Row]) -> list[tuple[float, float]]:
        """The medians that the goal is about, and the seconds of each."""
        found = []
        for row in rows:
            if (
                row.candidate == self.candidate
                and row.step.startswith(self.step)
                and row.label.startswith(self.case)
            ):
                if self.of in row.more:
                    found.append((row.more[self.of], row.seconds.median))
                elif self.of in row.ratios:
                    found.append((row.ratios[self.of].median, row.seconds.median))
        return found


GOALS: Final = (
    Goal("zarr 1: memory save, of torch_dist", 0.7, "save_load", "zarr 1", TORCH_DIST, "save"),
    Goal("zarr 1: durable save, of torch_dist", 0.7, "save_load", "zarr 1", TORCH_DIST, "durable"),
    Goal("zarr 1: load, of torch_dist", 0.6, "save_load", "zarr 1", TORCH_DIST, "load"),
    Goal("packs: durable save, of one stream", 1.05, "save_load", "packs", BASELINE, "durable"),
    Goal("packs: memory save, of one stream", 1.2, "save_load", "packs", PLAIN_STREAM, "save"),
    Goal("packs: cold load, of one stream", 1.15, "save_load", "packs", BASELINE, "load cold"),
    Goal("packs: warm load, of one stream", 1.45, "save_load", "packs", BASELINE, "load warm"),
    Goal("packs: 10,000 small arrays, of torch_dist", 0.1, "many_shards", "packs", TORCH_DIST,
         case="from arrays"),
    Goal("packs: 48 x 128 experts, files", 8, "many_shards", "packs", "files", "save",
         case="from experts"),
    Goal("two-stage load, of fully parallel", 0.25, "two_stage", "two-stage, packs", PARALLEL),
    Goal("two-stage load, of raw read", 1.5, "two_stage", "two-stage, packs", READ_SHARES),
    Goal("TP2 to TP4: bytes read, of those needed", 1.5, "reshard", "packs", "read", case="TP2"),
    Goal("TP4 to TP1: bytes read, of those needed", 1.01, "reshard", "packs", "read", case="TP4"),
    Goal("2 to 4 rows: bytes read, of needed", 1.1, "reshard", "packs", "read", case="2 rows"),
    Goal("TP2 to TP4: load, of torch_dist", 0.33, "reshard", "packs", TORCH_DIST, case="TP2"),
    Goal("background save: blocking part, of memcpy", 1.3, "async_save", "packs", MEMCPY),
    Goal("object stores: of plain objects", 1.2, "object_stores", "packs", "tensorstore put"),
    Goal("local: blocking part, of memcpy", 1.3, "local_replicated", "local manager",
         LOCAL_BASELINE, "blocking"),
    Goal("local: save, of exchange and write", 1.5, "local_replicated", "local manager",
         LOCAL_BASELINE, "save"),
    Goal("local: save, of nvrx flushed", 0.8, "local_replicated", "local manager", FLUSHED_NVRX,
         "save"),
    Goal("local: recovery, of read and exchange", 1.5, "local_replicated", "local manager",
         LOCAL_BASELINE, "recovery"),
    Goal("local: recovery, of nvrx flushed", 0.5, "local_replicated", "local manager",
         FLUSHED_NVRX, "recovery"),
    Goal("verify, of raw read", 1.43, "tools", "verify", READ_SHARES),
    Goal("convert to packs, of raw copy", 1.43, "tools", "to packs", "raw copy"),
    Goal("convert to packs: peak memory, MiB", 1024, "tools", "to packs", "peak memory, MiB"),
)  # fmt: skip
