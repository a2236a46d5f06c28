"""Paired comparisons: by hand, over seeds, and what cannot be compared."""

import json

import pytest

from rti_jax import compare
from rti_jax.config import ConfigError


def evaluation(path, counts, kind="hard", trials=4):
    tasks = [{"task": f"t{i}", "kind": kind, "c": c, "n": trials} for i, c in enumerate(counts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tasks": tasks}))
    return path


def run(folder, **steps):
    for step, counts in steps.items():
        evaluation(folder / "evals" / f"step_{int(step[1:]):06d}.json", counts)
    return folder


def compared(tmp_path, first, second, **options):
    output = tmp_path / "out.json"
    assert compare.main(str(first), str(second), output=output, **options) == 0
    return json.loads(output.read_text())["kinds"]


def test_differences_are_paired(tmp_path, capsys):
    a, b = evaluation(tmp_path / "a.json", [0, 1, 2, 3]), evaluation(tmp_path / "b.json", [2, 3, 4, 4])
    found = compared(tmp_path, a, b)["all"]
    assert (found["a"]["mean"], found["b"]["mean"]) == (0.375, 0.8125)
    assert found["difference"]["mean"] == pytest.approx(0.4375)
    assert found["difference"]["low"] >= 0.25 and found["difference"]["high"] <= 0.5  # of pairs, not of two samples
    assert "+43.8" in capsys.readouterr().out


def test_a_task_without_a_valid_trial_is_left_out_and_counted(tmp_path):
    a = evaluation(tmp_path / "a.json", [0, 0])
    b = evaluation(tmp_path / "b.json", [4, 4])
    data = json.loads(b.read_text())
    data["tasks"][1] |= {"c": 0, "n": 0}
    b.write_text(json.dumps(data))
    found = compared(tmp_path, a, b)["all"]
    assert (found["left_out"], found["difference"]["tasks"], found["difference"]["mean"]) == (1, 1, 1.0)


def test_seeds_are_pooled_and_paired_in_order(tmp_path):
    for seed, (low, high) in enumerate([(0, 4), (2, 4)]):
        run(tmp_path / f"grpo{seed}", s0=[0, 0], s9=[low, low])
        run(tmp_path / f"rti{seed}", s0=[0, 0], s9=[high, high])
    found = compared(tmp_path, f"{tmp_path}/grpo*", f"{tmp_path}/rti*")["all"]
    assert (found["a"]["mean"], found["difference"]["mean"]) == (0.25, 0.75)
    assert [p["mean"] for p in found["pairs"]] == [1.0, 0.5]
    assert compared(tmp_path, f"{tmp_path}/grpo*", f"{tmp_path}/rti*", step=0)["all"]["difference"]["mean"] == 0.0


def test_kinds_apart(tmp_path):
    a, b = evaluation(tmp_path / "a.json", [0, 4]), evaluation(tmp_path / "b.json", [4, 4])
    for path in (a, b):
        data = json.loads(path.read_text())
        data["tasks"][1]["kind"] = "easy"
        path.write_text(json.dumps(data))
    found = compared(tmp_path, a, b)
    assert {k: v["difference"]["mean"] for k, v in found.items()} == {"all": 0.5, "easy": 0.0, "hard": 1.0}


def test_splits_apart_where_both_have_the_same(tmp_path):
    a, b = evaluation(tmp_path / "a.json", [0, 4]), evaluation(tmp_path / "b.json", [4, 4])
    assert list(compared(tmp_path, a, b)) == ["all"]
    for path in (a, b):
        data = json.loads(path.read_text())
        for row, splits in zip(data["tasks"], (["id"], ["id", "ood"]), strict=True):
            row["splits"] = splits
        path.write_text(json.dumps(data))
    found = compared(tmp_path, a, b)
    assert {k: v["difference"]["mean"] for k, v in found.items()} == {"all": 0.5, "split id": 0.5, "split ood": 0.0}


def test_mistakes_are_one_line(tmp_path):
    a = evaluation(tmp_path / "a.json", [1])
    cases = {
        "there is no such file": tmp_path / "none",
        "no evaluation of": tmp_path / "text.json",
        "different tasks, e.g. t1": evaluation(tmp_path / "b.json", [1, 1]),
        "has no evaluation": run(tmp_path / "empty"),
        "those after 0, 3": run(tmp_path / "some", s0=[1], s3=[1]),
    }
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "empty" / "evals").mkdir(parents=True)
    for message, path in cases.items():
        with pytest.raises(ConfigError, match=message):
            compare.main(str(a), str(path), step=7)
