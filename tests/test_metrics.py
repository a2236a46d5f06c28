"""metrics.jsonl through interruptions, TensorBoard, plain and live progress, and the table of names."""

import ast
import asyncio
import io
import json
import math
import pathlib
import re
import runpy
import types

import pytest
import stand_in
from rich.console import Console

from rti_jax import intervention_metrics, metric_names, metrics, train
from rti_jax.collection import Collected
from rti_jax.hosts import Hosts

ROOT = pathlib.Path(__file__).parents[1]


def recorder(folder, step=0, terminal=False, steps=5):
    return metrics.Recorder(folder, steps, step, Console(file=io.StringIO(), force_terminal=terminal, width=200))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SCORE = {"mean": 0.25, "low": 0.0, "high": 0.5, "tasks": 2}
RESULT = {"kinds": {"hard": {"tasks": 2, "pass@1": SCORE, "pass^1": SCORE}}}


class TestFile:
    def test_a_line_a_step_and_null_for_what_is_not_a_number(self, tmp_path):
        with recorder(tmp_path) as r:
            r.write(1, {"loss/total": math.nan, "rollout/groups": 3, "a/b": math.inf})
            assert lines(tmp_path) == [{"step": 1, "loss/total": None, "rollout/groups": 3, "a/b": None}]  # flushed
            r.write(2, {"loss/total": 0.5})
        assert [line["step"] for line in lines(tmp_path)] == [1, 2]
        assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()

    def test_a_continued_run_has_each_step_once(self, tmp_path):
        with recorder(tmp_path) as r:
            for step in (1, 2, 3, 4):
                r.write(step, {"x/y": float(step)})
        with recorder(tmp_path, step=2) as r:  # the checkpoint of step 2 was the last one
            assert [line["step"] for line in lines(tmp_path)] == [1, 2]
            r.write(3, {"x/y": 30.0})
        assert [(line["step"], line["x/y"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]

    def test_a_half_written_last_line_is_dropped(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "x/y": 1.0}\n{"step": 2, "x/y": 2.')
        assert metrics.read_metrics(path) == [{"step": 1, "x/y": 1.0}]
        with recorder(tmp_path, step=2) as r:
            r.write(3, {})
        assert [line["step"] for line in lines(tmp_path)] == [1, 3]

    def test_no_file_is_no_lines(self, tmp_path):
        assert metrics.read_metrics(tmp_path / "metrics.jsonl") == []

    def test_tensorboard_has_the_finite_values(self, tmp_path):
        with recorder(tmp_path) as r:
            r.write(1, {"loss/total": 0.5, "rti/nan": math.nan})
            r.evaluation(1, RESULT)
        (events,) = (tmp_path / "tensorboard").iterdir()
        data = events.read_bytes()
        assert b"loss/total" in data and b"eval/hard/pass_at_1" in data and b"eval/hard/pass_hat_1" in data
        assert b"rti/nan" not in data


class TestProgress:
    def test_plain_lines_outside_a_terminal(self, tmp_path):
        r = recorder(tmp_path)
        with r:
            r.phase("starting vLLM")
            for step in (1, 2):
                for phase in ("rollout", "update"):
                    r.phase(phase)
                with r.episodes("rollouts", 8) as seen:
                    seen("whatever")
                r.write(step, {"rollout/pre_success": 0.25, "rollout/groups": 4.0, "rollout/groups_all_failed": 1.0})
            r.evaluation(2, RESULT)
        said = [line.split("] ")[1] for line in r._console.file.getvalue().splitlines()]
        assert said == [
            "starting vLLM",
            "rollouts: 8 episodes",
            "step 1/5  success 0.250  failed groups 1/4  no gradient",
            "step 2/5  success 0.250  failed groups 1/4  no gradient",
            "evaluation after 2 steps: Pass@1 hard 0.250",
        ]

    def test_a_terminal_gets_bars_and_the_same_step_lines(self, tmp_path):
        r = recorder(tmp_path, terminal=True)
        with r:
            with r.episodes("rollouts", 8) as seen:
                seen()
            r.write(1, {"optimizer/grad_norm": 0.5})
        text = r._console.file.getvalue()
        assert "gradient 0.500" in text and "steps" in text

    def test_a_step_without_any_of_the_numbers_still_has_its_line(self):
        assert metrics.summary_line({"step": 3}) == "no gradient"

    def test_null_values_are_not_formatted(self):
        line = {
            "rollout/pre_success": None,
            "rollout/pre_success_hard": None,
            "rti/attempts": 2.0,
            "rti/replaced": None,
        }
        assert metrics.summary_line(line) == "corrections 0/0  admitted 0/2  no gradient"


class Clock:
    """Seconds as they are told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class TestStopwatch:
    def test_phases_and_what_none_of_them_accounts_for_are_the_whole(self):
        clock = Clock()
        watch = metrics.Stopwatch(clock)
        clock.now += 1.0  # before any phase
        for seconds in (2.0, 3.0):
            with watch.timed("rollout"):
                clock.now += seconds
        clock.now += 0.5
        with pytest.raises(OSError), watch.timed("sync"):  # a phase that fails took its time too
            clock.now += 4.0
            raise OSError
        found = watch.metrics()
        assert found == {"time/rollout": 5.0, "time/sync": 4.0, "time/other": 1.5}
        assert metrics.summary_line(found).endswith("  10.5 s")

    def test_a_step_is_accounted_for_as_a_whole(self, tmp_path, monkeypatch):
        """`Trainer.step` around stand-ins that each take a known time."""
        clock, written = Clock(), []

        def taking(seconds, result=None):
            def job(*_, **__):
                clock.now += seconds
                return result

            return job

        def waiting(seconds, result=None):
            async def job(*_, **__):
                return taking(seconds, result)()

            return job

        config = stand_in.make_config()
        trainer = object.__new__(train.Trainer)
        trainer.config, trainer.hosts, trainer._next = config, Hosts(), None
        trainer.learner = types.SimpleNamespace(
            step=0, version=0, pack=taking(1.0), update=taking(2.0, {"optimizer/updates": 0.0})
        )
        trainer.engine = types.SimpleNamespace(
            sleep=waiting(4.0), wake_up=waiting(8.0), pop_metrics=taking(8.0, {"engine/restarts": 0.0})
        )
        trainer._engines = [trainer.engine]
        trainer.run_folder = types.SimpleNamespace(trajectories=taking(0.0))
        trainer.recorder = types.SimpleNamespace(phase=taking(0.0), write=lambda n, found: written.append(found))
        trainer.guards = types.SimpleNamespace(check=taking(0.0))
        trainer.alarms = types.SimpleNamespace(check=taking(16.0, ({}, [])))
        trainer.budget = types.SimpleNamespace(add=taking(0.0, {}))
        trainer.scorer = types.SimpleNamespace(during=lambda job: job)
        trainer.probe = waiting(32.0, 0.25)
        monkeypatch.setattr(train, "Stopwatch", lambda: metrics.Stopwatch(clock))
        monkeypatch.setattr(train.runs, "write_groups", taking(64.0))

        async def collect(n):
            clock.now += 128.0
            with trainer._timed("rollout"):
                clock.now += 256.0
            return Collected([], range(0), 0, [], {})

        trainer.collect = collect
        asyncio.run(trainer.step())
        seconds = {name: value for name, value in written[0].items() if name.startswith("time/")}
        assert seconds == {
            "time/rollout": 256.0,
            "time/update": 3.0,
            "time/sync": 8.0,
            "time/probe": 32.0 + 8.0,
            "time/other": 128.0 + 4.0 + 64.0 + 8.0 + 16.0,
        }
        assert written[0]["mismatch/after_max"] == 0.25

    def test_the_share_that_is_neither_sampling_nor_the_update(self, tmp_path, monkeypatch, capsys):
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        benchmark = runpy.run_path(str(ROOT / "benchmarks" / "step_overhead.py"))["main"]
        seconds = {"rollout": 5.0, "intervention": 1.0, "teacher": 2.0, "update": 1.0, "sync": 0.5, "probe": 0.25}
        line = {f"time/{phase}": value for phase, value in seconds.items()}
        monkeypatch.setattr("sys.argv", ["step_overhead.py", str(tmp_path), "--output", str(tmp_path / "result")])
        for other in ({}, {"time/other": 0.25}):
            rows = [{"step": 1, "time/sync": 99.0, **other}, {"step": 3, **line, **other}]
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            if other:
                benchmark()
            else:
                with pytest.raises(SystemExit, match="has no time/other"):
                    benchmark()
        assert capsys.readouterr().out.splitlines()[-1].endswith("| 0.250 | 10.0% |")
        written = (tmp_path / "result.md").read_text()
        assert "| 0.250 | 10.0% |" in written and "Python 3." in written and "numpy" in written


class TestOverHosts:
    def test_counts_add_up_and_shares_are_means_of_those_that_have_one(self):
        one = {"engine/restarts": 1.0, "engine/queued_seconds": 2.5, "engine/prefix_share": 0.5}
        two = {"engine/restarts": 2.0, "engine/queued_seconds": 0.5, "engine/prefix_share": 0.25}
        idle = {"engine/restarts": 0.0, "engine/queued_seconds": 0.0, "engine/prefix_share": math.nan}
        expected = {"engine/restarts": 3.0, "engine/queued_seconds": 3.0, "engine/prefix_share": 0.375}
        assert metrics.over_hosts([one, two, idle]) == expected
        assert math.isnan(metrics.over_hosts([idle])["engine/prefix_share"]) and metrics.over_hosts([one]) == one
        assert metrics.over_hosts([{}]) == {}


class TestNames:
    def test_the_page_is_the_table(self):
        text = (ROOT / "docs" / "metrics.md").read_text()
        assert text == metric_names.table(), "run: python -m rti_jax.metric_names > docs/metrics.md"

    def test_names_that_the_intervention_reports(self):
        assert metric_names.undocumented(intervention_metrics.statistics([])) == []

    def test_every_metric_name_in_the_source_is_in_the_table(self):
        groups = {name.partition("/")[0] for name in metric_names.NAMES}
        found = set()
        for path in (ROOT / "rti_jax").glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if re.fullmatch(rf"(?:{'|'.join(groups)})/[a-z_]*[a-z]", node.value):
                        found.add(node.value)
        assert len(found) > 30 and metric_names.undocumented(found) == []

    @pytest.mark.parametrize(
        ("name", "known"), [("time/rollout", True), ("rollout/pre_success_hard", True), ("x/y", False)]
    )
    def test_patterns(self, name, known):
        assert (metric_names.meaning(name) is not None) == known
        assert metric_names.undocumented(["step", name]) == ([] if known else [name])
