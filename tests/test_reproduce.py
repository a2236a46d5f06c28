"""`rti reproduce`: what it plans, how it plays, what it writes; and two arms for real."""

import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from rti_jax import claims, environments, reproduce, study, study_crew, study_report, study_results, study_worker
from rti_jax.budget import Budget
from rti_jax.config import Config, ConfigError, StopConfig, load_config
from rti_jax.engine import GenerateRequest, GenerateResult
from rti_jax.engine_errors import StaleVersionError
from tests import study_stand_in

ROOT = pathlib.Path(__file__).parents[1]
MINIATURE = ROOT / "configs" / "miniature"
EVALUATION = {"test": 2, "regions": 1}


def make_folder(folder, *arms, plan="seeds: [0, 1]\nevaluation: {test: 60, ood: 60}\n"):
    """A folder of arms that share a base of four steps."""
    folder.mkdir()
    (folder / "_base.yaml").write_text("steps: 4\neval: {every: 2}\n")
    for arm in arms:
        own = "steps: 0\n" if arm == "start" else ""
        (folder / f"{arm}.yaml").write_text(f"inherits: _base.yaml\nname: {arm}\n{own}")
    (folder / "_reproduce.yaml").write_text(plan)
    return folder


@pytest.fixture
def stand_in(monkeypatch):
    """Workers that write results at once."""
    monkeypatch.setattr(study_crew, "WORKER", (sys.executable, "-m", "tests.study_stand_in"))
    monkeypatch.setattr(study_crew, "POLL_SECONDS", 0.05)
    monkeypatch.chdir(ROOT)


class TestTheMiniature:
    """configs/miniature, as it is checked in."""

    plan = study.load(MINIATURE, output=pathlib.Path("nowhere"))

    def test_arms_differ_from_rti_in_their_own_keys_alone(self):
        own = {
            "grpo": {"rti.enabled"},
            "start": {"rti.enabled", "steps", "eval.roles"},
            "teacher": {"rti.enabled", "steps", "eval.roles", "model.path"},
            "no_post_check": {"rti.post_check"},
            "no_gate": {"gate.delta"},
            "no_reweighting": {"reweight.enabled"},
            "no_leak_guard": {"rti.leak_guard"},
            "leakage_allowed": {"rti.conceal", "rti.leak_guard", "rti.verify_leaks"},
            "opd": {"rti.enabled", "loss.baseline", "loss.teacher.path", "loss.aggregation"},
            "stronger_model": {f"rti.roles.{role}.model" for role in ("validator", "corrector", "verifier")},
            "dapo": {"rti.enabled", "loss.variant", "loss.clip_high", "rollout.max_rounds"},
            "dr_grpo": {"rti.enabled", "loss.variant"},
            "gspo": {"rti.enabled", "loss.variant"},
            **{f"delta_{d}": {"gate.delta"} for d in ("0", "1_3", "3", "20")},
        }
        configs = {j.arm: j.config for j in self.plan.jobs if j.seed == 0}
        assert {*own, "rti"} <= configs.keys()
        for arm, keys in own.items():
            found = study.config_diff.differences(configs["rti"], configs[arm])
            assert {d.key for d in found} - {"name"} == keys, arm

    def test_rti_is_the_papers(self):
        rti = next(j.config for j in self.plan.jobs if j.arm == "rti")
        assert rti.rti.enabled and rti.rti.post_check and rti.rti.leak_guard and rti.rti.conceal
        assert rti.gate.delta == 5.0 and rti.reweight.enabled and rti.loss.variant == "grpo"
        assert (rti.rollout.group_size, rti.loss.clip_low, rti.sampling.temperature, rti.eval.trials) == (
            8,
            0.2,
            0.8,
            4,
        )

    def test_every_arm_that_a_claim_names_is_there(self):
        named, empty = set(), study_results.Results([])
        for claim in claims.CLAIMS:
            named |= set(re.findall(r"\w+", claims.judge(claim, empty).remark.removeprefix("not run:")))
        absent = named - set(self.plan.arms)
        assert absent == set(), absent

    def test_core_arms_have_three_seeds_and_the_same_tasks(self):
        seeds = {arm: [j.seed for j in self.plan.jobs if j.arm == arm] for arm in self.plan.arms}
        for arm in ("start", "grpo", "rti", "no_post_check", "no_gate", "no_reweighting"):
            assert seeds[arm] == [0, 1, 2]
        assert seeds["delta_3"] == [0]
        assert [j.arm for j in self.plan.jobs][:3] == ["start", "grpo", "rti"], "the first seed of all arms comes first"
        assert len({json.dumps(j.evaluation) for j in self.plan.jobs}) == 1

    def test_what_is_evaluated_is_not_trained(self):
        source = environments.environment_source(self.plan.jobs[0].config.env)
        trained = source.tasks("train")
        for split, limit in self.plan.plan.evaluation.items():
            study_worker_tasks = source.tasks(split)
            assert sum(t.kind == "hard" for t in study_worker_tasks) >= limit
            assert {t.id for t in trained}.isdisjoint(t.id for t in study_worker_tasks)

    def test_the_teacher_that_arms_name_is_what_is_prepared(self):
        from rti_jax.sft import SFTConfig

        [(model, source)] = self.plan.plan.prepare.items()
        made = load_config(ROOT / source, schema=SFTConfig)
        assert str(made.run_dir / "export") == model and made.model.path == self.plan.jobs[0].config.model.path
        configs = {j.arm: j.config for j in self.plan.jobs}
        assert configs["luffy"].loss.teacher.path == configs["opd"].loss.teacher.path == model
        assert configs["teacher"].model.path == model
        assert {r.model for _, r in configs["stronger_model"].rti.roles} == {model}

    def test_charts_can_tell_their_arms_apart(self):
        for arms in self.plan.plan.charts.values():
            assert len(arms) <= 6 and set(arms) <= set(self.plan.arms)

    def test_quick_is_small_and_leaves_the_start_untrained(self):
        quick = study.load(MINIATURE, quick=True)
        assert quick.output.name == "reproduce_miniature_quick" and {"rti", "grpo"} <= set(quick.arms)
        steps = {j.arm: j.config.steps for j in quick.jobs}
        assert steps["start"] == 0 and 0 < steps["rti"] == steps["grpo"] < 6


