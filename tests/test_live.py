"""The display of a terminal: what it says in each phase, and where there is none."""

import io
import math

import pytest
from rich.console import Console

from rti_jax import live, metrics
from rti_jax.types import RoleUsage, Status, Trajectory

LINE = {
    "step": 1,
    "rollout/pre_success": 0.25,
    "rollout/post_success": 0.375,
    "rollout/sampled_tokens": 3000.0,
    "rollout/policy_calls": 40.0,
    "rollout/policy_tokens": 2000.0,
    "rollout/policy_seconds": 80.0,
    "rti/validator_calls": 9.0,
    "rti/validator_tokens": 1000.0,
    "rti/validator_seconds": 30.0,
    "rollout/timeout": 2.0,
    "engine/restarts": 0.0,
    "alarms/entropy": 1.0,
    "alarms/mismatch": 0.0,
    "time/rollout": 20.0,
    "time/update": 10.0,
    "loss/total": math.nan,
}


def console(**options):
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, **options)


def shown(display):
    """The picture's lines, blanks squeezed."""
    page = console()
    page.print(display.render())
    return [" ".join(line.split()) for line in page.file.getvalue().splitlines()]


def broken(status):
    return Trajectory("g/0", "g", 0, "t", (), status, None)


@pytest.fixture
def display():
    return live.Display(console(), 4)


def test_before_the_first_step(display):
    page = shown(display)
    assert page[0].startswith("steps") and "0/4" in page[0] and "ETA" in page[0]
    assert page[1] == "no step is done yet" and page[-1] == "errors so far: none"


def test_a_step_adds_up_with_those_before(display):
    display.step(1, LINE)
    display.step(2, LINE | {"rollout/post_success": None, "loss/total": None})
    page = shown(display)
    assert "2/4" in page[0] and page[1] == "success 0.250 100 tokens/s 6,000 tokens so far"
    assert "policy 80 4,000 160" in page and "validator 18 2,000 60" in page and "corrector 0 0 0" in page
    assert "errors so far: timeout 4" in page and page[-1] == "alarms: entropy"


def test_success_after_the_intervention_is_beside_that_before(display):
    display.step(1, LINE)
    assert "success 0.250 -> 0.375 after intervention 100 tokens/s 3,000 tokens so far" in shown(display)


def test_episodes_beside_an_update_are_counted_on_when_it_ends(display):
    with display.episodes("rollouts", 5) as seen:
        for _ in range(3):
            seen()
        display.phase("rollout")
        seen()
        assert "4/5 1 in flight, 0 waiting" in shown(display)[1]


def test_what_the_step_in_progress_has_cost_is_in_the_ledger(display):
    usage = {"policy": RoleUsage(3, 0, 70, 5.0), "verifier": RoleUsage(1, 0, 8, 2.0)}
    display.step(1, LINE)
    display.watch(lambda: usage, 2)
    page = shown(display)
    assert "policy 43 2,070 85" in page and "verifier 1 8 2" in page


def test_a_step_that_waits_for_its_update_is_in_the_ledger_until_it_is_recorded(display):
    """With rollout.staleness=1 the groups of step 2 are there before the line of step 1."""
    now = {}
    display.watch(lambda: now, 2)
    first, second = ({"policy": RoleUsage(40, 0, 2000, 80.0), "validator": RoleUsage(9, 0, n, 30.0)} for n in (1000, 5))
    seen = []
    for step, usage in enumerate((first, second), 1):
        with display.episodes("rollouts", 5) as done:
            done(broken(Status.TIMEOUT)), done(broken(Status.TIMEOUT))
            now = usage
            seen.append(shown(display)[-6:])
        now = {}
        display.collected(step, usage)
        seen.append(shown(display)[-6:])
    display.step(1, {k: v for k, v in LINE.items() if not k.startswith("alarms/")})
    seen.append(shown(display)[-6:])
    assert seen[0] == seen[1] and seen[2] == seen[3] == seen[4]
    assert seen[0][-4:] == ["validator 9 1,000 30", "corrector 0 0 0", "verifier 0 0 0", "errors so far: timeout 2"]
    assert "validator 18 1,005 60" in seen[4] and seen[4][-1] == "errors so far: timeout 4"
    display.step(2, LINE | {"rti/validator_tokens": 5.0})
    assert "validator 18 1,005 60" in shown(display) and "errors so far: timeout 4" in shown(display)


def test_the_queue_and_errors_of_the_phase(display):
    display.watch(dict, 2)
    display.phase("rollout")
    with display.episodes("rollouts", 5) as seen:
        assert "rollouts" in shown(display)[1] and "0/5 2 in flight, 3 waiting" in shown(display)[1]
        for status in (Status.SUCCESS, Status.TIMEOUT, Status.TRUNCATED, Status.TIMEOUT):
            seen(broken(status) if status is not Status.SUCCESS else None)
        assert "4/5 1 in flight, 0 waiting" in shown(display)[1]
        assert shown(display)[-1] == "errors so far: truncated 1, timeout 2"
        seen(), seen()  # more than was expected
    assert "in flight" not in shown(display)[1]
    display.phase("update")
    assert "update" in shown(display)[1] and "/" not in shown(display)[1]
    display.step(1, {"rollout/timeout": 2.0, "rollout/truncated": 1.0})  # the same ones, recorded
    assert shown(display)[-1] == "errors so far: truncated 1, timeout 2"


def test_a_resumed_run_begins_with_what_was(tmp_path):
    with metrics.Recorder(tmp_path, 4, 0, console()) as recorder:
        recorder.write(1, LINE)
        recorder.write(2, LINE)
    with metrics.Recorder(tmp_path, 4, 1, console()) as recorder:
        page = shown(recorder._display)
    assert "1/4" in page[0] and "policy 40 2,000 80" in page


def test_it_is_drawn_in_place_and_gone_at_the_end(tmp_path):
    page = console()
    with metrics.Recorder(tmp_path, 4, 0, page) as recorder:
        recorder.phase("rollout")
        recorder.write(1, LINE)
        recorder.warn("look out")
    text = page.file.getvalue()
    assert "step 1/4  success 0.250" in text and "warning: look out" in text and "alarms: entropy" in text
    assert "\x1b[2K" in text and text.rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"force_terminal": True}, True),
        ({"force_terminal": True, "_environ": {"TERM": "dumb"}}, False),
        ({"force_terminal": False}, False),
        ({"force_terminal": True, "_environ": {"NO_COLOR": "1"}}, True),
    ],
)
def test_where_nothing_can_be_redrawn_lines_are_plain(tmp_path, options, expected):
    page = Console(file=io.StringIO(), width=100, **options)
    with metrics.Recorder(tmp_path, 4, 0, page) as recorder:
        recorder.write(1, LINE)
        recorder.warn("look out")
    text = page.file.getvalue()
    assert live.animated(page) is expected and ("\x1b[?25l" in text) is expected
    assert "step 1/4  success 0.250" in text
    if not expected:
        assert [line.split("] ")[1] for line in text.splitlines()] == [
            "step 1/4  success 0.250  no gradient  30.0 s",
            "warning: look out",
        ]
    if "NO_COLOR" in options.get("_environ", {}):
        assert "\x1b[33m" not in text and "\x1b[1;33m" not in text and "\x1b[1;31m" not in text
