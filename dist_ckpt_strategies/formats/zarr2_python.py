"""bfloat16 and float8 for zarr-python, which knows numpy's own dtypes only.

The spelling is TensorStore's and Megatron's: the plain name. Registered on first use, not at
import; a type that somebody else has registered under the name is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeGuard

import numpy as np
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasItemSize, check_dtype_spec_v2
from zarr.core.dtype.wrapper import ZDType

from dist_ckpt_strategies.core.array import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionDType(ZDType[Any, Any], HasItemSize):
    """A zarr data type for an ml_dtypes element; one subclass for each."""

    _zarr_v3_name: ClassVar[str] = ""
    element: ClassVar[DType]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """The zarr type of a numpy dtype."""
        if dtype == cls.element.numpy:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value}, found {dtype}")

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == cls.element.numpy)

    def to_native_dtype(self) -> Any:
        """The numpy dtype."""
        return self.element.numpy

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        if check_dtype_spec_v2(data) and data["name"] == cls.element.value:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value!r}, found {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls.element.value:
            return cls()
        raise DataTypeValidationError(f"expected {cls.element.value!r}, found {data!r}")

    def to_json(self, zarr_format: Any) -> Any:
        """The spelling in ``.zarray`` (2) or ``zarr.json`` (3)."""
        name = self.element.value
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name  # noqa: PLR2004

    def _check_scalar(self, data: object) -> Any:
        return isinstance(data, (int, float, np.generic))

    def cast_scalar(self, data: object) -> Any:
        """The value as an element."""
        return self.element.numpy.type(data)

    def default_scalar(self) -> Any:
        """Zero."""
        return self.element.numpy.type(0)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The value as a JSON number, or its name where JSON has none."""
        value = float(data)  # type: ignore[arg-type]
        return value if np.isfinite(value) else str(value)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The element that a JSON number or name stands for."""
        return self.element.numpy.type(float(data))

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self.element.itemsize


def register_extension_dtypes() -> None:
    """Teach zarr-python every DType that it does not know. Idempotent."""
    for element in DType:
        if element.is_extension and element.value not in data_type_registry.contents:
            namespace = {
                "element": element,
                "dtype_cls": type(element.numpy),
                "_zarr_v3_name": element.value,
                "__slots__": (),
            }
            data_type_registry.register(
                element.value, type(f"Zarr_{element.value}", (ExtensionDType,), namespace)
            )
