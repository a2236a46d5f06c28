"""Hard subsets: by hand; errors, unstable graders and families left out; interrupted and gone on with; used."""

import json

import pytest

from envs.base import Environment, JudgeError, Observation, Outcome, StepResult, Task
from rti_jax import chat, select, task_sets
from rti_jax.config import ConfigError
from rti_jax.engine_errors import EngineDiedError
from rti_jax.environments import environment_source
from tests.fakes import tiny_chat
from tests.test_endpoint_policy import make_config, says, serve, tool  # noqa: F401 - serve is a fixture
from tests.test_eval_play import Bench


class Zoo(Environment):
    """Tasks by name: what the last turn must say to win is in `data`; grades can be unsteady."""

    graded: dict[str, int] = {}  # of a task

    @classmethod
    def tasks(cls, config, split):
        names = ("easy", "never", "never_zh", "rare", "moody", "error", "calls")
        return [Task(f"{split}/{name}", data={"name": name}) for name in names]

    @classmethod
    def family(cls, config, task):
        return task.id.removesuffix("_zh")

    async def reset(self, task):
        self.name, self.said = task.data["name"], []
        return Observation([{"role": "user", "content": f"Task {self.name}."}], [])

    async def step(self, turn):
        self.said.append(turn)
        error = next((c.error for c in turn.tool_calls if c.error), None)
        return StepResult([{"role": "user", "content": error or "Go on."}], done=len(self.said) == 2)

    async def score(self):
        n = self.graded[self.name] = self.graded.get(self.name, 0) + 1
        if self.name == "error" and n == 1:
            raise JudgeError("no verdict")
        if self.name == "moody" and n > 2:  # two attempts lose, then the same turns win
            return Outcome("success", 1.0)
        if self.name == "calls" and not any(c.error for t in self.said for c in t.tool_calls):
            return Outcome("success", 1.0)  # a replay that loses the malformed call would win
        won = self.said[-1].content == "win"
        return Outcome("success" if won else "failure", float(won))

    def evidence(self):
        raise AssertionError("nobody asks")


def policy(body):
    """Wins `easy` always and `rare` in one attempt of its two; writes what is no JSON in `calls`."""
    name = body["messages"][0]["content"].removeprefix("Task ").removesuffix(".")
    if name == "calls":
        return says("", tool("look", '{"name": '))
    first = body["seed"] in policy.first
    return says("win" if name == "easy" or (name == "rare" and first) else "lose")


@pytest.fixture
def zoo(serve, tmp_path):  # noqa: F811
    """A function that selects in a folder; its endpoint's server in `.server`."""
    Zoo.graded = {}
    server = serve(policy)
    config = make_config(server, env={"name": f"{__name__}:Zoo", "max_turns": 3, "split": "train"}, seed=7)
    tasks = task_sets.TaskSet({"train": Zoo.tasks(None, "train")})
    policy.first = {s.seed_of(1, "policy") for _, s in tasks.seats(7, 2, "select") if s.member == 0}

    def run(code=0, **keys):
        output = tmp_path / "hard.txt"
        assert select.main(config, output, **{"attempts": 2} | keys) == code
        return json.loads(output.with_suffix(".json").read_text())

    run.server, run.config, run.list = server, config, tmp_path / "hard.txt"
    return run


def reasons(result):
    return {r["task"].removeprefix("train/"): r["left_out"] for r in result["tasks"]}


def test_hard_runnable_stable_and_one_of_a_family(zoo, capsys):
    result = zoo()
    assert reasons(result) == {
        "easy": select.SOLVED,
        "never": "",
        "never_zh": select.FAMILY,
        "rare": select.SOLVED,
        "moody": select.UNSTABLE,
        "error": select.ERRORS,
        "calls": "",
    }
    text = zoo.list.read_text().splitlines()
    assert [line for line in text if not line.startswith("#")] == ["train/calls", "train/never"]
    assert text[0] == "# 2 of 7 tasks of train, won at most 0 times in 2 attempts"
    assert text[1].startswith("# by reference, temperature 0.5, seed 7") and result["chosen"][0] == "train/calls"
    assert "1 tasks had errors; the same command plays those attempts again" in capsys.readouterr().out
    assert Zoo.graded["easy"] == 2 and Zoo.graded["never"] == 4  # only hard ones are graded again


