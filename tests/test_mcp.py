"""MCP servers as environments: real servers over stdio and HTTP, sound ones and each way of misbehaving."""

import asyncio
import json
import os
import pathlib
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from envs.base import AssistantTurn, CallTimeout, EnvironmentError, Task, ToolCall
from envs.mcp import MCP, MCPConfig
from envs.mcp import tasks as task_files
from rti_jax import cli, validate
from rti_jax.config import ConfigError, EnvConfig
from rti_jax.environments import EnvironmentSource, environment_source
from rti_jax.rollout import Player, Seat
from rti_jax.types import Status
from tests.fakes import FakeEngine, call, small_config, tiny_chat

pytest.importorskip("mcp", reason="the MCP SDK is not installed (extra mcp)")
SERVERS = pathlib.Path(__file__).parent / "mcp_servers"
TASKS = [
    {
        "id": "a",
        "prompt": "Put Ada's key into drawer 7.",
        "data": {"shelf": {"7": "Ada's key"}},
        "gold": [{"name": "put", "arguments": {"key": "7", "value": "Ada's key"}}],
        "answer": "It is in drawer 7.",
    },
    {
        "id": "b",
        "prompt": "Put a pen into drawer 7.",
        "kind": "small",
        "data": {"shelf": {"7": "pen"}},
        "evidence": {"text": "Drawer 7 shall hold: pen", "values": ["pen"]},
        "gold": [
            {"name": "put", "arguments": {"key": "7", "value": "pen"}},
            {"name": "get", "arguments": {"key": "7"}},
        ],
    },
]


async def shelf_reward(played):
    """Looks at the server's state with a tool that the policy may not have."""
    return json.loads((await played.call("dump")).text) == played.task.data["shelf"]


def shop_reward(played):
    """Sees calls with their results, and the answer."""
    last = played.calls[-1] if played.calls else None
    return bool(last) and not last.is_error and last.text == "1 in the basket" and played.answer == "Bought."


def half(played):
    return 0.5


def nothing(played):
    return None


