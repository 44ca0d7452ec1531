"""Which connections are cut, and which are left alone."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dist_ckpt_strategies.comm.sockets import SocketCensus, num_sockets


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(listening.getsockname()))
        far = stack.enter_context(listening.accept()[0])
        near.settimeout(60)
        far.settimeout(60)
        yield near, far


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    near, far = pair
    try:
        near.send(b"x")
        return far.recv(1) == b"x"
    except OSError:
        return False


def test_later_connections_are_cut_and_earlier_ones_are_not() -> None:
    with connected() as early:
        census = SocketCensus.take()
        with connected() as late:
            assert census.shut_down_later_ones() >= 1
            assert is_open(early)
            assert not is_open(late)


def test_listening_and_local_sockets_are_left_alone() -> None:
    census = SocketCensus.take()
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, near, far:
        assert census.shut_down_later_ones() == 0
        assert is_open((near, far))
        socket.create_connection(listening.getsockname()).close()


def test_protected_connections_are_left_alone() -> None:
    census = SocketCensus.take()
    with connected() as by_filter:
        ports = {one.getsockname()[1] for one in by_filter}
        assert census.shut_down_later_ones(lambda s: s.getsockname()[1] in ports) == 0
        inodes = SocketCensus.take().inodes - census.inodes
        assert census.shut_down_later_ones(protected_inodes=inodes) == 0
        assert is_open(by_filter)


def test_a_number_that_is_used_again_belongs_to_a_later_connection() -> None:
    with connected() as early:
        numbers = {one.fileno() for one in early}
        census = SocketCensus.take()
    with connected() as late:
        assert numbers & {one.fileno() for one in late}
        census.shut_down_later_ones()
        assert not is_open(late)


def test_sockets_are_counted() -> None:
    gc.collect()  # connections that other tests have dropped are not to end meanwhile
    before = num_sockets()
    with connected():
        assert num_sockets() == before + 3
