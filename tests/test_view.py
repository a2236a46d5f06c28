"""The viewer: what it shows of groups, interventions and two runs, what it refuses, and that no text is markup."""

import html.parser
import json
import math
import pathlib
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rti_jax import cli, recorded, runs, view, view_page
from rti_jax import config as config_lib
from rti_jax.config import ConfigError
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
from tests.fakes import tiny_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
EVIL = "</script></style></div><script>document.title='x'</script><img src=x onerror=alert(1)>\"'&amp;"
LOG = math.log
TOKENIZER = tiny_tokenizer()


def ids(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def turn(name, text, correction=None, logprobs=None):
    response = ids(text)
    return Turn(name, ids("hello"), response, tuple(logprobs or [0.0] * len(response)), "stop", 3, correction)


def episode(group, member, text="hello", status=Status.FAILURE, task="train/1", correction=None, user="Go!", tool="ok"):
    name = f"{group}/{member}"
    messages = (
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": user},
        {"role": "assistant", "content": text},
        {"role": "tool", "name": "look", "content": tool},
    )
    reward = float(status is Status.SUCCESS) if status.valid else None
    turns = (turn(f"{name}/0", text, correction),)
    return Trajectory(name, group, member, task, turns, status, reward, messages, {"reason": f"because of {name}"})


def plain_group(name="g0", task="train/1", statuses=(Status.SUCCESS, Status.FAILURE), **keys):
    return Group(name, task, tuple(episode(name, i, status=s, task=task, **keys) for i, s in enumerate(statuses)))


def rti_group(name="g1", task="train/2", say="why", admitted=True, text="xyz", original="xbz", **keys):
    """Two failed members, of which an intervened episode replaces the second: its first proposal leaks."""
    rollout, corrector = (LOG(0.4), LOG(0.6), LOG(0.5)), (LOG(0.6), LOG(0.4), LOG(0.5))
    pad = (LOG(0.5),) * (len(ids(text)) - 3)
    scored = (rollout + pad, corrector + pad) if admitted else (None, None)
    correction = Correction(ids(original), *scored)
    status = Status.SUCCESS if admitted else Status.FAILURE
    new = episode(name, -1, text, status, task, correction, **keys)
    proposals = (
        Proposal(
            ids("hello EVIDENCE"), ids("leaky"), f"leaky {say}", RejectReason.LEAK, f"verdict {say}", f"value {say}"
        ),
        Proposal(ids("hello EVIDENCE"), ids(text), text, None, "accept it", wins=True),
    )
    record = Intervention(f"{name}/-1/0", f"words {say}", True, True, say, original, proposals, valid=False)
    reason, perplexities = ("admitted", (2.01,)) if admitted else ("failed", ())
    attempt = IntervenedRollout(new, (record,), GateDecision(admitted, reason, perplexities))
    failed = [episode(name, i, task=task, **keys) for i in range(2)]
    members = (failed[0], new) if admitted else tuple(failed)
    return Group(name, task, members, (attempt,), failed[1] if admitted else None)


def make_run(folder, steps, tokenizer=True, **keys):
    """A run folder with these groups by step; advantages are made up from the members' numbers."""
    (folder / "trajectories").mkdir(parents=True)
    (folder / "evals").mkdir()
    model = folder.parent / "model"
    if tokenizer:
        TOKENIZER.save_pretrained(model)
    keys = {"name": folder.name, "model": {"path": str(model)}} | keys
    config_lib.save_resolved(config_lib.Config(**keys), folder / "config.yaml")
    for step, groups in steps.items():
        members = [t for g in groups for t in g.trajectories]
        advantages = {t.id: 2.6458 if t.success else -0.378 for t in members}
        runs.write_groups(runs.Run(folder).trajectories(step), groups, advantages)
    return folder


class Page(html.parser.HTMLParser):
    """Checks that elements are closed in order; collects tags, attributes, text, and text by class."""

    VOID = ("meta", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.texts, self.marked = [], [], [], [], []
        self.feed(text)
        assert self.open == []
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class") or "", dict(attrs).get("title") or ""))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open:
            self.marked.append((*self.open[-1], data))

    def of(self, css):
        """Texts directly inside elements that have this class."""
        return [text for _, classes, _, text in self.marked if css in classes.split()]


def page(*args, **kwargs):
    return Page(view.main(*args, **kwargs).path.read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "rti", {1: [plain_group(), rti_group()], 2: [plain_group()]})


def test_records_come_back_as_they_were_written(tmp_path):
    groups = [plain_group(), rti_group(), rti_group("g2", admitted=False)]
    path = tmp_path / "t.jsonl"
    runs.write_groups(path, groups, {"g0/0": 1.5})
    assert recorded.read_groups(path) == (groups, {"g0/0": 1.5}, [])


class TestGroups:
    def test_members_stand_side_by_side_with_outcome_and_advantage(self, tmp_path):
        statuses = (Status.SUCCESS, *[Status.FAILURE] * 5, Status.TRUNCATED, Status.USER_ERROR)
        group = plain_group(statuses=statuses)
        shown = page(make_run(tmp_path / "r", {7: [group]}))
        assert shown.of("advantage") == ["A +2.65", *["A −0.38"] * 7]
        assert shown.of("mark") == ["✓", *["✗"] * 5, "…", "!"]
        assert shown.text.count("Be good.") == 1  # what all begin with stands once
        assert "1/8" in shown.of("tally") and "because of g0/6" in shown.text
        assert "1 groups, 1 of 8 episodes succeeded" in shown.text

    def test_openings_that_differ_stand_in_each_episode(self, tmp_path):
        group = Group("g", "t", (episode("g", 0, user="one"), episode("g", 1, user="two")))
        shown = page(make_run(tmp_path / "r", {1: [group]}))
        assert shown.text.count("Be good.") == 1 and "one" in shown.of("text") and "two" in shown.of("text")

    def test_unsure_tokens_have_the_probability_they_were_sampled_with(self, tmp_path):
        sampled = episode("g", 0, "abc")
        turns = (turn("g/0/0", "abc", logprobs=(LOG(0.99), LOG(0.4), LOG(0.05))),)
        sampled = Trajectory(**{**vars(sampled), "turns": turns})
        shown = page(make_run(tmp_path / "r", {1: [Group("g", "t", (sampled,))]}))
        titles = {text: (css, title) for _, css, title, text in shown.marked if "sampled with" in title}
        assert titles == {"b": ("p p2", "sampled with probability 0.4"), "c": ("p p3", "sampled with probability 0.05")}

    def test_a_dialogue_that_the_environment_opens(self, tmp_path):
        """An assistant message that nobody sampled is no turn: turns are matched from the end."""
        first = episode("g", 0, "xyz")
        messages = ({"role": "assistant", "content": "Welcome!"}, *first.messages)
        shown = page(
            make_run(tmp_path / "r", {1: [Group("g", "t", (Trajectory(**vars(first) | {"messages": messages}),))]})
        )
        assert "Welcome!" in shown.of("text") and shown.of("count") == ["3 tokens"] and "xyz" in shown.of("text")

    def test_a_character_of_several_tokens_stays_whole(self, tmp_path):
        shown = page(make_run(tmp_path / "r", {1: [Group("g", "t", (episode("g", 0, "né 東京"),))]}))
        assert len(ids("né 東京")) > 5 and "né 東京" in shown.of("text")

    def test_calls_are_readable_without_a_tokenizer(self, tmp_path):
        call = {"type": "function", "id": "1", "function": {"name": "go", "arguments": {"to": "Köln"}}}
        first = episode("g", 0)
        messages = (*first.messages[:2], {"role": "assistant", "content": "", "tool_calls": [call]})
        group = Group("g", "t", (Trajectory(**vars(first) | {"messages": messages}),))
        shown = page(make_run(tmp_path / "r", {1: [group]}, tokenizer=False))
        assert 'go({"to": "Köln"})' in shown.of("text")


class TestInterventions:
    def test_before_after_reason_verdict_and_perplexity(self, run):
        shown = page(run, step=1, intervened=True)
        assert "b" in shown.of("gone") and "y" in shown.of("new")
        assert "validator: invalid" in shown.of("verdict") and "in truth invalid" in shown.of("truth")
        for said in (
            "why",
            "words why",
            "accept it",
            "verdict why",
            "verifier: reveals privileged information: value why",
        ):
            assert said in shown.text
        assert "2.03 < 5 (gate) ✓" in shown.text  # of .4, .6 and .5, the geometric mean
        assert "admitted in place of member 1; perplexity of corrected turns 2.01, gate below 5" in shown.text
        assert "replaced by the intervened episode" in shown.text and " EVIDENCE" in shown.of("text")

    def test_rejected_proposals_stand_beside_accepted_ones(self, run):
        text = page(run, step=1, intervened=True).text
        before, rejected, accepted = (text.index(t) for t in ("before:", "proposal 1: leak", "proposal 2: accepted"))
        assert before < rejected < accepted

    def test_tokens_are_coloured_by_weight(self, run):
        """p_corr .6 over p_roll .4 is 1.5, clipped to 1.2; the other way round 0.8; equal probabilities weigh 1."""
        shown = page(run, step=1, intervened=True)
        tokens = {text: (css, title) for _, css, title, text in shown.marked if title.startswith("weight")}
        assert {text: css for text, (css, _) in tokens.items()} == {"x": "w up3", "y": "w down3 new", "z": "w "}
        assert tokens["x"][1] == ("weight 1.200 (ratio 1.5); probability 0.6 as corrector, 0.4 as policy; copied")
        assert tokens["y"][1].startswith("weight 0.800 (ratio 0.667)")
        assert "clipped to [0.80, 1.20]" in shown.text

    def test_the_runs_own_limits_are_used(self, tmp_path):
        keys = {"reweight": {"epsilon_cal": 0.6, "enabled": False}, "gate": {"delta": 1.5}}
        shown = page(make_run(tmp_path / "r", {1: [rti_group()]}, **keys))
        assert "2.03 ≥ 1.5 (gate) ✗" in shown.text and "reweighting is off in this run" in shown.text
        assert any(title.startswith("weight 1.500 (ratio 1.5)") for _, _, title, _ in shown.marked)

    def test_an_unscored_attempt_is_no_member(self, tmp_path):
        shown = page(make_run(tmp_path / "r", {1: [rti_group(admitted=False)]}))
        assert "not admitted: the episode did not succeed" in shown.text and "not scored" in shown.text
        assert shown.of("tally") == ["0/2"] and shown.of("new")
        assert not any(title.startswith("weight") for _, _, title, _ in shown.marked)

    def test_without_a_tokenizer_weights_stand_on_ids(self, tmp_path):
        shown = page(make_run(tmp_path / "r", {1: [rti_group()]}, tokenizer=False))
        assert "no tokenizer.json in" in " ".join(shown.of("warning")) and "ids" in " ".join(shown.of("warning"))
        assert f"{ids('x')[0]} " in shown.of("up3") and "xyz\n" in shown.of("text")

    def test_the_exported_tokenizer_stands_in(self, tmp_path):
        run = make_run(tmp_path / "r", {1: [rti_group()]}, tokenizer=False)
        TOKENIZER.save_pretrained(run / "export")
        shown = page(run)
        assert shown.of("warning") == [] and "x" in shown.of("up3")


class TestFilters:
    def test_outcome(self, run):
        shown = page(run, step=1, outcome="success")
        assert set(shown.of("status")) == {"success"}
        assert shown.of("tally") == ["1/2", "1/2"]  # of the group, whatever is shown of it
        assert "Only with outcome success." in shown.text

    def test_interventions_come_first_and_limit_cuts_the_others(self, run):
        assert page(run, step=1).of("task") == ["train/2", "train/1"]
        shown = page(run, step=1, limit=1)
        assert shown.of("task") == ["train/2"] and "1 more are left out" in shown.text

    def test_default_is_the_newest_step_that_has_it(self, run):
        assert view.main(run).what == "step 2, 1 of 1 groups"
        assert view.main(run, intervened=True).what == "step 1, 1 of 1 groups"
        assert view.main(run, task="train/2").what == "step 1, 1 of 1 groups"

    def test_evaluations(self, run):
        runs.write_groups(run / "evals" / "step_000004.jsonl", [plain_group(task="test/3")], {})
        assert page(run, evaluation=True).of("task") == ["test/3"]


class TestTwoRuns:
    def test_one_task_side_by_side(self, run, tmp_path):
        other = make_run(tmp_path / "grpo", {1: [plain_group(task="train/2"), plain_group("g9", "train/9")]})
        shown = page(run, other)
        assert shown.of("task") == ["train/2"]  # step 1 is the newest with a task in common
        assert shown.of("run") == ["rti", "grpo"] and len(shown.of("tally")) == 2
        assert page(run, other, intervened=True).of("run") == ["rti", "grpo"]  # the other one has no intervention

    def test_a_task_is_found_in_each_runs_newest_step(self, run, tmp_path):
        other = make_run(tmp_path / "grpo", {5: [plain_group(task="train/2")], 6: [plain_group()]})
        assert view.main(run, other, task="train/2").what == "step 1 and step 5, 1 of 1 tasks"

    def test_nothing_in_common(self, run, tmp_path):
        other = make_run(tmp_path / "grpo", {5: [plain_group(task="train/7")]})
        with pytest.raises(ConfigError, match="no step in common: .*rti has 1-2; .*grpo has 5"):
            view.main(run, other)
        third = make_run(tmp_path / "third", {2: [plain_group(task="train/7")]})
        with pytest.raises(ConfigError, match="no common task"):
            view.main(run, third, step=2)

    def test_runs_of_one_name_are_told_apart(self, run, tmp_path):
        other = make_run(tmp_path / "b" / "rti", {2: [plain_group()]})
        assert page(run, other).of("run") == [str(run), str(other)]


class TestMistakes:
    @pytest.mark.parametrize(
        ("keys", "line"),
        [
            ({"step": 9}, "has no step 9; it has 1-2"),
            ({"step": 2, "intervened": True}, "step 2: no group with an intervention"),
            ({"task": "train/22"}, "steps 1-2: no group with task train/22; tasks .*: train/1"),
            ({"outcome": "won"}, "--outcome won: expected one of success, failure, truncated"),
            ({"output": "a.yaml"}, "a.yaml: expected a name that ends in .html"),
            ({"output": "report.html"}, "is where rti report writes"),
        ],
    )
    def test_are_one_clear_line(self, run, keys, line):
        with pytest.raises(ConfigError, match=line):
            view.main(run, **keys)
        assert not (run / "view.html").exists()

    def test_no_run(self, run, tmp_path):
        with pytest.raises(ConfigError, match="does not exist; runs in .*: rti"):
            view.main(tmp_path / "nope")
        for path in (run / "trajectories").iterdir():
            path.unlink()
        with pytest.raises(ConfigError, match="nothing has been recorded yet"):
            view.main(run)

    def test_broken_lines_and_another_versions_config_are_noted(self, run):
        path = run / "trajectories" / "step_000002.jsonl"
        broken = [
            '{"id": "x", "gro',
            "[]",
            '{"id": 1}',
            json.dumps(json.loads(path.read_text().splitlines()[0]) | {"turns": 3}),
        ]
        path.write_text(path.read_text() + "\n".join(broken) + "\n")
        (run / "config.yaml").write_text("name: x\nfuture_key: 1\n")
        shown = page(run)
        notes = " ".join(shown.of("warning"))
        assert all(f"line {n} cannot be read" in notes for n in (3, 4, 5, 6)) and "future_key" in notes
        assert shown.of("tally") == ["1/2"]

    def test_ranges(self):
        assert view.ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"


class TestText:
    def evil(self, tmp_path, tokenizer=True):
        group = rti_group(f"g{EVIL}", EVIL, EVIL, text=EVIL, original=EVIL + "b", user=EVIL, tool=EVIL)
        return make_run(tmp_path / "<b>bold", {1: [group]}, tokenizer=tokenizer)

    @pytest.mark.parametrize("tokenizer", [True, False])
    def test_all_of_it_is_shown_and_none_of_it_is_markup(self, tmp_path, tokenizer):
        run = self.evil(tmp_path, tokenizer)
        (run / "evals").rmdir()
        shown = page(run)
        assert shown.tags.count("script") == 1 and shown.tags.count("style") == 1 and "img" not in shown.tags
        assert "<b>bold" in shown.of("head") + shown.texts
        outside = [a for a in shown.attributes if a[0] in ("src", "href", "style") or a[0].startswith("on")]
        assert outside == []
        (script,) = [text for tag, _, _, text in shown.marked if tag == "script"]
        assert script == (ROOT / "rti_jax" / "templates" / "view.js").read_text()
        assert EVIL in shown.of("task") and EVIL in shown.of("request")
        assert shown.text.count(EVIL) >= 10  # user, tool, replaced turn, original, reason, words, verdict, detail, ...

    def test_half_a_surrogate_pair(self, tmp_path):
        run = make_run(tmp_path / "r", {1: [plain_group()]})
        path = run / "trajectories" / "step_000001.jsonl"
        path.write_text(path.read_text().replace("Be good.", "\\ud83d good"))
        assert "? good" in page(run).of("text")

    @pytest.mark.slow
    @pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
    def test_in_a_browser_its_own_script_runs_and_no_other(self, tmp_path):
        written = view.main(self.evil(tmp_path))
        path = written.path.rename(tmp_path / "view.html")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        done = subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=120)
        assert ">1 of 1 shown<" in done.stdout and "<title>rti view" in done.stdout
        assert "CONSOLE" not in done.stderr


class TestCommand:
    def test_writes_into_the_run_and_says_so(self, run):
        done = CliRunner().invoke(cli.app, ["view", str(run), "--intervened"])
        assert done.exit_code == 0 and done.stdout == f"wrote {run / 'view.html'}: step 1, 1 of 1 groups\n"
        assert not list(run.glob(".*"))

    def test_a_mistake_is_a_line_and_exit_code_2(self, run):
        done = CliRunner().invoke(cli.app, ["view", str(run), "--step", "9"])
        assert (done.exit_code, done.stderr) == (2, f"error: {run} has no step 9; it has 1-2\n")

    def test_help_has_examples_and_the_same_limit(self):
        done = CliRunner().invoke(cli.app, ["view", "--help"])
        assert "rti view runs/quickstart" in done.output and str(view.LIMIT) in done.output

    def test_imports_nothing_heavy(self):
        heavy = {"jax", "torch", "vllm", "transformers"}
        code = f"import sys, rti_jax.view; print(sorted({heavy} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr

    def test_templates_are_installed(self):
        import tomllib

        data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["rti_jax"]
        files = list(view_page.TEMPLATES.iterdir())
        assert len(files) == 3 and all(any(f.relative_to(ROOT / "rti_jax").match(p) for p in data) for f in files)
