"""Evaluation: counts per task, excluded episodes beside every number, limits by kind, disjoint splits."""

import pytest
from rich.console import Console

from envs.base import Task
from rti_jax import evaluate, runs, summary, task_sets
from rti_jax.config import ConfigError
from rti_jax.types import Group, Status, Trajectory, Turn


def group(task, statuses):
    def one(member, status):
        turn = Turn(f"{task}/{member}/0", (1,), (2,), (-0.1,), "stop", 0)
        reward = float(status is Status.SUCCESS) if status.valid else None
        return Trajectory(f"{task}/{member}", task, member, task, (turn,), status, reward)

    return Group(task, task, tuple(one(i, s) for i, s in enumerate(statuses)))


WIN, LOSS, ERROR = Status.SUCCESS, Status.FAILURE, Status.TIMEOUT
TASKS = [Task("a", "easy"), Task("b", "hard"), Task("c", "hard")]
GROUPS = [group("a", [WIN] * 4), group("b", [WIN, LOSS, LOSS, LOSS]), group("c", [LOSS, LOSS, ERROR, ERROR])]


def test_summary_is_per_task_unbiased_and_counts_what_is_excluded():
    result = evaluate.summarize(TASKS, GROUPS, 4, seed=0)
    hard = result["kinds"]["hard"]
    assert hard["pass@1"]["mean"] == pytest.approx((0.25 + 0.0) / 2)
    assert hard["pass@2"]["mean"] == pytest.approx((0.5 + 0.0) / 2)  # (4, 1): 1 - C(3,2)/C(4,2)
    assert hard["pass@4"] == hard["pass@4"] | {"mean": 1.0, "tasks": 1}  # task c has two valid trials only
    assert hard["pass^2"]["mean"] == 0.0
    assert hard["excluded"] == 2
    assert result["kinds"]["all"]["pass@1"]["mean"] == pytest.approx(1.25 / 3)
    assert [(r["n"], r["c"], r["excluded"]) for r in result["tasks"]] == [(4, 4, 0), (4, 1, 0), (2, 0, 2)]


def test_limit_counts_each_kind():
    assert [t.id for t in task_sets.limited(TASKS, 1)] == ["a", "b"]
    assert task_sets.limited(TASKS, None) == TASKS


def test_a_task_that_is_trained_may_not_be_evaluated():
    evaluate.check_disjoint([TASKS[0]], [TASKS[1]])
    with pytest.raises(ConfigError, match="e.g. b"):
        evaluate.check_disjoint(TASKS[:2], TASKS[1:])


def test_group_metrics_leave_errors_out_of_the_mean():
    metrics = summary.group_metrics(GROUPS, TASKS)
    assert metrics["rollout/pre_success"] == pytest.approx(5 / 10)
    assert metrics["rollout/pre_success_hard"] == pytest.approx(1 / 6)
    assert metrics["rollout/groups_all_failed"] == 1
    assert metrics["rollout/timeout"] == 2


def test_score_table_names_kinds_and_excluded_episodes():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    result = evaluate.summarize(TASKS, GROUPS, 4, seed=0)
    console.print(summary.score_table({"before": result, "after": result}))
    text = console.export_text()
    assert "hard (2, 2 episodes excluded)" in text
    assert "12.5" in text


def test_best_step_is_the_highest_score_and_the_earlier_of_equals(tmp_path):
    run = runs.Run(tmp_path)
    (tmp_path / "evals").mkdir()
    for step, mean in ((0, 0.2), (5, 0.6), (10, 0.6), (15, None)):
        runs.write_json(run.evaluation(step), {"step": step, "kinds": {"all": {"pass@1": {"mean": mean}}}})
    assert summary.best_step(run) == 5


def test_a_step_without_a_valid_episode_says_why():
    groups = [group("a", [ERROR, ERROR])]
    assert summary.first_error(groups) == "timeout: no reason given"
