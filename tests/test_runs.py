"""The run folder: opening, refusing, and what is written for the viewer."""

import dataclasses
import json
import math

import numpy as np
import pytest

from rti_jax import config as config_lib
from rti_jax import runs
from rti_jax.types import (
    Correction,
    GateDecision,
    Group,
    IntervenedRollout,
    Intervention,
    Proposal,
    RejectReason,
    Status,
    Trajectory,
    Turn,
)


def config(tmp_path, **keys):
    return config_lib.Config(name="x", runs_dir=str(tmp_path), **keys)


def trajectory(member, status=Status.FAILURE, correction=None):
    turn = Turn(f"g/{member}/0", (1, 2), (3, 4), (-0.5, math.nan), "stop", 0, correction)
    return Trajectory(f"g/{member}", "g", member, "task", (turn,), status, float(status is Status.SUCCESS))


def test_open_makes_the_folders_and_saves_the_config(tmp_path):
    run = runs.open_run(config(tmp_path, steps=7))
    assert (run.folder / "checkpoints").is_dir()
    assert config_lib.load_config(run.config).steps == 7


def test_a_mistake_before_the_first_result_does_not_hold_the_folder(tmp_path):
    runs.open_run(config(tmp_path, seed=1))
    assert config_lib.load_config(runs.open_run(config(tmp_path)).config).seed == 0


def test_two_trainers_cannot_share_a_folder(tmp_path):
    run = runs.open_run(config(tmp_path))
    with runs.locked(run), pytest.raises(config_lib.ConfigError, match="another process"), runs.locked(run):
        pass
    with runs.locked(run):  # released
        pass


def test_the_same_config_may_go_on_and_another_algorithm_may_not(tmp_path):
    run = runs.open_run(config(tmp_path))
    runs.write_json(run.evaluation(0), {})
    runs.open_run(config(tmp_path, steps=200))
    with pytest.raises(config_lib.ConfigError, match="seed: 0 -> 1"):
        runs.open_run(config(tmp_path, seed=1))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("mine")
    with pytest.raises(config_lib.ConfigError, match="holds no run"):
        runs.open_run(config(tmp_path))
    assert (tmp_path / "x" / "thesis.tex").read_text() == "mine"


def test_a_policy_may_be_evaluated_before_it_is_trained(tmp_path):
    (tmp_path / "x" / "evals").mkdir(parents=True)
    (tmp_path / "x" / "evals" / "test_model.json").write_text("{}")
    assert config_lib.load_config(runs.open_run(config(tmp_path, seed=4)).config).seed == 4


def test_trajectories_are_json_lines_with_interventions_and_the_replaced_member(tmp_path):
    correction = Correction((9,), (-0.1, -0.2), (-0.1, -0.1))
    new = trajectory(-1, Status.SUCCESS, correction)
    proposals = (Proposal((7,), (8,), "bad", RejectReason.LEAK), Proposal((7,), (3, 4), "good", None))
    record = Intervention("g/-1/0", "{}", True, True, "why", "old", proposals)
    attempt = IntervenedRollout(new, (record,), GateDecision(True, "admitted", (1.2,)))
    group = Group("g", "task", (trajectory(0), new), (attempt,), replaced=trajectory(1))
    path = tmp_path / "t.jsonl"
    runs.write_groups(path, [group], {"g/0": -1.0, "g/-1": 1.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["g/0", "g/-1", "g/1"]
    assert [line["replaced"] for line in lines] == [False, False, True]
    assert lines[1]["interventions"][0]["proposals"][0]["rejected"] == "leak"
    assert lines[0]["turns"][0]["sampler_logprobs"] == [-0.5, None]  # NaN is no JSON
    assert lines[1]["advantage"] == 1.0


@dataclasses.dataclass(frozen=True)
class Held:
    ids: tuple[int, ...]
    inner: dict[str, "Held"] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], [1, 2]),
        ([1.5, math.nan, math.inf], [1.5, None, None]),
        ([True, 1, 0.5, None, math.nan], [True, 1, 0.5, None, None]),
        ((np.int32(3), np.float32(0.5), np.float32(np.nan)), [3, 0.5, None]),
        (np.array([1.0, np.nan]), [1.0, None]),
        ({"a": Held((1, 2), {"b": Held(())})}, {"a": {"ids": [1, 2], "inner": {"b": {"ids": [], "inner": {}}}}}),
        ([Status.SUCCESS, "x"], ["success", "x"]),
        ([], []),
    ],
)
def test_plain_values(value, expected):
    assert runs.plain(value) == expected and json.loads(json.dumps(runs.plain(value))) == expected


def test_write_json_leaves_no_half_file(tmp_path):
    path = tmp_path / "a.json"
    runs.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        runs.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
