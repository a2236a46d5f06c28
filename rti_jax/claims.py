"""The paper's claims as data: what it reports, and what a study's results say about each.

A claim is a list of findings, each a difference that is positive where the claim is right, with its 95% interval. It
holds if every interval lies above zero, does not hold if one lies below, and cannot be distinguished otherwise. The
measure follows the paper's: whole benchmarks are all our held-out tasks, its Hard20 are our hard ones. Differences are
paired: the same tasks, the same seeds. Percentages are points of percent. arXiv 2610.13438.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rti_jax.statistics import Estimate, draws, grid_interval, slope_interval
from rti_jax.study_results import MissingError, Results

HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold", "not distinguishable", "not run"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference; `estimate` is positive where the claim is right. `scale` turns it into the unit that is shown."""

    what: str
    estimate: Estimate
    scale: float = 100.0

    def __str__(self) -> str:
        e = self.estimate
        numbers = (
            f"{self.scale * x:+.3g}" if self.scale != 100 else f"{100 * x:+.1f}" for x in (e.mean, e.low, e.high)
        )
        return "{} {} [{}, {}]".format(self.what, *numbers)


Test = Callable[[Results], Sequence[Finding]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the paper says, its numbers, and the test of it; `context` adds what explains the numbers, in a sentence."""

    id: str
    text: str
    paper: str
    test: Test
    context: Callable[[Results], str] | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    claim: Claim
    verdict: str
    findings: Sequence[Finding]
    remark: str


def judge(claim: Claim, results: Results) -> Verdict:
    """What the results say about a claim."""
    try:
        findings = list(claim.test(results))
        if any(f.estimate.mean is None for f in findings):
            raise MissingError("nothing to compare: no such episode, turn or step")
        return Verdict(claim, verdict([f.estimate for f in findings]), findings, _remark(claim, results))
    except MissingError as error:
        return Verdict(claim, NOT_RUN, [], str(error))


def verdict(estimates: Sequence[Estimate]) -> str:
    """One word for differences that are positive where the claim is right."""
    if any(e.high < 0 for e in estimates):
        return FAILS
    return HOLDS if all(e.low > 0 for e in estimates) else OPEN


def _remark(claim: Claim, results: Results) -> str:
    try:
        return claim.context(results) if claim.context else ""
    except MissingError:
        return ""


def gap(better: str, worse: str, tasks: str = "all", measure: str = "pass@1") -> Test:
    """`better` is above `worse` on a task set at the end of training."""
    return lambda results: [_gap(results, better, worse, tasks, measure)]


def _gap(results: Results, better: str, worse: str, tasks: str, measure: str) -> Finding:
    seeds = results.seeds(better, worse)
    a, b = (results.values(arm, tasks, measure, seeds) for arm in (better, worse))
    means = " and ".join(f"{100 * np.nanmean(x):.1f}" for x in (a, b))
    return Finding(f"{better} - {worse}, {label(measure)}, {tasks} ({means}, {_seeds(seeds)}):", grid_interval(a - b))


def more_at(better: str, worse: str, measures: Sequence[str], tasks: str = "all", base: str = "pass@1") -> Test:
    """The distance between two arms is larger by each of `measures` than by `base`."""

    def test(results: Results) -> list[Finding]:
        seeds = results.seeds(better, worse)
        lost = lambda m: results.values(better, tasks, m, seeds) - results.values(worse, tasks, m, seeds)  # noqa: E731
        return [
            Finding(
                f"loss of {worse} at {label(m)} minus at {label(base)}, {tasks} "
                f"({100 * np.nanmean(lost(m)):.1f} and {100 * np.nanmean(lost(base)):.1f}, {_seeds(seeds)}):",
                grid_interval(lost(m) - lost(base)),
            )
            for m in measures
        ]

    return test


def every(*tests: Test) -> Test:
    return lambda results: [finding for test in tests for finding in test(results)]


def steps_gap(first: tuple[str, str], second: tuple[str, str], part: slice | str) -> Test:
    """A metric of one arm is above that of another over the "first" or "last" third of the steps, paired by step."""

    def test(results: Results) -> list[Finding]:
        seeds = results.seeds(first[0], second[0])
        a, b = (results.series(arm, metric, seeds) for arm, metric in (first, second))
        third = max(1, a.shape[1] // 3)
        where = slice(0, third) if part == "first" else slice(a.shape[1] - third, None)
        names = " - ".join(" ".join(x) for x in (first, second))
        return [Finding(f"{names}, {part} {third} steps ({_seeds(seeds)}):", grid_interval((a - b)[:, where]))]

    return test


def falls(arm: str, metric: str) -> Test:
    """A metric has a negative slope over the steps that have it, all seeds together."""

    def test(results: Results) -> list[Finding]:
        y = results.series(arm, metric)
        x = np.broadcast_to(np.arange(1, y.shape[1] + 1), y.shape)
        found = slope_interval(x.ravel(), -y.ravel())
        third = max(1, y.shape[1] // 3)
        means = [
            f"{np.nanmean(part):.2f}" if np.isfinite(part).any() else "-" for part in (y[:, :third], y[:, -third:])
        ]
        what = f"fall a step of {arm} {metric} (first third {means[0]}, last third {means[1]}, {found.tasks} steps):"
        return [Finding(what, found, scale=1.0)]

    return test


def more_volatile(arm: str, other: str, tasks: str = "all") -> Test:
    """Held-out Pass@1 of `arm` moves more from evaluation to evaluation (mean absolute change), tasks resampled."""

    def test(results: Results) -> list[Finding]:
        seeds = results.seeds(arm, other)
        rates = [np.stack([*results.held_out(a, tasks, "pass@1", seeds).values()]) for a in (arm, other)]
        n = rates[0].shape[-1]
        whole, drawn = (_movement(rates[0], w) - _movement(rates[1], w) for w in (np.ones((1, n)), draws(n)))
        estimate = Estimate(float(whole[0]), *map(float, np.quantile(drawn, [0.025, 0.975])), n)
        return [Finding(f"mean change between evaluations, {arm} - {other}, {tasks} ({_seeds(seeds)}):", estimate)]

    return test


def _movement(rates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean |change| of the weighted mean over tasks; rates [evaluations, seeds, tasks], weights [resamples, tasks]."""
    sums, known = (np.einsum("est,rt->res", x, weights) for x in (np.nan_to_num(rates), np.isfinite(rates)))
    means = sums / known
    return np.abs(np.diff(means, axis=1)).mean(axis=(1, 2))


def label(measure: str) -> str:
    names = {"long": "share of episodes of more than three turns", "pass@": "average Pass@k", "pass^": "average Pass^k"}
    return names.get(measure, measure.replace("pass", "Pass"))


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"


def gate_at_work(*arms: str) -> Callable[[Results], str]:
    """How much the gate had to reject."""

    def context(results: Results) -> str:
        parts = []
        for arm in arms:
            runs = results.of(arm)
            rejected, admitted = (sum(r.total(f"rti/gate_{x}") for r in runs) for x in ("rejected", "admitted"))
            highest = np.nanmax(results.series(arm, "rti/perplexity_before_gate"))
            parts.append(
                f"{arm}: the gate rejected {rejected:.0f} of {rejected + admitted:.0f} corrected successes; the "
                f"highest mean perplexity of a step was {highest:.2f}"
            )
        return "; ".join(parts)

    return context


def leaks_admitted(*arms: str) -> Callable[[Results], str]:
    """Corrections that give something away, in episodes that were trained."""

    def context(results: Results) -> str:
        parts = []
        for arm in arms:
            leaks, admitted = (
                sum(r.total(f"rti/{x}") for r in results.of(arm)) for x in ("admitted_revealing", "replaced")
            )
            parts.append(f"{arm} trained {leaks:.0f} corrections that reveal something, in {admitted:.0f} episodes")
        return "; ".join(parts)

    return context


TELECOM = "τ²-Telecom"
HARD20_8B = "Claw-Eval-Hard20, Qwen3-8B"
HARD20_9B = "Claw-Eval-Hard20, Qwen3.5-9B"

CLAIMS = (
    Claim(
        "rti_over_grpo",
        "RTI solves more than GRPO",
        f"+24.56 Pass@1 ({TELECOM}), +22.00 (Navigation)",
        every(gap("rti", "grpo", "hard"), gap("rti", "grpo", "all")),
    ),
    Claim("rti_over_opd", "RTI solves more than OPD", f"50.00 against 26.25 ({HARD20_8B})", gap("rti", "opd", "hard")),
    Claim(
        "rti_over_luffy",
        "RTI solves more than LUFFY",
        f"50.00 against 30.00 ({HARD20_8B}), 85.00 against 61.25 ({HARD20_9B})",
        gap("rti", "luffy", "hard"),
    ),
    Claim(
        "luffy_over_opd",
        "LUFFY solves more than OPD",
        f"30.00 against 26.25 ({HARD20_8B})",
        gap("luffy", "opd", "hard"),
    ),
    Claim(
        "luffy_over_grpo",
        "LUFFY solves more than GRPO",
        f"61.25 against 52.50 ({HARD20_9B})",
        gap("luffy", "grpo", "hard"),
    ),
    Claim(
        "post_check_helps",
        "Without the post-check RTI loses",
        "26.00, while GRPO has 35.33 and RTI 22.00 more than GRPO (Navigation)",
        gap("rti", "no_post_check"),
        leaks_admitted("rti", "no_post_check"),
    ),
    Claim(
        "no_post_check_below_grpo",
        "Without the post-check RTI falls below GRPO",
        "26.00 against 35.33 (Navigation)",
        gap("grpo", "no_post_check"),
    ),
    Claim(
        "gate_helps",
        "Without the gate RTI loses",
        f"61.40 -> 54.39 ({TELECOM})",
        gap("rti", "no_gate"),
        gate_at_work("rti"),
    ),
    Claim(
        "gate_helps_consistency",
        "Without the gate RTI loses more at Pass^k than at Pass@1",
        f"Pass^2 46.49 -> 27.19, Pass^4 31.58 -> 18.42 ({TELECOM})",
        more_at("rti", "no_gate", ("pass^2", "pass^4")),
        gate_at_work("rti"),
    ),
    Claim(
        "reweighting_helps",
        "Without reweighting RTI loses",
        "a loss milder than the other ablations'",
        gap("rti", "no_reweighting", measure="pass^"),
    ),
    Claim(
        "reweighting_helps_consistency",
        "Without reweighting RTI loses most at Pass^k",
        "most on Pass^k",
        more_at("rti", "no_reweighting", ("pass^",)),
    ),
    Claim(
        "reweighting_is_mild",
        "Reweighting matters less than the post-check and the gate",
        "a loss milder than the other ablations'",
        every(gap("no_reweighting", "no_post_check"), gap("no_reweighting", "no_gate")),
    ),
    Claim(
        "delta_5_over_3",
        "A gate at 5 is better than one at 3",
        "3 -> 5 improves",
        gap("rti", "delta_3"),
        gate_at_work("rti", "delta_3"),
    ),
    Claim(
        "delta_5_over_20",
        "A gate at 5 is better than one at 20",
        "20 is worse",
        gap("rti", "delta_20"),
        gate_at_work("rti", "delta_20"),
    ),
    Claim(
        "delta_20_volatile", "A gate at 20 is more volatile", "20 is volatile", more_volatile("delta_20", "rti", "all")
    ),
    Claim(
        "ood_gains",
        "RTI's gain carries over to regions that were never trained",
        "62.92 against 54.34 at the start (Rest-OOD)",
        gap("rti", "start", "regions"),
    ),
    Claim(
        "ood_families_gains",
        "It carries over to regions and request families that were never trained",
        "62.92 against 54.34 at the start (Rest-OOD)",
        gap("rti", "start", "ood"),
    ),
    Claim(
        "ood_consistency",
        "In those regions RTI is also more consistent: average Pass^k rises",
        "43.62 -> 54.48 (Rest-OOD)",
        gap("rti", "start", "regions", "pass^"),
    ),
    Claim(
        "full_suite",
        "RTI gains on everything together",
        "51.51 -> 65.20 (full suite)",
        gap("rti", "start", "full"),
    ),
    Claim(
        "post_above_pre",
        "Early on more groups have a success after the intervention than before it",
        "post-intervention Pass@8 is above pre-intervention early",
        steps_gap(("rti", "rollout/post_solved_groups"), ("rti", "rollout/pre_solved_groups"), "first"),
    ),
    Claim(
        "pre_above_grpo",
        "RTI's own success before intervention rises above GRPO's",
        "pre-intervention success rises above GRPO's",
        steps_gap(("rti", "rollout/pre_success"), ("grpo", "rollout/pre_success"), "last"),
    ),
    Claim(
        "perplexity_falls",
        "The perplexity of corrected steps falls over training",
        "perplexity of corrected steps falls",
        falls("rti", "rti/perplexity_before_gate"),
    ),
    Claim(
        "long_episodes",
        "RTI keeps episodes of more than three turns where GRPO's distribution narrows",
        "as stated",
        every(gap("rti", "grpo", "all", "long"), gap("start", "grpo", "all", "long")),
    ),
    Claim("grpo_collapses", "GRPO falls below its start", "GRPO's scores collapse on Hard20", gap("start", "grpo")),
    Claim(
        "stronger_model_gains",
        "Intervention by a stronger model sustains gains over GRPO",
        "sustains gains",
        gap("stronger_model", "grpo"),
    ),
    Claim(
        "own_intervention_best",
        "Intervention by the policy itself teaches more than by a stronger model",
        "learns less well than by the policy itself",
        gap("rti", "stronger_model"),
    ),
)
