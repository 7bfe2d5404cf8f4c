"""The shapes in which text is decoded."""

import numpy as np
import pytest

from train.decode_shapes import decode_shapes, source_rows


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (1, 1, [(16, 24)]),
        (16, 24, [(16, 24)]),
        (17, 24, [(16, 24), (32, 48)]),
        (3, 80, [(16, 24), (32, 48), (64, 96)]),
        (100, 25, [(16, 24), (32, 48), (64, 96), (128, 192)]),
    ],
)
def test_every_source_and_every_target_fits_the_last_shape(source, target, expected):
    assert list(decode_shapes(source, target)) == expected


def test_rows_are_filled_up_with_padding():
    rows = source_rows([[5, 2], [6, 7, 2]], rows=4, src_len=3, pad_id=9)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[5, 2, 9], [6, 7, 2], [9, 9, 9], [9, 9, 9]]
