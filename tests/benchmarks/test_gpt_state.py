from __future__ import annotations

import pytest
import torch

from benchmarks.measuring.gpt_state import Division, GptSize, Split, build_slices

SIZE = GptSize(num_layers=1, hidden=32, vocabulary=64)


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("split", list(Split))
def test_slices_of_any_division_make_up_the_same_state(split: Split, num_parts: int) -> None:
    whole = build_slices(SIZE, 0, Division(Split.ROWS, 1))
    parts = [build_slices(SIZE, part, Division(split, num_parts)) for part in range(num_parts)]
    for array, *own in zip(whole, *parts, strict=True):
        assert all(one.tensor.is_contiguous() for one in own)
        joined = torch.cat([one.tensor for one in own], own[0].axis)
        assert torch.equal(joined, array.tensor)


def test_columns_divide_the_last_dim_and_rows_the_first() -> None:
    for split, axis in ((Split.ROWS, 0), (Split.COLUMNS, 1)):
        matrices = [x for x in build_slices(SIZE, 0, Division(split, 2)) if x.tensor.ndim > 1]
        assert {matrix.axis for matrix in matrices} == {axis}
