"""A run that no longer learns is ended, and says why."""

import json

import numpy as np
import pytest
from stand_in import make_config, make_groups

from rti_jax import batching
from rti_jax.config import StopConfig
from rti_jax.guards import Guards, RunStopped

FINE = {"optimizer/updates": 1.0, "optimizer/skipped": 0.0, "groups/dropped": 1.0, "rollout/groups": 4.0}
NAN = FINE | {"optimizer/skipped": 1.0}
IDLE = {"groups/dropped": 0.0, "rollout/groups": 4.0, "optimizer/updates": 0.0}
BROKEN = IDLE | {"groups/dropped": 4.0, "rollout/timeout": 1.0, "rollout/judge_error": 3.0, "rollout/user_error": 0.0}


@pytest.fixture
def packed():
    return [batching.build(make_groups(), make_config())]


def look(folder, packed, *steps):
    guards = Guards(StopConfig(nonfinite_steps=3, dropped_steps=2), folder)
    for n, metrics in enumerate(steps, 1):
        guards.check(n, metrics, packed)


def test_gradients_that_are_never_finite_end_the_run(tmp_path, packed):
    look(tmp_path, packed, NAN, NAN, FINE, NAN, NAN)
    look(tmp_path, packed, NAN, NAN, IDLE)
    with pytest.raises(RunStopped, match="gradients of 3 steps in a row were not finite"):
        look(tmp_path, packed, FINE, NAN, IDLE, NAN, NAN)  # a step without an update is neither


def test_the_first_batch_of_such_a_row_is_written(tmp_path, packed):
    look(tmp_path, packed, FINE, NAN, IDLE, NAN, FINE, NAN)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nonfinite_step_000002.npz", "nonfinite_step_000006.npz"]
    with np.load(tmp_path / "nonfinite_step_000002.npz") as written:
        batch = packed[0].microbatches[0]
        for name, value in batch._asdict().items():
            np.testing.assert_array_equal(written[f"0/0/{name}"], value)


def test_steps_whose_groups_all_break_end_the_run(tmp_path, packed):
    look(tmp_path, packed, BROKEN, FINE, BROKEN, IDLE)
    words = r"in 2 steps in a row every group had fewer than two valid episodes .*: judge_error 6, timeout 2; traj"
    with pytest.raises(RunStopped, match=words):
        look(tmp_path, packed, BROKEN, FINE, BROKEN, BROKEN)


@pytest.mark.parametrize(("metrics", "words"), [(NAN, "gradients of 3 steps"), (BROKEN, "in 2 steps .*judge_error 6")])
def test_an_interruption_does_not_start_the_count_anew(tmp_path, packed, metrics, words):
    config = StopConfig(nonfinite_steps=3, dropped_steps=2)
    state = {}
    with pytest.raises(RunStopped, match=words):
        for step in (1, 2, 3):
            guards = Guards(config, tmp_path)
            guards.restore(state)
            guards.check(step, metrics, packed)
            state = json.loads(json.dumps(guards.state))  # as in a checkpoint