class TestPlanning:
    def test_mistakes_are_said_before_anything_runs(self, tmp_path):
        folder = make_folder(tmp_path / "arms", "rti", "grpo")
        with pytest.raises(ConfigError, match="no arm 'gppo'; did you mean grpo"):
            study.load(folder, arms=["gppo"])
        with pytest.raises(ConfigError, match="is no folder"):
            study.load(tmp_path / "nothing")
        (folder / "bad.yaml").write_text("inherits: _base.yaml\nname: bad\nstepps: 3\n")
        with pytest.raises(ConfigError, match="bad.yaml: unknown key stepps"):
            study.load(folder)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="has no arm"):
            study.load(tmp_path / "empty")

    def test_an_unknown_key_or_arm_of_the_plan(self, tmp_path):
        folder = make_folder(tmp_path / "arms", "rti", plan="seads: [0]\n")
        with pytest.raises(ConfigError, match="seads"):
            study.load(folder)
        (folder / "_reproduce.yaml").write_text("first_seed_only: [delta]\n")
        with pytest.raises(ConfigError, match="no arm 'delta'"):
            study.load(folder)

    def test_overrides_are_for_all_arms_but_an_arms_own_keys(self, tmp_path):
        found = study.load(make_folder(tmp_path / "arms", "rti", "start"), overrides=["steps=7", "optimizer.lr=1e-3"])
        assert {(j.arm, j.config.steps, j.config.optimizer.lr) for j in found.jobs} == {
            ("rti", 7, 1e-3),
            ("start", 0, 1e-3),
        }

    def test_runs_with_other_settings_are_not_mixed_in(self, tmp_path):
        folder, output = make_folder(tmp_path / "arms", "rti"), tmp_path / "out"
        study_stand_in.finish(study.load(folder, output=output, seeds=[0]))
        with pytest.raises(ConfigError, match=r"other settings.*\n  rti_seed0: gate.delta: 5"):
            study.load(folder, output=output, overrides=["gate.delta=3"])
        study.load(folder, output=output, overrides=["checkpoint.every=3"])

    def test_another_evaluation_is_not_done(self, tmp_path):
        folder, output = make_folder(tmp_path / "arms", "rti"), tmp_path / "out"
        study_stand_in.finish(study.load(folder, output=output, seeds=[0]))
        assert [j.done for j in study.load(folder, output=output).jobs] == [True, False]
        (folder / "_reproduce.yaml").write_text("seeds: [0, 1]\nevaluation: {test: 61}\n")
        assert not any(j.done for j in study.load(folder, output=output).jobs)


