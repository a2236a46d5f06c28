"""Evaluations that are interrupted, repeated, changed, of several splits, of subsets; on a scripted engine."""

import asyncio
import contextlib
import csv
import io
import json

import pytest
from rich.console import Console

from rti_jax import eval_play, evaluate, policies, task_sets, view
from rti_jax.checkpoint import MARKER
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import EngineDiedError, EngineError
from rti_jax.environments import environment_source
from rti_jax.eval_setup import Identity
from rti_jax.rollout import Player
from rti_jax.seeds import derive_seed
from rti_jax.types import Status, Trajectory
from tests.fakes import FakeEngine, call, tiny_chat

LOOKUP = "tests.fakes:Lookup"


def answer(chat, request):
    """Wins about half of the episodes, by the request's seed alone; ends the process where `stop` says so."""
    if '"code": "X4711"' in chat.decode(request.prompt_ids):
        return call("answer", code="X4711" if derive_seed("win", request.seed) % 2 else "wrong")
    return call("look", name="Ada")


class Bench:
    """Evaluations in a folder, played by a scripted engine; `engines` has one for each that was started."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.engines, self.answer, self.digest = folder, [], answer, "one"

        async def identify(config, step=None):
            return Identity("model.path", config.model.path, self.digest)

        @contextlib.asynccontextmanager
        async def opened(config, source, step=None):
            chat = tiny_chat()
            engine = FakeEngine(chat, lambda request: self.answer(chat, request))
            self.engines.append(engine)
            yield Player(source, chat, engine, config)

        monkeypatch.setattr(policies, "identify", identify)
        monkeypatch.setattr(policies, "opened", opened)

    def config(self, **keys):
        evaluation = {"trials": 4, "temperature": 0.5} | keys.pop("eval", {})
        base = {
            "runs_dir": str(self.folder),
            "name": "run",
            "env": {"name": LOOKUP, "max_turns": 4},
            "model": {"path": "models/a"},
            "sampling": {"max_tokens": 200, "max_context": 8000, "thinking": False},
            "rollout": {"retries": 0, "concurrency": 3},
        }
        return Config.model_validate(base | {"eval": evaluation} | keys)

    def run(self, name="a", *, keys=None, **options):
        code = evaluate.main(self.config(**(keys or {})), output=self.folder / f"{name}.json", **options)
        assert code == 0
        return json.loads((self.folder / f"{name}.json").read_text())

    def bytes(self, name):
        return [(self.folder / f"{name}.{end}").read_bytes() for end in ("json", "jsonl")]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def stop_after(count):
    """Answers so many requests, then ends the evaluation like a crash."""
    left = [count]

    def stopping(chat, request):
        left[0] -= 1
        return EngineDiedError("gone") if left[0] < 0 else answer(chat, request)

    return stopping


class TestResume:
    def test_an_interrupted_evaluation_ends_as_an_unbroken_one_bit_for_bit(self, bench):
        whole = bench.run("whole")
        assert 0 < whole["kinds"]["all"]["pass@1"]["mean"] < 1 and len({r["c"] for r in whole["tasks"]}) > 1
        for _ in range(2):
            bench.answer = stop_after(20)
            with pytest.raises(EngineDiedError):
                bench.run("parts")
            assert not (bench.folder / "parts.json").exists()
        bench.answer = answer
        played = (bench.folder / "parts.jsonl").read_text().count("\n")
        assert 10 < played < 36  # 36 episodes of two requests each
        bench.run("parts")
        assert len(bench.engines[-1].requests) == 2 * (36 - played)
        assert bench.bytes("parts") == bench.bytes("whole")

    def test_a_line_that_was_cut_off_is_played_again(self, bench):
        bench.run("whole")
        file, expected = bench.folder / "whole.jsonl", bench.bytes("whole")
        kept = file.read_bytes().splitlines(keepends=True)[:30]
        cut = kept.pop()[:-100]
        file.write_bytes(b"".join(kept) + cut)
        bench.answer = stop_after(8)
        with pytest.raises(EngineDiedError):
            bench.run("whole")
        lines = file.read_bytes().splitlines()
        assert lines[29] == cut and len(lines) > 30 and all(map(json.loads, lines[30:]))  # nothing is written behind it
        bench.answer = answer
        bench.run("whole")
        assert len(bench.engines[-1].requests) == 2 * (37 - len(lines)) and bench.bytes("whole") == expected

    def test_a_finished_one_is_shown_again_without_an_engine(self, bench, capsys):
        first = bench.run()
        assert bench.run() == first and len(bench.engines) == 1
        assert "already" not in capsys.readouterr().err

    def test_only_excluded_episodes_are_played_again(self, bench, capsys):
        broken = [derive_seed(0, 0, "eval/0/2", member, 0, "policy") for member in (0, 1, 2)]
        bench.answer = lambda chat, r: EngineError("overloaded") if r.seed in broken else answer(chat, r)
        first = bench.run()
        assert [r["excluded"] for r in first["tasks"]] == [0, 0, 3, 0, 0, 0, 0, 0, 0]
        assert first["kinds"]["all"]["excluded"] == 3 and first["kinds"]["all"]["pass@4"]["tasks"] == 8
        assert "3 episodes are excluded (environment_error: engine: overloaded)" in capsys.readouterr().err
        bench.answer = answer
        second = bench.run()
        assert len(bench.engines[-1].requests) == 6 and second["kinds"]["all"]["excluded"] == 0
        bench.run("whole")
        assert bench.bytes("a") == bench.bytes("whole")

    def test_no_episode_at_all_is_an_error(self, bench, capsys):
        bench.answer = lambda chat, request: EngineError("overloaded")
        assert evaluate.main(bench.config(), output=bench.folder / "a.json") == 1

    def test_more_trials_add_to_what_is_there(self, bench):
        two = bench.run(keys={"eval": {"trials": 2}})
        four = bench.run()
        assert len(bench.engines[-1].requests) == 36 and four["trials"] == 4
        assert bench.run(keys={"eval": {"trials": 2}}) == two and len(bench.engines) == 2
        bench.run("whole")
        assert bench.bytes("whole")[1] == bench.bytes("a")[1]  # the file keeps them

    def test_another_process_may_not_add_to_it(self, bench):
        from rti_jax import eval_setup, eval_store

        setup = eval_setup.Setup("eval", bench.config(), Identity("model.path", "models/a", "one"), ())
        with eval_store.opened(bench.folder / "a.json", setup):
            with pytest.raises(ConfigError, match="being written by another process"):
                bench.run()


class TestChanged:
    @pytest.mark.parametrize(
        ("keys", "line"),
        [
            ({"eval": {"temperature": 0.9}}, "eval.temperature: 0.5 -> 0.9"),
            ({"seed": 1}, "seed: 0 -> 1"),
            ({"env": {"name": LOOKUP, "max_turns": 5}}, "env.max_turns: 4 -> 5"),
            ({"eval": {"split": "train"}}, "eval.split: 'test' -> 'train'"),
            ({"eval": {"limit": 1}}, "tasks: 9 -> 2, e.g. test/1"),
        ],
    )
    def test_the_key_is_named(self, bench, keys, line):
        bench.run()
        with pytest.raises(ConfigError) as error:
            bench.run(keys=keys)
        assert f"  {line}" in str(error.value).splitlines() and "--restart" in str(error.value)
        assert len(bench.engines) == 1

    def test_another_policy_is_named(self, bench):
        bench.run()
        bench.digest = "two"
        with pytest.raises(ConfigError, match="model.path: the files of models/a have changed"):
            bench.run()
        with pytest.raises(ConfigError, match="model.path: 'models/a' -> 'models/b'"):
            bench.run(keys={"model": {"path": "models/b"}})
        bench.digest = "one"
        bench.run(keys={"model": {"path": "moved/a"}, "rollout": {"retries": 0, "concurrency": 9}})
        assert len(bench.engines) == 1

    def test_restart_begins_anew(self, bench):
        bench.run()
        other = bench.run(keys={"seed": 1}, restart=True)
        assert len(bench.engines[-1].requests) == 72
        assert other == bench.run("b", keys={"seed": 1})

    def test_a_file_of_an_older_version_is_not_overwritten(self, bench):
        (bench.folder / "a.json").write_text("{}")
        with pytest.raises(ConfigError, match="nothing says what it was made with .*--restart"):
            bench.run()
        (bench.folder / "a.setup.yaml").write_text("purpose: eval\n")
        with pytest.raises(ConfigError, match="cannot be read by this version.*--restart"):
            bench.run()

    def test_a_mistake_before_the_first_episode_holds_nothing(self, bench):
        bench.answer = stop_after(0)
        with pytest.raises(EngineDiedError):
            bench.run()
        bench.answer = answer
        bench.run(keys={"seed": 1})


class TestSplits:
    BOTH = {"eval": {"splits": ["test", "train"]}}

    def test_each_split_and_their_union_in_one_table(self, bench, capsys):
        both = bench.run(keys=self.BOTH)
        said = capsys.readouterr().out
        alone = {s: bench.run(s, keys={"eval": {"split": s}}) for s in ("test", "train")}
        assert list(both["splits"]) == ["test", "train", "full"] and len(both["tasks"]) == 18
        for split, result in alone.items():
            scores = dict(both["splits"][split])
            assert scores.pop("pass^mean")["tasks"] == 9
            assert scores == result["kinds"]["all"]
        full = both["splits"]["full"]["pass@1"]["mean"]
        assert full == pytest.approx(sum(r["kinds"]["all"]["pass@1"]["mean"] for r in alone.values()) / 2)
        assert {w for w in ("test", "train", "full", "Pass@1", "Pass^4") if w in said} >= {"full", "Pass@1", "Pass^4"}

    def test_mean_of_pass_hat(self):
        rows = [{"task": "a", "n": 2, "c": 1, "excluded": 0}, {"task": "b", "n": 1, "c": 1, "excluded": 1}]
        found = evaluate.by_split(rows, task_sets.TaskSet({"x": [], "full": []}), 2, 0)
        assert list(found) == ["x", "full", "all of x+full"]
        assert evaluate._mean_pass_hat(rows, 2, 0)["pass^mean"]["mean"] == 0.25  # (1/2 + 0) / 2 of task a alone

    def test_a_task_of_two_splits_counts_once(self):
        from envs.base import Task

        a, b, c = (Task(name) for name in "abc")
        tasks = task_sets.TaskSet({"x": [a, b], "y": [b, c]})
        assert [t.id for t in tasks.tasks] == ["a", "b", "c"]
        seats = tasks.seats(0, 2, "eval")
        assert [s.id for _, s in seats] == [f"eval/0/{p}/{m}" for p in ("x/0", "x/1", "y/1") for m in (0, 1)]
        assert seats[4][1].seed_of(3, "policy") == derive_seed(0, 0, "eval/0/1", 0, 3, "policy")
        rows = [{"task": t, "n": 1, "c": t == "b", "excluded": 0} for t in "abc"]
        found = evaluate.by_split(rows, tasks, 1, 0)
        assert [found[s]["pass@1"]["mean"] for s in ("x", "y", "full")] == [0.5, 0.5, pytest.approx(1 / 3)]

    def test_the_episodes_are_those_of_an_evaluation_within_training(self, bench):
        config = bench.config()
        chat = tiny_chat()
        engine = FakeEngine(chat, lambda request: answer(chat, request))
        source = environment_source(config.env)
        player = Player(source, chat, engine, config)
        result, _ = asyncio.run(evaluate.evaluate(player, source.tasks("test"), config))
        recorded = bench.run()
        assert {k: recorded[k] for k in result} == json.loads(json.dumps(result))


class TestSubset:
    def test_only_the_listed_tasks(self, bench):
        file = bench.folder / "hard.txt"
        file.write_text("# made by hand\n\ntest/7\ntest/2\n")
        result = bench.run(keys={"eval": {"tasks": str(file)}})
        assert [r["task"] for r in result["tasks"]] == ["test/2", "test/7"]

    def test_a_byte_order_mark_is_no_part_of_the_first_id(self, bench):
        file = bench.folder / "hard.txt"
        file.write_bytes(b"\xef\xbb\xbftrain/4\n")
        config = bench.config(rollout={"tasks": str(file)})
        assert [t.id for t in task_sets.trained(environment_source(config.env), config)] == ["train/4"]
        file.write_bytes(b"\xef\xbb\xbf# a comment\ntest/2\n")
        config = bench.config(eval={"tasks": str(file)})
        assert [t.id for t in task_sets.held_out(environment_source(config.env), config)] == ["test/2"]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("test/1\ntset/2\n", "line 2: no task tset/2 in test; did you mean test/2?"),
            ("# nothing\n", "lists no task"),
            (None, "No such file or directory"),
        ],
    )
    def test_mistakes_are_one_line(self, bench, text, line):
        file = bench.folder / "hard.txt"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=line.replace("?", r"\?")) as error:
            bench.run(keys={"eval": {"tasks": str(file)}})
        assert str(error.value).startswith(f"eval.tasks={file}")

    def test_training_takes_them_too(self, bench):
        file = bench.folder / "hard.txt"
        file.write_text("train/4\n")
        config = bench.config(rollout={"tasks": str(file)}, eval={"tasks": str(file)})
        source = environment_source(config.env)
        assert [t.id for t in task_sets.trained(source, config)] == ["train/4"]
        with pytest.raises(ConfigError, match="no task train/4 in test"):
            task_sets.held_out(source, config)


class TestShown:
    def test_the_worst_tasks_come_first(self, bench, capsys):
        result = bench.run(keys={"eval": {"splits": ["test", "train"]}}, table=bench.folder / "t.csv")
        said = capsys.readouterr().out
        assert "worst 10 of 18 tasks (--per-task prints all)" in said
        rows = list(csv.DictReader((bench.folder / "t.csv").open()))
        assert [int(r["c"]) for r in rows] == sorted(r["c"] for r in result["tasks"])
        assert rows[0].keys() == {"task", "kind", "splits", "c", "n", "excluded", "turns"}
        bench.run(keys={"eval": {"splits": ["test", "train"]}}, per_task=True, table=bench.folder / "t.md")
        said = capsys.readouterr().out
        assert "--per-task" not in said and all(r["task"] in said for r in rows)
        assert (bench.folder / "t.md").read_text().splitlines()[
            0
        ] == "| task | kind | splits | c | n | excluded | turns |"

    def test_transcripts_are_a_page(self, bench):
        bench.run()
        written = view.main(bench.folder / "a.json", outcome="failure")
        text = written.path.read_text()
        assert written.path == bench.folder / "a.html" and "evaluation: 9 groups" in text and "test/3" in text
        assert view.main(bench.folder).path == written.path  # a folder with one evaluation
        bench.run("b")
        with pytest.raises(ConfigError, match="holds several evaluations, name one: a.jsonl, b.jsonl"):
            view.main(bench.folder)
        with pytest.raises(ConfigError, match="c.jsonl: there is no such file"):
            view.main(bench.folder / "c.json")

    def test_names_that_are_refused_before_anything_is_played(self, bench):
        with pytest.raises(ConfigError, match="--table .*ends in .csv or .md"):
            bench.run(table=bench.folder / "t.txt")
        with pytest.raises(ConfigError, match="--output .*ends in .json"):
            evaluate.main(bench.config(), output=bench.folder / "a")
        assert not bench.engines


class TestPolicies:
    def test_a_folder_is_known_by_its_files(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(bytes(5 << 20))

        def digest():
            config = Config.model_validate({"model": {"path": str(tmp_path)}})
            return asyncio.run(policies.identify(config)).digest

        first = digest()
        (tmp_path / "notes.txt").write_text("x")
        assert digest() == first
        weights.write_bytes(bytes((5 << 20) - 1) + b"\1")
        assert digest() != first

    def test_a_checkpoint_is_known_by_its_marker(self, tmp_path):
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        config = Config.model_validate({"runs_dir": str(tmp_path), "name": "r", "model": {"path": str(model)}})
        with pytest.raises(ConfigError, match="has no checkpoint yet"):
            policies.chosen_step(config, "newest")
        for step in (3, 12):
            (tmp_path / "r" / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "r" / "checkpoints" / "3" / MARKER).write_text("{}")
        assert policies.chosen_step(config, "newest") == 3
        assert asyncio.run(policies.identify(config, 3)).name == f"{tmp_path}/r, step 3"
        with pytest.raises(ConfigError, match=r"12: the save was interrupted .*\(there are 3\)"):
            asyncio.run(policies.identify(config, 12))

    def test_two_policies_are_refused(self):
        config = Config.model_validate({"eval": {"endpoint": {"url": "http://x/v1"}}})
        with pytest.raises(ConfigError, match="are two policies"):
            asyncio.run(policies.identify(config, 3))
        with pytest.raises(ConfigError, match="not an endpoint"):
            evaluate.main(config, roles=True)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch):
    def lines(seconds):
        monkeypatch.setattr(eval_play, "LINE_SECONDS", seconds)
        console = Console(file=io.StringIO(), width=40)
        with eval_play.Watch(total=12, missing=3, console=console) as watch:
            for status in (Status.SUCCESS, Status.FAILURE, Status.TIMEOUT):
                reward = float(status is Status.SUCCESS) if status.valid else None
                watch(Trajectory("t", "g", 0, "task", (), status, reward, replies=1))
        return console.file.getvalue().splitlines()

    assert lines(3600) == ["12 of 12 episodes, 1 of 2 won, about 0 minutes left"]
    assert [line.split(" won")[0] for line in lines(-1)] == [
        "10 of 12 episodes, 1 of 1",
        "11 of 12 episodes, 1 of 2",
        "12 of 12 episodes, 1 of 2",
    ]


def test_an_interruption_says_how_to_go_on(capsys):
    async def interrupted():
        raise KeyboardInterrupt

    assert eval_play.interruptible(interrupted()) == 130
    assert "the same command plays the episodes that are missing" in capsys.readouterr().err