def test_max_solved(zoo):
    result = zoo(max_solved=1)
    assert reasons(result)["rare"] == "" and reasons(result)["easy"] == select.SOLVED
    assert next(r["c"] for r in result["tasks"] if r["task"] == "train/rare") == 1


def test_the_same_command_plays_only_what_ended_in_errors(zoo):
    zoo()
    before = len(zoo.server.bodies)
    assert "train/error" in zoo()["chosen"]
    assert len(zoo.server.bodies) - before == 2  # the one attempt that had no verdict, of two turns
    grades = dict(Zoo.graded)
    zoo()
    assert Zoo.graded == grades  # nothing is graded a third time
    zoo(restart=True)
    assert Zoo.graded["never"] == grades["never"] + 4


def test_without_grading_again(zoo):
    assert reasons(zoo(stable=False))["moody"] == "" and "grades were not checked" in zoo.list.read_text()


def test_an_unsteady_judge_is_found(zoo, monkeypatch):
    async def score(self):
        Zoo.graded[self.name] = Zoo.graded.get(self.name, 0) + 1
        if Zoo.graded[self.name] > 2:
            raise JudgeError("no verdict")
        return Outcome("failure", 0.0)

    monkeypatch.setattr(Zoo, "score", score)
    assert set(reasons(zoo(code=1)).values()) == {select.ERRORS}
    assert not zoo.list.exists()


def test_the_list_is_used(zoo):
    zoo()
    config = make_config(zoo.server, env={"name": f"{__name__}:Zoo"}, rollout={"tasks": str(zoo.list)})
    chosen = task_sets.trained(environment_source(config.env), config)
    assert [t.id for t in chosen] == ["train/never", "train/calls"]


def test_a_policy_of_token_ids_is_graded_again_too(tmp_path, monkeypatch):
    """Lookup's episodes, whose malformed call must be read again from the ids that were sampled."""
    bench = Bench(tmp_path, monkeypatch)
    prompts = []

    def clumsy(_, request):
        prompts.append(request)
        return '<tool_call>\n{"a":1\n</tool_call>' if len(prompts) % 2 else "Hello?"

    monkeypatch.setattr(chat.Chat, "from_folder", classmethod(lambda *a, **k: tiny_chat()))
    bench.answer = clumsy
    output = tmp_path / "hard.txt"
    assert select.main(bench.config(), output, attempts=2) == 0
    result = json.loads(output.with_suffix(".json").read_text())
    assert result["chosen"] == [f"train/{i}" for i in range(9)] and result["left_out"] == {}
    first = [json.loads(line) for line in (tmp_path / "hard.jsonl").read_text().splitlines()]
    again = {line["id"]: line for line in map(json.loads, (tmp_path / "hard.regrades.jsonl").read_text().splitlines())}
    for line in first:
        said = [m["content"] for m in line["messages"] if m["role"] != "assistant"]
        assert said == [m["content"] for m in again[line["id"]]["messages"] if m["role"] != "assistant"]
    bench.answer = lambda *_: EngineDiedError("not needed")
    assert select.main(bench.config(), output, attempts=2) == 0


def test_mistakes_are_one_line(zoo, tmp_path):
    with pytest.raises(ConfigError, match="--max-solved 2: expected 0 to 1 of --attempts"):
        zoo(max_solved=2)
    with pytest.raises(ConfigError, match="--output .*ends in .txt"):
        select.main(zoo.config, tmp_path / "hard.json")
    zoo()
    with pytest.raises(ConfigError, match="tasks: 7 -> 1"):
        zoo(limit=1)