@pytest.fixture
def shelf(tmp_path):
    """Makes configs of the plain server; each of its processes leaves a file in `pids`."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))

    def config(**keys):
        command = (sys.executable, "-I", str(SERVERS / "plain.py"), str(tmp_path / "pids"))
        tasks = {"train": str(tmp_path / "tasks.jsonl")}
        return MCPConfig(**{"command": command, "tasks": tasks, "reward": "tests.test_mcp:shelf_reward"} | keys)

    config.pids = lambda: [int(p.name) for p in (tmp_path / "pids").iterdir()]
    return config


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def turn(name, **arguments):
    return AssistantTurn("", (ToolCall(name, arguments, "c1"),))


def one(config, *turns, task="a", scored=True):
    """Plays turns; the observation, the first message that answers each turn, and the outcome."""

    async def play():
        environment = MCP(config, 4)
        try:
            start = await environment.reset(next(t for t in MCP.tasks(config, "train") if t.id == f"train/{task}"))
            answers = [(await environment.step(t)).messages for t in turns]
            return start, [a[0]["content"] if a else None for a in answers], scored and await environment.score()
        finally:
            await environment.close()

    return asyncio.run(play())


class TestTools:
    def test_are_listed_from_all_pages_in_openai_format(self, shelf):
        start, _, _ = one(shelf(system="Be tidy."), scored=False)
        assert [m["role"] for m in start.messages] == ["system", "user"]
        names = [t["function"]["name"] for t in start.tools]
        assert names == ["put", "get", "dump", "fail", "refuse", "nothing", "picture", "hang", "die", "deaf"]
        put = start.tools[0]
        assert put["type"] == "function" and put["function"]["description"] == "put on the shelf"
        assert put["function"]["parameters"]["required"] == ["key", "value"]

    def test_an_allow_list_hides_the_others_from_the_policy_and_not_from_the_reward(self, shelf):
        config = shelf(tools=["get", "put"])
        start, _, outcome = one(config, turn("put", key="7", value="Ada's key"))
        assert [t["function"]["name"] for t in start.tools] == ["get", "put"]
        assert (outcome.status, outcome.reward) == ("success", 1.0)
        with pytest.raises(EnvironmentError, match="the server has no tool take; it has put, get"):
            one(shelf(tools=["take"]))

    def test_results_and_errors_as_the_server_means_them(self, shelf):
        turns = [turn("put", key="1", value="x"), turn("get", key="1"), turn("fail"), turn("nothing"), turn("refuse")]
        _, answers, outcome = one(shelf(), *turns)
        assert answers == ["put", "x", "Error: the drawer is stuck", "", "Error: not like this"]
        assert outcome.status == "failure" and outcome.info == {"turns": 5, "calls": 5, "tool_errors": 2}

    def test_other_content_is_named(self, shelf):
        _, (answer,), _ = one(shelf(), turn("picture"))
        assert answer.split("\n") == [
            "see:",
            "[image image/png, 4 characters of base64, not shown]",
            "a note",
            "[link to resource shelf://b]",
        ]

    def test_a_long_result_is_cut_and_says_so(self, shelf):
        put = turn("put", key="1", value="x" * 50)
        _, answers, _ = one(shelf(result_limit=10), put, turn("get", key="1"))
        assert answers[1] == "x" * 10 + "\n[40 more characters are not shown]"


class TestRewards:
    def test_the_answer_ends_the_episode(self, shelf):
        _, answers, outcome = one(shelf(), turn("put", key="7", value="Ada's key"), AssistantTurn("Done."))
        assert answers == ["put", None] and outcome.reward == 1.0

    def test_a_part_is_no_success(self, shelf):
        _, _, outcome = one(shelf(reward="tests.test_mcp:half"))
        assert (outcome.status, outcome.reward) == ("failure", 0.5)

    def test_what_is_no_number_is_no_reward(self, shelf):
        with pytest.raises(EnvironmentError, match="gave None, which is no number"):
            one(shelf(reward="tests.test_mcp:nothing"))


class TestEpisodes:
    """Through the Player, as in training."""

    def player(self, config, answer):
        chat = tiny_chat()
        engine = FakeEngine(chat, lambda request: answer(chat.decode(request.prompt_ids)))
        return Player(EnvironmentSource(MCP, config, 4), chat, engine, small_config(rollout={"episode_timeout": 120.0}))

    def play(self, config, answer, task="a"):
        p = self.player(config, answer)
        chosen = next(t for t in p.source.tasks("train") if t.id == f"train/{task}")
        return asyncio.run(p.play(chosen, Seat(0, 0, "train/0/0", 0)))

    @staticmethod
    def policy(first):
        return lambda text: "That is all." if "<tool_response>" in text else first

    def test_success(self, shelf):
        t = self.play(shelf(), self.policy(call("put", key="7", value="Ada's key")))
        assert (t.status, t.reward, len(t.turns)) == (Status.SUCCESS, 1.0, 2)

    @pytest.mark.parametrize(
        ("made", "words"),
        [
            (call("put", key=7, value="x"), "Error: argument key: 7 is not of type 'string'"),
            (call("put", key="7"), "Error: arguments of put: 'value' is a required property"),
            (call("take", key="7"), "Error: unknown tool take; the tools are put, get"),
        ],
    )
    def test_a_wrong_call_is_the_policys_mistake_and_does_not_reach_the_server(self, made, words, shelf):
        t = self.play(shelf(tools=["put", "get"]), self.policy(made))
        assert t.messages[2]["content"] == words and t.info["tool_errors"] == 1
        assert (t.status, t.reward) == (Status.FAILURE, 0.0)

    def test_a_server_that_dies_is_no_reward_0(self, shelf):
        t = self.play(shelf(), self.policy(call("die")))
        assert (t.status, t.reward) == (Status.ENVIRONMENT_ERROR, None)
        assert t.info["error"] == "the MCP server ended during die; it wrote: the shelf fell down"

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("import sys; sys.exit('no disk')", "it wrote: no disk"),
            ("print('hello', flush=True); import time; time.sleep(60)", "was not ready within 3 s"),
        ],
    )
    def test_a_server_that_does_not_start(self, command, words, shelf, monkeypatch):
        monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)
        seconds = 60.0 if "exit" in command else 3.0
        t = self.play(
            shelf(command=(sys.executable, "-I", "-c", command), start_timeout=seconds), self.policy("Hello?")
        )
        assert t.status in (Status.ENVIRONMENT_ERROR, Status.TIMEOUT) and t.reward is None and not t.turns
        assert words in t.info["error"]

    def test_a_call_that_hangs_is_a_timeout_and_the_others_stand(self, shelf):
        config = shelf(call_timeout=3.0)

        def answer(text):
            return self.policy(call("hang") if "pen" in text else call("put", key="7", value="Ada's key"))(text)

        p = self.player(config, answer)
        groups = asyncio.run(p.collect(p.source.tasks("train"), step=0))
        assert [{t.status for t in g.trajectories} for g in groups] == [{Status.SUCCESS}, {Status.TIMEOUT}]
        assert groups[1].trajectories[0].info["error"] == "tool hang gave no answer within 3 s"
        assert len(shelf.pids()) == 4 and not any(map(alive, shelf.pids()))

    def test_no_more_servers_at_once_than_the_config_allows(self, shelf):
        assert EnvironmentSource(MCP, shelf(servers=3), 4).at_once(256) == 3
        assert EnvironmentSource(MCP, shelf(servers=3), 4).at_once(2) == 2
        assert EnvironmentSource(MCP, shelf(stateless=True), 4).at_once(256) == 256


class TestServers:
    def test_two_episodes_at_once_share_nothing(self, shelf):
        async def both():
            config = shelf()
            first, second = MCP(config, 4), MCP(config, 4)
            for environment in (first, second):
                await environment.reset(MCP.tasks(config, "train")[0])
            await first.step(turn("put", key="1", value="x"))
            seen = [(await e.step(turn("get", key="1"))).messages[0]["content"] for e in (first, second)]
            assert len(shelf.pids()) == 2 and all(map(alive, shelf.pids()))
            await asyncio.gather(first.close(), second.close())
            assert not any(map(alive, shelf.pids()))  # here: the end of the loop would end them too
            return seen

        assert asyncio.run(both()) == ["x", "empty"]

    def test_a_stateless_server_is_one_for_all_and_started_again_when_it_died(self, shelf):
        async def play():
            config = shelf(stateless=True)
            environments = [MCP(config, 4) for _ in range(3)]
            task = MCP.tasks(config, "train")[0]
            await asyncio.gather(*(e.reset(task) for e in environments))
            await environments[0].close()
            await environments[1].step(turn("get", key="1"))
            assert len(shelf.pids()) == 1
            with pytest.raises(EnvironmentError, match="ended during die"):
                await environments[1].step(turn("die"))
            with pytest.raises(EnvironmentError):
                await environments[2].step(turn("get", key="1"))
            again = MCP(config, 4)
            await again.reset(task)
            await again.step(turn("get", key="1"))
            assert len(shelf.pids()) == 2

        asyncio.run(play())
        assert len(shelf.pids()) == 2 and not any(map(alive, shelf.pids()))

    @pytest.mark.parametrize("moment", ["start", "call", "deaf"])
    def test_no_process_is_left_after_a_cancellation(self, moment, shelf, monkeypatch):
        monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)
        monkeypatch.setattr("mcp.client.stdio.FORCE_KILL_TIMEOUT", 0.2)
        config = shelf()
        if moment == "start":  # it leaves its file and says nothing
            code = "import os, pathlib, time, sys; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
            config = shelf(command=(*config.command[:2], "-c", code, config.command[-1]))

        async def cancelled():
            environment = MCP(config, 4)
            calling = asyncio.Event()

            async def episode():
                try:
                    await environment.reset(MCP.tasks(config, "train")[0])
                    calling.set()
                    await environment.step(turn("deaf" if moment == "deaf" else "hang"))
                finally:
                    await environment.close()

            task = asyncio.create_task(episode())
            while not (shelf.pids() if moment == "start" else calling.is_set()):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(shelf.pids()) == 1 and not alive(shelf.pids()[0])  # before the loop ends

        asyncio.run(cancelled())

    def test_no_process_is_left_when_the_loop_ends_without_a_close(self, shelf):
        async def forgotten():
            await MCP(shelf(), 4).reset(MCP.tasks(shelf(), "train")[0])

        asyncio.run(forgotten())
        assert len(shelf.pids()) == 1 and not alive(shelf.pids()[0])


class TestGold:
    def environment(self, shelf, task):
        environment = MCP(shelf(), 3)
        environment._record = task_files.load(shelf().tasks["train"])[task]
        environment._calls, environment._answer, environment._turns = [], None, 0
        return environment

    def test_evidence_is_what_was_given_and_the_gold_calls(self, shelf):
        a, b = (self.environment(shelf, task).evidence() for task in "ab")
        assert a.text == (
            'Calls that solve the task, in order:\n1. put {"key": "7", "value": "Ada\'s key"}\n'
            "Answer at the end: It is in drawer 7."
        )
        assert a.values == ("7", "Ada's key", "It is in drawer 7.")
        assert b.text.startswith("Drawer 7 shall hold: pen\nCalls") and b.values == ("pen",)

    def test_the_expert_goes_on_from_what_was_called_and_knows_when_it_is_too_late(self, shelf):
        environment = self.environment(shelf, "b")
        assert environment.expert().tool_calls[0].name == "put"
        environment._turns = 1
        assert environment.expert() is None  # two calls and the answer do not fit into two turns

    def test_tasks_that_doing_nothing_wins_are_named_in_the_file(self, shelf, tmp_path):
        (tmp_path / "idle.yaml").write_text("[{id: a, prompt: Do nothing., idle_wins: true}, {id: b, prompt: x}]")
        assert MCP.idle_exceptions(shelf(tasks={"test": str(tmp_path / "idle.yaml")}), "test") == {"test/a"}


class TestValidate:
    def test_command(self, shelf, tmp_path):
        config = shelf(tools=["put", "get"])
        keys = {"name": "mcp", "max_turns": 4} | config.model_dump(mode="json", include=config.model_fields_set)
        (tmp_path / "my.yaml").write_text(json.dumps({"env": keys, "eval": {"split": "train"}}))
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["validate", str(tmp_path / "my.yaml")])
        assert done.exit_code == 0, done.output
        assert "2 of 2" in done.stdout and "0 of 2" in done.stdout and "4, all as alone" in done.stdout
        assert not any(map(alive, shelf.pids()))


@pytest.fixture(scope="module")
def over_http():
    """The SDK's shop, served over HTTP from this process; its basket outlives every session."""
    import uvicorn

    from tests.mcp_servers import shop

    basket: list[str] = []
    app = shop.make(basket).streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp", basket
    server.should_exit = True
    thread.join(20)


