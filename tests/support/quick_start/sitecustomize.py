"""Python runs this where it starts: Megatron-Core without torch's compiler, as its own
``disable_jit_fuser`` leaves it, but before the compiler's import, a third of a process's start.
And few garbage collections: those of imports take a sixth of it."""

import gc
import sys
from types import ModuleType
from typing import Any


def _same(function: Any) -> Any:
    return function


_jit: Any = ModuleType("megatron.core.jit")
_jit.jit_fuser = _jit.noop_decorator = _same
sys.modules[_jit.__name__] = _jit

gc.set_threshold(100_000, 20, 100)
