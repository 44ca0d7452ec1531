"""Element types, under the names that torch gives them."""

from __future__ import annotations

from enum import Enum

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.errors import PlanError


class DType(Enum):
    """An element type that a checkpoint can hold.

    The value is torch's name for it without the ``torch.`` in front.
    """

    BOOL = "bool"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype of the same bytes; bfloat16 and float8 come from ml_dtypes."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_extension(self) -> bool:
        """Whether numpy alone does not know it."""
        return hasattr(ml_dtypes, self.value)

    @classmethod
    def named(cls, name: str, *, key: str) -> DType:
        """The type of that name.

        Raises:
            PlanError: no checkpoint format here holds it.
        """
        try:
            return cls(name.removeprefix("torch."))
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise PlanError(f"{key}: dtype {name} cannot be stored; {known} can", key=key) from None

    @classmethod
    def from_numpy(cls, dtype: npt.DTypeLike, *, key: str) -> DType:
        """The type of a numpy dtype, whatever its byte order.

        Raises:
            PlanError: no checkpoint format here holds it.
        """
        return cls.named(np.dtype(dtype).name, key=key)


_NUMPY: dict[DType, np.dtype[np.generic]] = {
    member: np.dtype(getattr(ml_dtypes, member.value, None) or member.value) for member in DType
}
_ITEMSIZE = {member: dtype.itemsize for member, dtype in _NUMPY.items()}