class TestSDKServers:
    def config(self, tmp_path, **keys):
        gold = [{"name": "buy", "arguments": {"fruit": "apple"}}]
        task = {"id": "a", "prompt": "Buy an apple.", "gold": gold, "answer": "Bought."}
        (tmp_path / "tasks.yaml").write_text(json.dumps([task]))
        tasks = {"train": str(tmp_path / "tasks.yaml")}
        return MCPConfig(tasks=tasks, reward="tests.test_mcp:shop_reward", **keys)

    @pytest.mark.parametrize("protocol", ["auto", "legacy"])
    def test_over_http(self, protocol, tmp_path, over_http, monkeypatch):
        monkeypatch.setenv("SECRET", "1")
        url, basket = over_http
        basket.clear()
        config = self.config(tmp_path, url=url, protocol=protocol, headers={"X-Test": "$SECRET"})
        turns = [turn("price", fruit="pear"), turn("buy", fruit="melon"), turn("buy", fruit="apple")]
        start, answers, outcome = one(config, *turns, AssistantTurn("Bought."))
        assert [t["function"]["name"] for t in start.tools] == ["price", "buy"]
        assert answers[0] == "4" and answers[2] == "1 in the basket"
        assert answers[1].startswith("Error: ") and "there is no melon here" in answers[1]
        assert outcome.reward == 1.0 and outcome.info["tool_errors"] == 1

    def test_state_that_outlives_an_episode_is_found(self, tmp_path, over_http):
        url, basket = over_http
        basket.clear()
        source = EnvironmentSource(MCP, self.config(tmp_path, url=url), 4)
        report = asyncio.run(validate.check(source, "train", source.tasks("train")))
        assert {f.check for f in report.findings} == {"isolation"} and report.gold == 1

    def test_nobody_there(self, tmp_path):
        config = self.config(tmp_path, url="http://127.0.0.1:9/mcp", start_timeout=5.0)
        with pytest.raises((EnvironmentError, CallTimeout), match="the MCP server"):
            one(config)