class TestPlaying:
    def test_everything_is_written(self, tmp_path, stand_in, capsys):
        folder, output = make_folder(tmp_path / "arms", "rti", "grpo", "start"), tmp_path / "out"
        page = tmp_path / "docs" / "page.md"
        page.parent.mkdir()
        assert reproduce.main(folder, output=output, write=page, command="rti reproduce arms") == 0
        data = json.loads((output / "results.json").read_text())
        assert data["arms"].keys() == {"rti", "grpo", "start"} and data["arms"]["rti"]["seeds"] == [0, 1]
        assert data["scores"]["all"]["rti"]["pass@1"]["mean"] == pytest.approx(0.8)
        assert data["differences"]["arms"]["grpo"]["all"]["pass@1"]["mean"] == pytest.approx(-0.4)
        verdicts = {c["id"]: c["verdict"] for c in data["claims"]}
        assert verdicts["rti_over_grpo"] == claims.HOLDS and verdicts["rti_over_opd"] == claims.NOT_RUN
        text = page.read_text()
        assert "RTI solves more than GRPO: holds." in text and "`rti reproduce arms`" in text
        assert f"Python {sys.version.split()[0]}" in text and str(tmp_path) not in text
        for image in re.findall(r"\]\((\S+\.svg)\)", text):
            assert (page.parent / image).read_text().startswith("<svg")
        assert re.search(r"\| rti \| 5 \| 32 \| 8 \|", text), "the gate: 4 steps, 3 admitted and 1 rejected, two seeds"
        assert "a quick check" not in text and "group_success" in text and "holds" in (output / "claims.md").read_text()
        html.parser.HTMLParser().feed((output / "report.html").read_text())
        assert "RTI solves more than GRPO" in capsys.readouterr().out

    def test_an_arm_that_fails_leaves_the_others(self, tmp_path, stand_in, capsys):
        folder, output = make_folder(tmp_path / "arms", "rti", "broken", "dies", "grpo"), tmp_path / "out"
        assert reproduce.main(folder, output=output, jobs=1, seeds=[0]) == 1
        data = json.loads((output / "results.json").read_text())
        assert data["arms"].keys() == {"rti", "grpo"} and data["unfinished"] == ["broken_seed0", "dies_seed0"]
        assert data["errors"]["broken_seed0"] == "ConfigError: no such teacher"
        assert "exit code 3" in data["errors"]["dies_seed0"]
        assert "failed: broken_seed0" in capsys.readouterr().out
        assert "FAILED" in (output / "log.txt").read_text()

    def test_what_is_finished_is_not_played_again(self, tmp_path, stand_in):
        folder, output = make_folder(tmp_path / "arms", "rti", "grpo"), tmp_path / "out"
        study_stand_in.finish(study.load(folder, output=output, arms=["rti"], seeds=[0]))
        before = (output / "rti_seed0" / "evals" / "final.json").stat().st_mtime_ns
        reproduce.main(folder, output=output, seeds=[0], command="rti reproduce arms")
        assert (output / "rti_seed0" / "evals" / "final.json").stat().st_mtime_ns == before
        reproduce.main(folder, output=output, seeds=[0], command="a look", table_only=True)
        assert json.loads((output / "results.json").read_text())["how"]["command"] == "rti reproduce arms"
        assert "2 runs (2 arms), 1 finished before" in (output / "log.txt").read_text()

    def test_table_only_plays_nothing(self, tmp_path, stand_in):
        folder, output = make_folder(tmp_path / "arms", "rti"), tmp_path / "out"
        assert reproduce.main(folder, output=output, table_only=True) == 0
        assert (output / "table.md").read_text() == "No run is finished.\n"
        assert not (output / "rti_seed0").exists()

    def test_an_interruption_ends_the_workers(self, tmp_path, stand_in):
        folder = make_folder(tmp_path / "arms", "rti", "sleeps", plan="order: [rti]\nevaluation: {test: 60, ood: 60}\n")
        found = study.load(folder, output=tmp_path / "out", seeds=[0])
        found.output.mkdir()
        crew = study_crew.Crew(found.jobs, 1, found.output, study_crew.Log(tmp_path / "log"), pinned=False)
        study_crew.END_SECONDS, before = 0.2, study_crew.END_SECONDS  # a real worker ends when its input closes

        def interrupted():
            raise KeyboardInterrupt

        try:
            with pytest.raises(KeyboardInterrupt):
                crew.run(interrupted)
        finally:
            study_crew.END_SECONDS = before
        for process in crew._processes:
            assert process.wait(10) is not None
        assert found.jobs[0].done and not found.jobs[1].done

    def test_two_commands_do_not_share_a_folder(self, tmp_path):
        with (
            reproduce._locked(tmp_path),
            pytest.raises(ConfigError, match="another process"),
            reproduce._locked(tmp_path),
        ):
            pass

    def test_notes_are_printed_and_must_name_a_claim(self, tmp_path, capsys):
        folder, output = make_folder(tmp_path / "arms", "rti", "grpo"), tmp_path / "out"
        (folder / "_notes.yaml").write_text("rti_over_grpo: Since the roles see the evidence.\n")
        study_stand_in.finish(study.load(folder, output=output, seeds=[0]))
        reproduce.main(folder, output=output, seeds=[0])
        assert "- Since the roles see the evidence." in capsys.readouterr().out
        (folder / "_notes.yaml").write_text("rti_over_grop: oh\n")
        with pytest.raises(ConfigError, match="rti_over_grop is no claim"):
            reproduce.main(folder, output=output, table_only=True)


