"""Inputs as rows of a batch: how many there are, and the same again and again."""

import math

import numpy as np

from parity.pair import Inputs


def common_rows(inputs: Inputs) -> int | None:
    """The length of the first axis that all inputs share; None if they share none."""
    rows = {array.shape[0] if isinstance(array, np.ndarray) and array.ndim else -1 for array in inputs.values()}
    return rows.pop() if len(rows) == 1 and -1 not in rows else None


def rows_of_a_device(rows: int, devices: int) -> int:
    """How many each has, once the batch is repeated until all have as many."""
    return rows * repeats(rows, devices) // devices


def repeats(rows: int, devices: int) -> int:
    """How often a batch is repeated until every device has as many rows."""
    return devices // math.gcd(rows, devices)


def tiled(inputs: Inputs, times: int) -> Inputs:
    """The whole batch, so many times one after the other: no row is invented."""
    return {name: np.concatenate([array] * times) for name, array in inputs.items()}
