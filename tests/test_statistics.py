"""Estimators against hand values and exhaustive enumeration; intervals against what resampling tasks must give."""

import itertools

import numpy as np
import pytest

from rti_jax import statistics


@pytest.mark.parametrize(
    ("n", "c", "k", "at", "hat"),
    [
        (4, 1, 1, 0.25, 0.25),
        (4, 1, 2, 0.5, 0.0),
        (8, 3, 4, 1 - 5 / 70, 0.0),
        (8, 3, 2, 1 - 10 / 28, 3 / 28),  # Pass^2 = .1071
        (4, 4, 4, 1.0, 1.0),
        (3, 0, 3, 0.0, 0.0),
    ],
)
def test_values_by_hand(n, c, k, at, hat):
    assert statistics.pass_at_k(n, c, k) == pytest.approx(at)
    assert statistics.pass_hat_k(n, c, k) == pytest.approx(hat)


def test_k_above_n_is_absent_not_zero():
    assert statistics.pass_at_k(2, 0, 5) is None
    assert statistics.pass_hat_k(2, 0, 5) is None
    assert statistics.estimate(statistics.pass_at_k, [(2, 0)], 5) == statistics.Estimate(None, None, None, 0)


@pytest.mark.parametrize("n", range(1, 6))
def test_equal_to_enumerating_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert statistics.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert statistics.pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="successes"):
        statistics.pass_at_k(n, c, k)


def test_mean_is_over_tasks_and_not_over_pooled_trials():
    # Pooled, 5 of 10 trials would give 0.5; per task it is the mean of 2/2 and 3/8.
    result = statistics.estimate(statistics.pass_at_k, [(2, 2), (8, 3)], 1)
    assert result.mean == pytest.approx((1.0 + 0.375) / 2)
    assert result.tasks == 2


def test_tasks_with_too_few_trials_are_left_out():
    result = statistics.estimate(statistics.pass_at_k, [(4, 4), (1, 0), (0, 0)], 2)
    assert (result.mean, result.tasks) == (1.0, 1)


def test_interval_holds_the_mean_is_repeatable_and_shrinks_with_tasks():
    few = statistics.mean_interval([0.0, 1.0] * 10, seed=3)
    many = statistics.mean_interval([0.0, 1.0] * 400, seed=3)
    assert few.low < 0.5 < few.high and few == statistics.mean_interval([0.0, 1.0] * 10, seed=3)
    assert few.high - few.low == pytest.approx(2 * 1.96 * (0.25 / 20) ** 0.5, rel=0.2)  # normal approximation
    assert many.high - many.low == pytest.approx((few.high - few.low) / 40**0.5, rel=0.25)


def test_pairing_removes_what_tasks_share():
    before, after = [0.0, 0.5, 1.0, 0.25] * 5, [0.1, 0.6, 1.1, 0.35] * 5
    difference = statistics.paired_difference(before, after)
    assert difference.mean == pytest.approx(0.1)
    assert difference.high - difference.low == pytest.approx(0.0, abs=1e-9)
    assert statistics.mean_interval(before).high - statistics.mean_interval(before).low > 0.2
    assert statistics.paired_difference(after, before).mean == pytest.approx(-0.1)


def test_pairing_needs_the_same_tasks():
    with pytest.raises(ValueError, match="paired"):
        statistics.paired_difference([1.0], [1.0, 0.0])


def test_printed_with_interval():
    assert str(statistics.Estimate(0.5, 0.25, 0.75, 8)) == "0.500 [0.250, 0.750]"
    assert str(statistics.Estimate(None, None, None, 0)) == "-"


class TestGridInterval:
    """Tasks under several seeds: both are resampled."""

    def test_mean_and_interval_of_one_seed_are_those_over_tasks(self):
        values = np.random.default_rng(0).random((1, 200))
        one, many = statistics.grid_interval(values), statistics.mean_interval(values[0])
        assert one.mean == pytest.approx(many.mean) and one.tasks == many.tasks == 200
        assert one.low == pytest.approx(many.low, abs=0.005) and one.high == pytest.approx(many.high, abs=0.005)

    def test_seeds_that_differ_widen_it_and_more_trials_of_the_same_tasks_do_not_narrow_it(self):
        tasks = np.random.default_rng(0).random(200)
        same, apart = np.tile(tasks, (3, 1)), tasks + np.array([[-0.2], [0.0], [0.2]])
        width = lambda e: e.high - e.low  # noqa: E731
        one = width(statistics.grid_interval(tasks[None]))
        assert width(statistics.grid_interval(same)) == pytest.approx(one, rel=0.1)
        assert width(statistics.grid_interval(apart)) > 3 * one

    def test_the_exact_interval_of_two_seeds_that_differ_alone(self):
        """Every task 0 under one seed and 1 under the other: a resample's mean is 0, 1/2 or 1."""
        found = statistics.grid_interval(np.repeat([[0.0], [1.0]], 5, axis=1))
        assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)

    def test_missing_values_are_left_out(self):
        values = np.array([[1.0, np.nan, 0.0], [np.nan, np.nan, 1.0]])
        found = statistics.grid_interval(values)
        assert found.mean == pytest.approx(2 / 3) and found.tasks == 2
        assert statistics.grid_interval(np.full((2, 3), np.nan)).mean is None
        assert statistics.grid_interval(np.empty((2, 0))).mean is None

    def test_covers_the_mean_about_as_often_as_it_says(self):
        rng, inside = np.random.default_rng(1), 0
        for _ in range(200):
            found = statistics.grid_interval(rng.normal(0.0, 1.0, (1, 60)), resamples=400)
            inside += found.low < 0 < found.high
        assert 0.88 <= inside / 200 <= 0.99


class TestSlopeInterval:
    def test_a_line_has_its_slope(self):
        found = statistics.slope_interval([0, 1, 2, 3], [5.0, 4.5, 4.0, 3.5])
        assert (found.mean, found.low, found.high) == pytest.approx((-0.5, -0.5, -0.5)) and found.tasks == 4

    def test_noise_around_a_constant_is_no_slope(self):
        found = statistics.slope_interval(range(40), [(-1.0) ** i for i in range(40)])
        assert found.low < 0 < found.high

    def test_points_without_a_value_are_left_out(self):
        found = statistics.slope_interval([0, 1, 2, 3], [1.0, np.nan, 3.0, np.nan])
        assert found.mean == pytest.approx(1.0) and found.tasks == 2
        assert statistics.slope_interval([1, 1], [1.0, 2.0]).mean is None