def test_runs_on_other_tasks_are_refused(tmp_path):
    folder, output = make_folder(tmp_path / "arms", "rti", "grpo"), tmp_path / "out"
    study_stand_in.finish(study.load(folder, output=output, seeds=[0]))
    path = output / "grpo_seed0" / "evals" / "final.json"
    data = json.loads(path.read_text())
    data["splits"]["test"]["tasks"][0]["task"] = "test/999"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="other tasks"):
        study_results.read(study.load(folder, output=output, seeds=[0]).jobs)


def test_markdown_cells_cannot_break_a_table():
    assert study_report.markdown(["a|b"], [["c"]]) == ["| a\\|b |", "| :--- |", "| c |"]


def test_the_page_has_real_tables_and_escapes_all_text():
    table = "\n".join(study_report.markdown(["arm", "score"], [["<script>x</script>", 1]]))
    page = study_report.page("<b>", {"tables": table}, {})
    assert "<table>" in page and '<td style="text-align:right">1</td>' in page
    assert "<script>" not in page and "&lt;script&gt;x" in page and "<b>" not in page


def test_a_run_that_a_budget_ended_early_is_not_evaluated_as_done():
    import asyncio

    stop = StopConfig(tokens=500)
    spent = Budget(stop, [{"step": n, "rollout/policy_tokens": 250.0} for n in (1, 2)])
    learner = types.SimpleNamespace(step=2)
    trainer = types.SimpleNamespace(config=Config(steps=4, stop=stop), learner=learner, budget=spent)
    with pytest.raises(ConfigError, match=r"^stop.tokens=500 \(500 tokens were sampled\) ended it after step 2 of 4"):
        asyncio.run(study_worker.evaluate_finally(trainer, {}, None))
    learner.step = 4  # the budget was used up by the last step
    assert asyncio.run(study_worker.evaluate_finally(trainer, {}, None))["step"] == 4


class _Engine:
    """Counts versions as a real one does."""

    version = 7

    async def generate(self, request):
        return GenerateResult((1,), (-0.1,), "stop", self.version)

    async def update_weights(self, tensors, version):
        if version <= self.version:
            raise StaleVersionError(f"{version} after {self.version}")
        self.version = version
        return version

    def pop_metrics(self):
        return {"engine/restarts": 0.0}


async def _session():
    from rti_jax.engine_session import EngineSession

    engine, request = _Engine(), GenerateRequest((1,), 1, 1.0, 0, ())
    session = await EngineSession.begin(engine, [])
    seen = [session.version, (await session.generate(request)).policy_version]
    seen += [await session.update_weights([], 5), session.version, (await session.generate(request)).policy_version]
    assert session.pop_metrics() == engine.pop_metrics()
    await session.close()
    again = await EngineSession.begin(engine, [])
    return seen, again.version, engine.version


def test_each_run_counts_an_engines_versions_from_its_own_start():
    import asyncio

    assert asyncio.run(_session()) == ([0, 0, 5, 5, 5], 0, 14)


@pytest.mark.exhaustive
def test_two_arms_on_one_engine(tmp_path):
    """The real thing, tiny: both arms start from the model's weights, and the tables are there."""
    small = ["steps=1", "rollout.groups_per_step=6", "rollout.group_size=4", "eval.limit=4"]
    spoiled = ["optimizer.lr=0.03", "batch.buckets=[512]"]  # a run that starts from such weights would show it
    folder = tmp_path / "arms"
    folder.mkdir()
    base = (MINIATURE / "_base.yaml").read_text()
    (folder / "_base.yaml").write_text(base)
    for arm in ("grpo", "start"):
        (folder / f"{arm}.yaml").write_text((MINIATURE / f"{arm}.yaml").read_text().replace("roles: 25", "roles: 0"))
    (folder / "_reproduce.yaml").write_text(f"seeds: [0]\nevaluation: {json.dumps(EVALUATION)}\n")
    command = [sys.executable, "-m", "rti_jax.cli", "reproduce", folder, "--jobs", "1", "--output", tmp_path / "out"]
    environment = {**os.environ, "RTI_NO_LAUNCHER": "1"}
    done = subprocess.run(
        [*command, *small, *spoiled], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out" / "workers.log").read_text()
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["arms"].keys() == {"grpo", "start"} and not data["unfinished"]
    assert data["arms"]["grpo"]["sums"]["updates"] == "1"
    before = [
        json.loads((tmp_path / "out" / a / "evals/step_000000.json").read_text()) for a in ("grpo_seed0", "start_seed0")
    ]
    assert before[0]["tasks"] == before[1]["tasks"], "the second run starts from the first one's weights"
    assert "not run" in done.stdout and (tmp_path / "out" / "grpo_seed0" / "export" / "config.json").is_file()