class TestMistakes:
    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"url": "http://x/mcp"}, "either env.command"),
            ({"command": ()}, "either env.command"),
            ({"protocol": "new"}, "protocol"),
        ],
    )
    def test_in_a_config(self, keys, words, shelf):
        own = shelf().model_dump(mode="json", include={"command", "tasks", "reward"}) | keys
        with pytest.raises(ConfigError, match=words):
            environment_source(EnvConfig(name="mcp", **json.loads(json.dumps(own))))

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"command": ("no-such-program",)}, "there is no program no-such-program"),
            ({"folder": "/no/such"}, "there is no folder /no/such"),
            ({"variables": {"TOKEN": "$NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE is not set"),
            ({"reward": "shelf_reward"}, "not an import path"),
            ({"reward": "no_such_module:f"}, "No module named 'no_such_module'"),
            ({"reward": "tests.test_mcp:no_such"}, "has no function no_such"),
            ({"tasks": {"train": "/no/such.jsonl"}}, "/no/such.jsonl: cannot be read"),
            ({"tasks": {"dev": "x.jsonl"}}, "x.jsonl: cannot be read"),
        ],
    )
    def test_are_found_before_an_episode(self, keys, words, shelf):
        with pytest.raises(ConfigError, match=words) as error:
            EnvironmentSource(MCP, shelf(**keys), 4).tasks("train")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("a.jsonl", '{"id": "a", "prompt": "x"}\n\n{"id": "b"}', "line 3: prompt: Field required"),
            ("b.jsonl", '{"id": "a", "prompt": "x"}\n{"id": ', "line 2: not JSON"),
            ("c.jsonl", '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "x"}', "line 2: the id a is there twice"),
            ("d.yaml", "- {id: a, promt: x, prompt: y}", "task 1: promt: Extra inputs are not permitted"),
            ("e.yaml", "id: a", "holds no list of tasks"),
        ],
    )
    def test_in_a_task_file(self, name, text, words, tmp_path):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            task_files.load(str(tmp_path / name))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.yaml"])
    def test_a_byte_order_mark_is_no_part_of_it(self, name, tmp_path):
        text = '{"id": "a", "prompt": "x"}'
        (tmp_path / name).write_text("\ufeff" + (text if name == "a.jsonl" else f"- {text}"), encoding="utf-8")
        assert list(task_files.load(str(tmp_path / name))) == ["a"]

    def test_tasks_hold_no_gold(self, shelf):
        task = MCP.tasks(shelf(), "train")[1]
        assert task == Task("train/b", "small", {"shelf": {"7": "pen"}})
