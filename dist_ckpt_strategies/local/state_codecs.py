"""How each class of state dicts is taken apart for a file, and made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError, StrategyError, StrategyExistsError
from dist_ckpt_strategies.local.basic_state_dict import BasicTensorAwareStateDict
from dist_ckpt_strategies.local.part_format import BufferSpec, Part, PartId
from dist_ckpt_strategies.local.plain_values import Extension, pack, unpack
from dist_ckpt_strategies.local.retrieve import RetrievedPart


@dataclass(frozen=True, slots=True)
class StateCodec:
    """How state dicts of one class become plain values with tensors in them, and back.

    Attributes:
        kind: stands for the class in files.
        cls: the class, or its full name where importing it has to wait until a state is of it.
        to_value: the state as nested containers, plain values and tensors; the tensors of the
            state come before any other, in the order of ``state.tensors``.
        from_value: the state again, from that and the kind of device of each tensor.
        extensions: further classes that the values may be of.
        from_several: one state that holds what several parts of a save hold, for another number
            of ranks; None where a part fits its own rank alone.
        devices: the kind of device that each tensor belongs to, in order; None where that is the
            one it is on. By default what the state's ``devices`` says, if it has that.
    """

    kind: str
    cls: type[Any] | str
    to_value: Callable[[Any], Any]
    from_value: Callable[[Any, Sequence[str]], Any]
    extensions: tuple[Extension, ...] = ()
    from_several: Callable[[Sequence[Any]], Any] | None = None
    devices: Callable[[Any], Sequence[str] | None] = lambda state: getattr(state, "devices", None)

    @property
    def class_name(self) -> str:
        """The full name of the class."""
        return self.cls if isinstance(self.cls, str) else _full_name(self.cls)

    def is_for(self, cls: type[Any]) -> bool:
        """Whether this is the codec of that very class."""
        return cls is self.cls or _full_name(cls) == self.cls


class StateCodecs:
    """The codecs that a manager knows, by class and by kind."""

    def __init__(self, codecs: Sequence[StateCodec] = ()) -> None:
        self._codecs: list[StateCodec] = list(codecs)

    def add(self, codec: StateCodec) -> None:
        """Make a codec known.

        Raises:
            StrategyExistsError: its kind or class is taken.
        """
        for known in self._codecs:
            if known.kind == codec.kind or known.cls == codec.cls:
                raise StrategyExistsError(
                    f"state codec {codec.kind!r} of {codec.class_name}: there is "
                    f"{known.kind!r} of {known.class_name} already"
                )
        self._codecs.append(codec)

    def of_state(self, state: Any) -> StateCodec:
        """The codec of a state's class.

        Raises:
            StrategyError: there is none.
        """
        for cls in type(state).__mro__:
            for codec in self._codecs:
                if codec.is_for(cls):
                    return codec
        known = ", ".join(codec.class_name for codec in self._codecs)
        raise StrategyError(
            f"no codec for a {type(state).__qualname__}, only for {known}; "
            "wrap the state in BasicTensorAwareStateDict, or add a StateCodec"
        )

    def resharded_kinds(self) -> frozenset[str]:
        """Kinds whose parts another number of ranks can use."""
        return frozenset(codec.kind for codec in self._codecs if codec.from_several)

    def of_kind(self, kind: str) -> StateCodec:
        """The codec of that name.

        Raises:
            StrategyError: there is none.
        """
        for codec in self._codecs:
            if codec.kind == kind:
                return codec
        known = ", ".join(codec.kind for codec in self._codecs)
        raise StrategyError(f"no codec {kind!r} for this state, only {known}; add a StateCodec")


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def basic_codec() -> StateCodec:
    """The codec of BasicTensorAwareStateDict."""
    return StateCodec(
        "basic",
        BasicTensorAwareStateDict,
        lambda state: state.state_dict,
        lambda value, devices: BasicTensorAwareStateDict(value, devices=devices),
    )


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A state, ready to be stored.

    Attributes:
        part: its description.
        payloads: the elements of the part's buffers: the state's own memory, not copies.
    """

    part: Part
    payloads: tuple[torch.Tensor, ...]


def encode_state(
    state: Any,
    part_id: PartId,
    *,
    world_size: int,
    session_id: str,
    codecs: StateCodecs,
    allowed: Mapping[str, Any],
) -> EncodedState:
    """Take a state apart. It is left as it is.

    Raises:
        StrategyError: there is no codec for its class.
        UnsafeObjectError: it holds an object of a class that is not allowed.
        PlanError: it is hollow, or a tensor cannot be stored.
    """
    codec = codecs.of_state(state)
    packed = pack(codec.to_value(state), allowed, codec.extensions)
    buffers = _at_home(packed.buffers, codec.devices(state))
    part = Part(part_id, world_size, session_id, codec.kind, packed.tree, buffers)
    return EncodedState(part, packed.payloads)


def _at_home(
    buffers: Sequence[BufferSpec], devices: Sequence[str] | None
) -> tuple[BufferSpec, ...]:
    """The buffers with the devices that the state remembers in place of those they are on."""
    if devices is None:
        return tuple(buffers)
    homes = iter(devices)
    return tuple(
        replace(buffer, device=next(homes, buffer.device)) if buffer.device else buffer
        for buffer in buffers
    )


def decode_state(
    retrieved: RetrievedPart, *, codecs: StateCodecs, allowed: Mapping[str, Any]
) -> Any:
    """The state that was stored; its tensors are on the host.

    Raises:
        StrategyError: there is no codec of its kind.
        UnsafeObjectError: it names a class that is not allowed.
        CorruptCheckpointError: its description makes no sense.
    """
    part = retrieved.part
    codec = codecs.of_kind(part.kind)
    value = unpack(part.content, retrieved.payloads, allowed, codec.extensions)
    devices = [buffer.device for buffer in part.buffers if buffer.device]
    try:
        return codec.from_value(value, devices)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{part.part_id}: the state's description is damaged: {error}"
        ) from error


def decode_parts(
    retrieved: Sequence[RetrievedPart], *, codecs: StateCodecs, allowed: Mapping[str, Any]
) -> Any:
    """The state of one part, or of several of one save; errors as in ``decode_state``."""
    states = [decode_state(part, codecs=codecs, allowed=allowed) for part in retrieved]
    join = codecs.of_kind(retrieved[0].part.kind).from_several
    return states[0] if join is None or len(states) == 1 else join(states)
