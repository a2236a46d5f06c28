"""Budgets end a run at the same step whether it was resumed or not."""

import json
import pathlib

import pytest

from rti_jax import budget
from rti_jax.config import Config, ConfigError, StopConfig, load_config

ROOT = pathlib.Path(__file__).parents[1]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def steps(kept, clock, count, seconds=60.0):
    """Lines of some steps of 100 tokens."""
    lines = []
    for _ in range(count):
        clock.now += seconds
        lines.append({"rollout/sampled_tokens": 100.0} | kept.add({"rollout/sampled_tokens": 100.0}))
    return lines


def test_tokens_of_all_steps_are_counted_over_resumes():
    stop, clock = StopConfig(tokens=500), Clock()
    first = budget.Budget(stop, clock=clock)
    lines = steps(first, clock, 3)
    assert [line["run/sampled_tokens"] for line in lines] == [100.0, 200.0, 300.0] and first.spent() == ""
    resumed = budget.Budget(stop, lines, clock)
    steps(resumed, clock, 1)
    assert resumed.spent() == ""
    steps(resumed, clock, 1)
    assert resumed.spent() == "stop.tokens=500 (500 tokens were sampled)"


def test_tokens_of_broken_episodes_and_of_roles_count():
    line = {"rollout/sampled_tokens": 7.0, "rollout/policy_tokens": 100.0, "rti/validator_tokens": 20.0}
    assert budget.sampled(line) == 120.0
    assert budget.Budget(StopConfig(tokens=500)).add(line)["run/sampled_tokens"] == 120.0


def test_hours_are_wall_time_without_what_lies_between_two_processes():
    stop, clock = StopConfig(hours=0.1), Clock()
    lines = steps(budget.Budget(stop, clock=clock), clock, 3)
    clock.now += 1e6  # the machine was off
    resumed = budget.Budget(stop, lines, clock)
    clock.now += 100  # an evaluation, which has no line of its own
    assert resumed.spent() == ""
    assert steps(resumed, clock, 1)[0]["run/wall_seconds"] == 180 + 100 + 60
    assert resumed.spent() == ""
    steps(resumed, clock, 1)
    assert resumed.spent() == "stop.hours=0.1 (0.11 hours have passed)"
    clock.now += 1e6
    assert budget.Budget(stop, lines, clock).spent() == ""


def test_lines_of_an_older_version_have_the_seconds_of_their_steps():
    lines = [{"rollout/sampled_tokens": 7.0, "time/rollout": 2.0, "time/other": 1.0}, {"time/rollout": 4.0}]
    assert budget.totals(lines) == (7.0, 7.0)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({}, (9, "")),
        ({"tokens": 201}, (9, "")),
        ({"tokens": 200}, (2, "stop.tokens=200 (200 tokens were sampled)")),
        ({"hours": 0.01}, (2, "stop.hours=0.01 (0.03 hours have passed)")),
    ],
)
def test_the_end_of_a_run_is_read_from_its_folder(tmp_path, stop, expected):
    config = Config(steps=9, stop=stop)
    assert budget.end(config, tmp_path) == (9, "")
    lines = steps(budget.Budget(config.stop, clock=(clock := Clock())), clock, 2)
    text = "".join(json.dumps({"step": n, **line}) + "\n" for n, line in enumerate(lines, 1))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert budget.end(config, tmp_path) == expected
    assert budget.end(Config(steps=2, stop=stop), tmp_path) == (2, "")  # all steps are done


@pytest.mark.parametrize("override", ["stop.tokens=0", "stop.tokens=1.5", "stop.hours=0", "stop.hours=inf"])
def test_a_budget_is_a_positive_number(override):
    with pytest.raises(ConfigError, match="stop"):
        load_config(ROOT / "configs" / "quickstart.yaml", [override])
