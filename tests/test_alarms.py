"""What is warned of, once and until it is over; and that runs which are well are not."""

import pytest

from rti_jax.alarms import Alarms
from tests.fakes import small_config

FINE = {
    "rollout/groups": 4.0,
    "rollout/groups_all_failed": 1.0,
    "rollout/groups_all_solved": 1.0,
    "rollout/truncated": 0.0,
    "rollout/tokens": 900.0,
    "rollout/tool_calls": 12.0,
    "groups/flat": 2.0,
    "mismatch/abs": 0.01,
    "policy/entropy": 0.05,
    "rti/attempts": 1.0,
    "rti/turns_flagged": 2.0,
    "rti/proposals": 2.0,
    "rti/accepted": 1.0,
    "rti/rejected_leak": 1.0,
}
SICK = {  # alarm -> (what a step of it looks like, what the warning says)
    "constant_reward": (
        {"groups/flat": 3.0, "groups/dropped": 1.0, "rollout/groups_all_failed": 3.0, "rollout/groups_all_solved": 0.0},
        "in 3 steps in a row no group had both a success and a failure (in this one 3 of 4 failed entirely, 0 were",
    ),
    "truncated": ({"rollout/truncated": 8.0}, "nearly all episodes were cut at a token limit (100% in this one)"),
    "mismatch": ({"mismatch/abs": 0.7}, "for 3 steps the engine's log-probabilities have been far from the learner's"),
    "entropy": ({"policy/entropy": 1e-5}, "for 3 steps the policy's entropy has been next to nothing (1e-05 nats"),
    "no_tool_calls": ({"rollout/tool_calls": 0.0}, "in 3 steps in a row not one tool call could be read"),
    "never_accepted": (
        {"rti/accepted": 0.0, "rti/rejected_leak": 2.0},
        "in 3 intervened episodes in a row (in this step 2 turns flagged, 2 rewrites proposed, 2 rejected as leak)",
    ),
}
LIMITS = {"constant_reward": 3, "no_tool_calls": 3, "never_accepted": 3, "steps": 3}


def config(**sections):
    return small_config(alarms=LIMITS | sections.pop("alarms", {}), **sections)


def warned(alarms, *steps):
    """Warnings of each step."""
    return [alarms.check(FINE | step)[1] for step in steps]


@pytest.mark.parametrize("name", SICK)
def test_an_alarm_is_raised_once_and_again_after_its_end(name):
    step, says = SICK[name]
    alarms = Alarms(config())
    first, second, third, fourth, over, *again = warned(alarms, step, step, step, step, {}, step, step, step)
    assert [first, second, fourth, over, *again[:2]] == [[]] * 6 and len(third) == len(again[2]) == 1
    assert third[0].startswith(name.replace("_", " ") + ": ") and says in third[0]
    assert alarms.raised == [name]


@pytest.mark.parametrize("name", SICK)
def test_there_is_a_metric_for_each(name):
    alarms, step = Alarms(config()), SICK[name][0]
    values = [alarms.check(FINE | s)[0] for s in (step, step, step, {})]
    assert all(set(v) == {f"alarms/{other}" for other in SICK} for v in values)
    assert [v[f"alarms/{name}"] for v in values] == [0.0, 0.0, 1.0, 0.0]
    assert sum(sum(v.values()) for v in values) == 1.0  # no other one


@pytest.mark.parametrize("name", SICK)
def test_a_resumed_run_knows_what_it_has_warned_of(name):
    step = FINE | SICK[name][0]
    assert warned(Alarms(config(), [step, step]), step)[0]
    alarms = Alarms(config(), [step, step, step])
    assert alarms.raised == [name] and not warned(alarms, step)[0]


@pytest.mark.parametrize("name", SICK)
def test_null_turns_one_off(name):
    off = name if name in ("constant_reward", "no_tool_calls", "never_accepted", *SICK) else "steps"
    alarms = Alarms(config(alarms={off: None}))
    assert not any(warned(alarms, *[SICK[name][0]] * 9))
    assert f"alarms/{name}" not in alarms.check(FINE)[0]


@pytest.mark.parametrize("name", ["mismatch", "entropy"])
def test_what_is_not_finite_says_nothing(name):
    (metric, value), *_ = SICK[name][0].items()
    alarms = Alarms(config())
    assert [len(w) for w in warned(alarms, *3 * [{metric: value}], {metric: float("nan")})] == [0, 0, 1, 0]
    assert alarms.raised == [name]


def test_what_says_nothing_neither_grows_nor_ends_an_alarm():
    """A step without an update has no entropy, one in which all groups are solved needs no intervention."""
    for name in ("entropy", "mismatch", "never_accepted"):
        step = SICK[name][0]
        silent = {"policy/entropy": None, "mismatch/abs": None, "rti/attempts": 0.0}
        assert [len(w) for w in warned(Alarms(config()), step, silent, step, silent, silent, step)] == [0] * 5 + [1]


def test_interventions_count_by_episodes_since_a_good_policy_has_few():
    refused = {"rti/accepted": 0.0}
    assert not any(warned(Alarms(small_config()), *[refused] * 49))
    assert warned(Alarms(small_config()), *[refused | {"rti/attempts": 12.0}] * 5)[-1]


def test_hard_groups_that_always_fail_beside_easy_ones_are_no_alarm():
    steps = [{"groups/flat": 3.0, "rollout/groups_all_failed": 3.0}] * 40
    assert not any(warned(Alarms(small_config()), *steps))


def test_where_rewards_or_corrections_play_no_part_they_raise_none():
    opd = small_config(alarms=LIMITS, rti={"enabled": False}, loss={"baseline": "opd", "teacher": {"path": "t"}})
    assert not any(warned(Alarms(opd), *[SICK["constant_reward"][0]] * 20))
    never = config(rti={"control": "never_invalid"})
    assert not any(warned(Alarms(never), *[SICK["never_accepted"][0]] * 20))
    shut = config(gate={"delta": 0.0, "scope": "turn"})
    assert not any(warned(Alarms(shut), *[SICK["never_accepted"][0]] * 20))


def test_an_environment_without_tools_is_not_expected_to_see_calls():
    alarms = Alarms(config())
    for _ in range(20):
        assert not alarms.check({k: v for k, v in FINE.items() if k != "rollout/tool_calls"})[1]
