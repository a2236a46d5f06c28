"""The paper's claims: each gives every verdict on results made for it, and says nothing where there is nothing."""

import math

import numpy as np
import pytest

from rti_jax import claims
from rti_jax.statistics import Estimate
from rti_jax.study_results import MissingError, Results, StudyRun

STEPS, SEEDS = 12, (0, 1, 2)
BY_ID = {claim.id: claim for claim in claims.CLAIMS}


def rows(split, rate, seed, trials=4, spread=False, turns=3, count=60):
    """Tasks, easy and hard in turn, of which a share `rate` is solved.

    Args:
      spread: successes are spread over the trials of all tasks (Pass^k is low) instead of over whole tasks.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    found = []
    for i in range(count):
        solved = rng.binomial(trials, rate) if spread else trials * int(order[i] < rate * count)
        row = {"task": f"{split}/{i}", "kind": ("easy", "hard")[i % 2], "n": trials, "c": int(solved), "excluded": 0}
        found.append(row | {"turns": float(turns), "turns_each": [turns] * trials})
    return found


def run(arm, seed, rate=0.5, *, metrics=None, movement=0.0, **kwargs):
    """A finished run; `metrics` are name -> function of the step."""
    defaults = {"rti/gate_rejected": 1.0, "rti/gate_admitted": 3.0, "rti/replaced": 3.0}
    given = {name: (lambda _, v=value: v) for name, value in defaults.items()} | (metrics or {})
    lines = [{"step": s, **{name: f(s) for name, f in given.items()}} for s in range(1, STEPS + 1)]
    moved = lambda s: min(1.0, max(0.0, rate + movement * (-1) ** (s // 4)))  # noqa: E731
    evaluations = {s: rows("test", moved(s), 0, count=40) for s in range(0, STEPS + 1, 4)}
    return StudyRun(
        arm, seed, {s: rows(s, rate, seed, **kwargs) for s in ("test", "regions", "ood")}, lines, evaluations, 4
    )


def results(**arms):
    """Arm -> keywords of `run`."""
    return Results(run(arm, seed, **keywords) for arm, keywords in arms.items() for seed in SEEDS)


# Claim -> (two arms of which the first should be better).
ORDERINGS = {
    "rti_over_grpo": ("rti", "grpo"),
    "rti_over_opd": ("rti", "opd"),
    "rti_over_luffy": ("rti", "luffy"),
    "luffy_over_opd": ("luffy", "opd"),
    "luffy_over_grpo": ("luffy", "grpo"),
    "post_check_helps": ("rti", "no_post_check"),
    "no_post_check_below_grpo": ("grpo", "no_post_check"),
    "gate_helps": ("rti", "no_gate"),
    "reweighting_helps": ("rti", "no_reweighting"),
    "delta_5_over_3": ("rti", "delta_3"),
    "delta_5_over_20": ("rti", "delta_20"),
    "ood_gains": ("rti", "start"),
    "ood_families_gains": ("rti", "start"),
    "ood_consistency": ("rti", "start"),
    "full_suite": ("rti", "start"),
    "grpo_collapses": ("start", "grpo"),
    "stronger_model_gains": ("stronger_model", "grpo"),
    "own_intervention_best": ("rti", "stronger_model"),
}
METRICS = {  # claim -> arms with metrics under which it holds, does not hold, and cannot be told
    "post_above_pre": [
        {"rti": {"rollout/post_solved_groups": lambda s, d=d: 0.5 + d, "rollout/pre_solved_groups": lambda s: 0.5}}
        for d in (0.2, -0.2, 0.0)
    ],
    "pre_above_grpo": [
        {"rti": {"rollout/pre_success": lambda s, d=d: 0.5 + d}, "grpo": {"rollout/pre_success": lambda s: 0.5}}
        for d in (0.2, -0.2, 0.0)
    ],
    "perplexity_falls": [
        {"rti": {"rti/perplexity_before_gate": lambda s, d=d: 2.0 + d * s + 0.1 * (-1) ** s}} for d in (-0.1, 0.1, 0.0)
    ],
}


def verdict(claim, found):
    return claims.judge(BY_ID[claim], found).verdict


def test_every_claim_is_tested_here():
    others = {"gate_helps_consistency", "reweighting_helps_consistency", "reweighting_is_mild", "delta_20_volatile"}
    assert {*ORDERINGS, *METRICS, *others, "long_episodes"} == BY_ID.keys()
    assert len(BY_ID) == len(claims.CLAIMS)


@pytest.mark.parametrize("claim", ORDERINGS)
def test_an_ordering_holds_fails_or_is_open(claim):
    better, worse = ORDERINGS[claim]
    assert verdict(claim, results(**{better: {"rate": 0.8}, worse: {"rate": 0.4}})) == claims.HOLDS
    assert verdict(claim, results(**{better: {"rate": 0.4}, worse: {"rate": 0.8}})) == claims.FAILS
    assert verdict(claim, results(**{better: {"rate": 0.5}, worse: {"rate": 0.5}})) == claims.OPEN


@pytest.mark.parametrize("claim", METRICS)
def test_a_curve_holds_fails_or_is_open(claim):
    found = [verdict(claim, results(**{a: {"metrics": m} for a, m in arms.items()})) for arms in METRICS[claim]]
    assert found == [claims.HOLDS, claims.FAILS, claims.OPEN]


@pytest.mark.parametrize(
    "claim, worse", [("gate_helps_consistency", "no_gate"), ("reweighting_helps_consistency", "no_reweighting")]
)
def test_a_loss_of_consistency_is_more_than_a_loss(claim, worse):
    """Spread successes keep Pass@1 and lose Pass^k; whole tasks lost cost both the same."""
    assert verdict(claim, results(rti={"rate": 0.5}, **{worse: {"rate": 0.5, "spread": True}})) == claims.HOLDS
    assert verdict(claim, results(rti={"rate": 0.5, "spread": True}, **{worse: {"rate": 0.5}})) == claims.FAILS
    assert verdict(claim, results(rti={"rate": 0.8}, **{worse: {"rate": 0.4}})) == claims.OPEN


def test_reweighting_is_compared_with_both_other_ablations():
    rate = lambda *r: dict(zip(("no_reweighting", "no_post_check", "no_gate"), ({"rate": x} for x in r), strict=True))  # noqa: E731
    assert verdict("reweighting_is_mild", results(**rate(0.8, 0.3, 0.4))) == claims.HOLDS
    assert verdict("reweighting_is_mild", results(**rate(0.8, 0.3, 0.95))) == claims.FAILS
    assert verdict("reweighting_is_mild", results(**rate(0.8, 0.3, 0.8))) == claims.OPEN


def test_volatility_is_movement_between_evaluations():
    moved = lambda a, b: results(delta_20={"movement": a}, rti={"movement": b})  # noqa: E731
    assert verdict("delta_20_volatile", moved(0.3, 0.0)) == claims.HOLDS
    assert verdict("delta_20_volatile", moved(0.0, 0.3)) == claims.FAILS
    assert verdict("delta_20_volatile", moved(0.1, 0.1)) == claims.OPEN


def test_long_episodes_need_rti_to_keep_them_and_grpo_to_lose_them():
    turns = lambda rti, grpo, start: results(rti={"turns": rti}, grpo={"turns": grpo}, start={"turns": start})  # noqa: E731
    assert verdict("long_episodes", turns(4, 3, 4)) == claims.HOLDS
    assert verdict("long_episodes", turns(3, 4, 3)) == claims.FAILS
    assert verdict("long_episodes", turns(4, 4, 4)) == claims.OPEN


def test_rti_must_win_on_hard_tasks_and_on_all():
    """Hard tasks won, but more easy ones lost: the paper's gain is on the whole benchmark."""
    runs = []
    for seed in SEEDS:
        for arm, hard, easy in (("rti", 0.4, 0.2), ("grpo", 0.0, 1.0)):
            made = run(arm, seed)
            for i, row in enumerate(made.splits["test"]):
                row["c"] = 4 * int((i // 2) % 10 < 10 * (hard if row["kind"] == "hard" else easy))
            runs.append(made)
    assert verdict("rti_over_grpo", Results(runs)) == claims.FAILS


class TestWhatIsMissing:
    def test_an_arm_that_was_not_run(self):
        found = claims.judge(BY_ID["rti_over_opd"], results(rti={}))
        assert found.verdict == claims.NOT_RUN and "opd" in found.remark and not found.findings

    def test_only_seeds_of_both_arms_are_compared(self):
        found = Results([run("rti", 0, 0.8), run("rti", 1, 0.0), run("delta_3", 0, 0.4)])
        [finding] = claims.judge(BY_ID["delta_5_over_3"], found).findings
        assert finding.estimate.mean == pytest.approx(0.4) and "seed 0" in finding.what

    def test_a_metric_without_a_number(self):
        nothing = {"rti/perplexity_before_gate": lambda s: math.nan}
        assert verdict("perplexity_falls", results(rti={"metrics": nothing})) == claims.NOT_RUN

    def test_no_results(self):
        assert {claims.judge(c, Results([])).verdict for c in claims.CLAIMS} == {claims.NOT_RUN}


def test_a_difference_of_exactly_zero_is_no_verdict():
    assert claims.verdict([Estimate(0.0, 0.0, 0.0, 5)]) == claims.OPEN
    assert claims.verdict([Estimate(0.1, 0.01, 0.2, 5), Estimate(0.1, -0.01, 0.2, 5)]) == claims.OPEN
    assert claims.verdict([Estimate(0.1, 0.01, 0.2, 5), Estimate(-0.1, -0.2, -0.01, 5)]) == claims.FAILS


def test_the_gate_says_how_much_it_had_to_do():
    perplexity = {"rti/perplexity_before_gate": lambda s: 1.0 + 0.1 * s}
    found = claims.judge(BY_ID["gate_helps"], results(rti={"metrics": perplexity}, no_gate={}))
    assert "rejected 36 of 144 corrected successes" in found.remark and "was 2.20" in found.remark


def test_a_finding_shows_the_sides_and_the_interval_in_percent():
    [finding] = claims.judge(BY_ID["gate_helps"], results(rti={"rate": 0.8}, no_gate={"rate": 0.4})).findings
    assert str(finding).startswith("rti - no_gate, Pass@1, all (80.0 and 40.0, seeds 0, 1, 2): +40.0 [+")


class TestValues:
    def test_task_sets(self):
        found = results(rti={})
        sizes = {t: found.values("rti", t, "pass@1").shape for t in ("all", "easy", "hard", "ood", "full")}
        assert sizes == {"all": (3, 60), "easy": (3, 30), "hard": (3, 30), "ood": (3, 60), "full": (3, 180)}
        with pytest.raises(MissingError):
            found.values("rti", "medium", "pass@1")

    def test_averages_over_k_and_too_few_trials(self):
        row = {"n": 4, "c": 2, "turns": 3.5, "turns_each": [3, 4, 5, 3]}
        from rti_jax.study_results import value

        # Pass@1..4 of 2 in 4: 1/2, 5/6, 1, 1; Pass^1..4: 1/2, 1/6, 0, 0.
        assert value(row, "pass@", 4) == pytest.approx((1 / 2 + 5 / 6 + 2) / 4)
        assert value(row, "pass^", 4) == pytest.approx((1 / 2 + 1 / 6) / 4)
        assert value(row, "long", 4) == 0.5 and value(row, "turns", 4) == 3.5
        assert math.isnan(value({**row, "n": 3}, "pass@4", 4)) and value({**row, "n": 3}, "pass@1", 4) == pytest.approx(
            2 / 3
        )
        assert math.isnan(value({**row, "n": 3}, "pass^", 4))
