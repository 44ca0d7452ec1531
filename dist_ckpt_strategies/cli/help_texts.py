"""What the commands say of themselves."""

from __future__ import annotations

APP = """Look at, check, convert and prune checkpoints of Megatron-Core, and run training that \
survives ranks that fail."""
STATUS = "[bold]Exit status:[/] 0 fine, 1 damage found or failed, 2 wrong usage."
INSPECT = """List the arrays and objects of a checkpoint, and say whether it is complete. \
Of a directory of local checkpoints, the iterations and parts.

Reads names, sizes and metadata only. Ends with status 0 where the checkpoint could be shown, \
complete or not."""
VERIFY = """Check that a checkpoint is whole, and list what is not.

Looks for every chunk file, of the right size, every shard of every object, common.pt and \
metadata.json, and compares objects and common.pt with their own checksums. Format 1 keeps no \
checksums of arrays: a byte that has changed inside a chunk does not show. Of format 2 every piece \
and of local checkpoints every tensor is compared with its digest."""
PRUNE = """Remove checkpoints that are not to be kept, and what killed saves have left.

ROOT holds the checkpoints, each in a directory whose name ends in its iteration. The newest \
complete one stays in any case, and so does everything that is neither a checkpoint of format 1 or \
2 nor what a killed save of these has left. What goes loses its marker first. Shows what goes and \
asks before it removes anything."""
DEMO = """Train a small GPT on four CPU ranks, save it as Zarr, resume it in other layouts.

Shows that weights and optimizer state come back bit for bit, and that the loss goes on from \
where it was. Takes a few minutes on two cores.

With --chaos: four ranks train under `dist-ckpt run` while one after the other is made to fail, \
is killed or hangs, at every point of a step. Weights, moments, random numbers and every loss must \
be those of a run without a fault, bit for bit."""
CONVERT = """Convert a checkpoint to another format, bit for bit.

From ("zarr", 1), ("zarr", 2) and torch_dist of Megatron-Core 0.16; optimizer state, objects \
and common state too. To safetensors: the arrays of the model alone. Memory stays bounded, \
whatever the checkpoint's size. DST must be new or empty; nothing is visible there before all \
is. After an interruption the same command goes on where it stopped."""
DIFF = """Compare two checkpoints of any formats: keys, shapes, dtypes, elements and objects.

Of arrays that differ it shows the first element that does, how many do, and the largest \
absolute difference. Equal means equal to the bit."""
UPGRADE = """Convert a checkpoint of Megatron-Core <= 0.15 or NeMo 1.x so that training can go on.

Optimizer state of the form fully_sharded_model_space (optimizer.state.fp32_param.*), which \
Megatron-Core 0.16 cannot load, becomes fully_reshardable (optimizer.state.param.*). Otherwise \
like convert."""
RUN = """Run a training script on N ranks of this node, and replace a worker that dies.

The others stay alive: with HPWrapper around its training the script goes on in place. Everything \
behind SCRIPT goes to the script. A worker is found dead at once, and hung after the time without \
a sign of life; spares wait with everything imported, for scripts that call wait_rank()."""
BENCH = """Measure saves and loads on the file system of DIR, beside one plain stream per rank.

Ranks on the CPU hold equal parts of a state like a GPT's, and save and load it with ("zarr", 1), \
("zarr", 2) and torch_dist, in turn. All files are flushed when a save ends, and forgotten by the \
page cache before a load, where the kernel can do that. Every load is compared with what was \
saved. DIR is left as it was. The default is the temporary directory, which may lie in memory."""
RUN_STATUS = (
    "[bold]Exit status:[/] 0 all ranks have ended well, 1 gave up, 2 wrong usage, 130 interrupted."
)
DIFF_STATUS = "[bold]Exit status:[/] 0 equal, 1 different, 2 failed or wrong usage."


def ending(example: str, status: str = STATUS) -> str:
    """What stands below the options of a command."""
    return f"Example: [bold]{example}[/]\n\n{status}"
