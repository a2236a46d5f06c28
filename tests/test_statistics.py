"""Estimators against hand values and exhaustive enumeration; intervals against what resampling tasks must give."""

import itertools

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
