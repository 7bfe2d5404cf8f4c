"""Distances that cannot be fooled (P23)."""

import numpy as np
import pytest

from parity.compare import NOTHING_COMPARED, Comparison, identical_after_rounding, relative_error
from parity.rungs import section


def test_relative_error_is_the_norm_of_the_difference_over_the_norm_of_the_expected() -> None:
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)


def test_differences_do_not_cancel_and_a_permutation_is_not_equal() -> None:
    expected = np.array([1.0, 2.0, 3.0])
    assert relative_error(np.array([2.0, 1.0, 3.0]), expected) > 0.3
    assert relative_error(np.array([2.0, 1.0, 3.0]) * 1.0, expected[::-1]) > 0.3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["got", "expected"])
def test_what_is_not_finite_on_one_side_never_passes(value: float, side: str) -> None:
    good, bad = np.array([1.0, 2.0]), np.array([1.0, value])
    got, expected = (bad, good) if side == "got" else (good, bad)
    error = relative_error(got, expected)
    assert not Comparison(tensor="x", error=error, bound=1e300).passed


def test_what_is_not_finite_at_the_same_places_is_left_out_and_no_more() -> None:
    nan, inf = np.nan, np.inf
    assert relative_error(np.array([1.0, nan, inf]), np.array([1.0, nan, inf])) == 0.0
    assert relative_error(np.array([1.1, nan, 0.0]), np.array([1.0, nan, 0.0])) == pytest.approx(0.1)
    assert relative_error(np.array([1.0, nan, 2.0]), np.array([1.0, 2.0, nan])) == inf
    assert relative_error(np.array([1.0, inf]), np.array([1.0, -inf])) == inf
    assert relative_error(np.array([1.0, inf]), np.array([1.0, nan])) == inf


def test_nothing_finite_and_nothing_at_all_are_no_comparison() -> None:
    assert relative_error(np.full(3, np.nan), np.full(3, np.nan)) == np.inf
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == np.inf


def test_another_shape_never_passes_even_where_it_would_broadcast() -> None:
    assert relative_error(np.ones((1, 3)), np.ones(3)) == np.inf
    assert identical_after_rounding(np.ones((1, 3)), np.ones(3)).unequal > 0


def test_zeros_are_equal_to_zeros_and_to_nothing_else() -> None:
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.array([1e-300]), np.zeros(1)) == np.inf


def test_a_nan_error_fails_whatever_the_bound() -> None:
    assert not Comparison(tensor="x", error=float("nan"), bound=float("inf")).passed


def test_nothing_compared_is_not_a_pass() -> None:
    assert not section("empty", "float64", "rule", []).passed
    assert NOTHING_COMPARED.share == 0.0


def test_the_worst_is_measured_by_its_bound() -> None:
    near, far = Comparison(tensor="near", error=9.0, bound=10.0), Comparison(tensor="far", error=50.0, bound=1000.0)
    broken = Comparison(tensor="broken", error=1e-9, bound=0.0)
    assert section("s", "p", "r", [far, near]).worst == near
    judged = section("s", "p", "r", [far, near, broken])
    assert judged.worst == broken
    assert judged.failures == (broken,)
    assert not judged.passed


def test_values_are_counted_after_rounding_and_their_distance_in_units() -> None:
    one = np.float32(1.0)
    following = np.nextafter(one, np.float32(2.0))
    expected = np.array([1.0, 1.0, -1.0, 0.0])
    got = np.array([1.0 + 1e-12, float(following), float(np.nextafter(-one, np.float32(-2.0))), -0.0])
    identical = identical_after_rounding(got, expected)
    assert (identical.count, identical.unequal, identical.max_units) == (4, 2, 1)
    assert identical.share == 0.5
    across = identical_after_rounding(np.array([1e-45]), np.array([-1e-45]))
    assert across.max_units == 2


def test_counts_add_up() -> None:
    one = identical_after_rounding(np.ones(3), np.ones(3))
    other = identical_after_rounding(np.ones(2), np.array([1.0, 1.5]))
    both = one + other
    assert (both.count, both.unequal, both.max_units) == (5, 1, other.max_units)
