"""bfloat16 and float8 for zarr-python, which knows numpy's own dtypes only.

The spelling is TensorStore's and Megatron's: the plain name. Registered on first use, not at
import; a type that another package has registered under the name is left alone.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from zarr.core.dtype import data_type_registry
from zarr.core.dtype.npy.float import BaseFloat

from dist_ckpt_strategies.core.array import DType


@dataclass(frozen=True, kw_only=True)
class ExtensionDType(BaseFloat[Any, Any]):
    """A zarr data type for an ml_dtypes element; one subclass for each."""

    element: ClassVar[DType]

    def to_native_dtype(self) -> Any:
        """The numpy dtype."""
        return self.element.numpy

    def to_json(self, zarr_format: Any) -> Any:
        """The spelling in ``.zarray`` (2) or ``zarr.json`` (3)."""
        name = self.element.value
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name  # noqa: PLR2004

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
                "_zarr_v2_names": (element.value,),
                "_zarr_v3_name": element.value,
            }
            made = type(f"Zarr_{element.value}", (ExtensionDType,), namespace)
            data_type_registry.register(element.value, made)
