"""Streams of CUDA that do nothing, on the host.

Megatron-Core's DistributedDataParallel asks for them where its optimizer has several instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


class HostStream:
    """A stand-in for CUDA's streams."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        """Whatever device or priority is asked for."""

    def wait_stream(self, _other: Any) -> None:
        """What was begun on the host is done."""


@contextmanager
def host_streams() -> Iterator[None]:
    """Streams that do nothing, on the host."""
    with (
        mock.patch.object(torch.cuda, "Stream", HostStream),
        mock.patch.object(torch.cuda, "current_stream", HostStream),
        mock.patch.object(torch.cuda, "default_stream", HostStream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
    ):
        yield
