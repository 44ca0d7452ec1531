"""How the launcher started this process: its rendezvous, and what the first attempt has found."""

from dataclasses import dataclass

from dist_ckpt_strategies.config import (
    RENDEZVOUS,
    environment,
    parse_address,
    parsed,
    update_environment,
)
from dist_ckpt_strategies.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process finds the rendezvous of its job.

    Attributes:
        address: host and port of the launcher's store; None: there is none, a world of one.
        worker: what the launcher calls this process.
        rank: its place as torchrun says; None where the elastic agent assigns it.
        attempt: how often the launcher has restarted all of them.
        heartbeat_pipe: file descriptor and inode that heartbeats go to; None: no process listens.
        heartbeat_s: seconds between two of them.
    """

    address: tuple[str, int] | None = None
    worker: str = "0"
    rank: int | None = None
    attempt: int = 0
    heartbeat_pipe: tuple[int, int] | None = None
    heartbeat_s: float = 1.0


WORKER, HEARTBEAT_PIPE = "DIST_CKPT_WORKER", "DIST_CKPT_HEARTBEAT_PIPE"
HEARTBEAT_S = "DIST_CKPT_HEARTBEAT_S"
_TORCHRUN, _STORE_ADDRESS = "DIST_CKPT_TORCHRUN", "DIST_CKPT_STORE_ADDRESS"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def launch_from_environment() -> Launch:
    """How this process was started: by ``dist-ckpt run``, by torchrun, or on its own.

    Raises:
        StrategyError: in another way, as one of several; or a variable makes no sense.
    """
    source = environment()
    if source.get(RENDEZVOUS):
        pipe = source.get(HEARTBEAT_PIPE)
        return Launch(
            parsed(RENDEZVOUS, source[RENDEZVOUS], parse_address),
            source.get(WORKER, ""),
            heartbeat_pipe=None if not pipe else parsed(HEARTBEAT_PIPE, pipe, _pipe),
            heartbeat_s=parsed(HEARTBEAT_S, source.get(HEARTBEAT_S, "1"), float),
        )
    if source.get(_AGENT_STORE) == "True":
        # Each attempt in place gives these variables other values; the first ones are torchrun's.
        count = source.get("TORCHELASTIC_RESTART_COUNT", "0")
        address = f"{source.get('MASTER_ADDR', '')}:{source.get('MASTER_PORT', '')}"
        first = source.get(_TORCHRUN) or f"{count}@{address}"
        update_environment({_TORCHRUN: first})
        count, _, address = first.partition("@")
        rank = parsed("RANK", source.get("RANK", ""), int)
        return Launch(
            parsed("MASTER_ADDR:MASTER_PORT", address, parse_address),
            str(rank),
            rank=rank,
            attempt=parsed("TORCHELASTIC_RESTART_COUNT", count, int),
        )
    if source.get("WORLD_SIZE", "1") in {"", "1"}:
        return Launch()
    raise StrategyError(
        f"WORLD_SIZE is {source['WORLD_SIZE']}, but nothing here coordinates restarts: start the "
        "script with dist-ckpt run or torchrun, or give HPWrapper an hp_api_factory"
    )


def claim_store_address() -> tuple[str, int] | None:
    """Host and port for the store of process groups that no other process hosts; None if one does.

    From then on ``init_process_group`` looks for one that is there, and rank 0 hosts none itself.

    Raises:
        StrategyError: MASTER_PORT is no number.
    """
    source = environment()
    host, port = source.get("MASTER_ADDR"), source.get("MASTER_PORT")
    if host and port and source.get(_AGENT_STORE) != "True":
        update_environment({_STORE_ADDRESS: f"{host}:{port}", _AGENT_STORE: "True"})
    found = environment().get(_STORE_ADDRESS)
    return None if found is None else parsed(_STORE_ADDRESS, found, parse_address)


def outlive_nccl_errors() -> None:
    """Have NCCL's watchdog leave this process alive when it loses contact with another rank.

    By default it ends the process, and with it the state in its memory. Process groups read the
    variable when they are made. torchrun sets it to 1 where it is unset.

    Raises:
        StrategyError: the variable asks for something else.
    """
    found = environment().get(_NCCL_ERROR_HANDLING, "0")
    if found not in {"0", "1"}:
        raise StrategyError(
            f"{_NCCL_ERROR_HANDLING}={found}: NCCL would end every process when one rank is lost; "
            "leave it unset, or set it to 0"
        )
    update_environment({_NCCL_ERROR_HANDLING: "0"})


def _pipe(text: str) -> tuple[int, int]:
    fd, _, inode = text.partition(":")
    return int(fd), int(inode)
