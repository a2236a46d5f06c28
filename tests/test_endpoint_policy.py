"""Policies behind the chat API, against a local server that plays: what it gets, what the environment sees, errors."""

import asyncio
import json
import os
import threading
import time
import traceback

import pytest

from envs.base import ModelEndpoint
from rti_jax import endpoint_policy, endpoints, evaluate, policies, view
from rti_jax.config import Config, ConfigError
from rti_jax.engine_errors import EngineDiedError
from rti_jax.environments import environment_source
from rti_jax.rollout import Seat
from rti_jax.types import Status
from tests.fakes import Lookup, lookup_task
from tests.json_server import JsonServer
from tests.test_chat_api import NO_ANSWERS

KEY = "sk-secret-4711"


def tool(name, arguments, call_id="c1"):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def says(content=None, *calls, reason=None, **fields):
    message = {"role": "assistant", "content": content, **fields} | ({"tool_calls": list(calls)} if calls else {})
    reason = reason or ("tool_calls" if calls else "stop")
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


def expert(body):
    """Looks, then answers with the code that the last result shows."""
    last = body["messages"][-1]
    if last["role"] == "tool" and "code" in last["content"]:
        return says(
            None, tool("answer", {"code": json.loads(last["content"])["code"]}, "c2"), reasoning_content="I know."
        )
    return says("Looking.", tool("look", {"name": "Ada"}), reasoning_content="Hm.")


def idle(body):
    return says("I am sorry.")


def refusal(status, message="overloaded", **fields):
    return status, {"error": {"message": message, **fields}}


class Server:
    """A chat endpoint; `play` maps the body of a request to (status, answer). `bodies` holds every request."""

    def __init__(self, play):
        self.play, self.bodies, self.keys, self.busy, self.most = play, [], [], 0, 0
        self._lock, self.models = threading.Lock(), None  # instead of the answer of /models
        self.http = JsonServer(self.answer, {"retry-after-ms": "1"})
        self.url = f"http://{self.http.address}/v1"

    def answer(self, path, body, key):
        if path == "/v1/models" and self.models is not None:
            return 200, self.models
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "reference", "object": "model"}]}
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.busy += 1
            self.most = max(self.most, self.busy)
        try:
            return self.play(body)
        finally:
            with self._lock:
                self.busy -= 1


@pytest.fixture
def serve():
    servers = []

    def start(play):
        servers.append(Server(play))
        return servers[-1]

    yield start
    for server in servers:
        server.http.close()


def make_config(server, **sections):
    """No model folder anywhere: an endpoint needs none."""
    evaluation = {"trials": 2, "temperature": 0.5} | sections.pop("eval", {})
    evaluation["endpoint"] = {"url": server.url, "retries": 1, "timeout": 20.0} | evaluation.get("endpoint", {})
    base = {
        "env": {"name": "tests.fakes:Lookup", "max_turns": 4},
        "rollout": {"retries": 0, "concurrency": 64},
        "sampling": {"max_tokens": 77},
    }
    return Config.model_validate(base | {"eval": evaluation} | sections)


def play(server, task=None, **sections):
    """One episode."""
    config = make_config(server, **sections)

    async def run():
        async with policies.opened(config, environment_source(config.env)) as player:
            return await player.play(task or lookup_task(), Seat(0, 0, "eval/0/0", 1), sampling=config.sampling)

    return asyncio.run(run())


class TestEpisode:
    def test_the_expert_wins_and_the_idle_one_does_not(self, serve):
        won = play(serve(expert))
        assert (won.status, won.reward, won.turns, won.length) == (Status.SUCCESS, 1.0, (), 2)
        lost = play(serve(idle))
        assert (lost.status, lost.reward, lost.length) == (Status.FAILURE, 0.0, 4)

    def test_what_is_sent(self, serve):
        server = serve(expert)
        play(server)
        first, second = server.bodies
        assert (first["model"], first["temperature"], first["max_tokens"]) == ("reference", 0.8, 77)
        assert first["seed"] == Seat(0, 0, "eval/0/0", 1).seed_of(0, "policy") != second["seed"]
        assert [t["function"]["name"] for t in first["tools"]] == ["look", "answer"]
        assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
        spoken, result = second["messages"][2:]
        assert spoken == {"role": "assistant", "content": "Looking.", "tool_calls": [tool("look", {"name": "Ada"})]}
        assert result == {"role": "tool", "tool_call_id": "c1", "content": '{"code": "X4711"}'}

    def test_thinking_is_recorded_and_reaches_nobody(self, serve):
        for reply in (expert, lambda b: says("<think>\nHm.\n</think>\n\nLooking.", tool("look", {"name": "Ada"}))):
            server = serve(reply)
            trajectory = play(server)
            message = trajectory.messages[2]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Looking.")
            assert endpoint_policy.read(message).content == "Looking."
            assert "Hm." not in json.dumps(server.bodies)

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ('{"name": ', "the arguments of the tool call are not valid JSON"),
            ("[1]", "the arguments of the tool call are not an object"),
            ('{"name": NaN}', "the arguments hold a number that is not finite, or too large"),
            ('{"name": ' + "[" * 400 + "]" * 400 + "}", "the arguments are nested more than 32 deep"),
        ],
    )
    def test_malformed_arguments_come_back_as_a_tool_error(self, serve, arguments, error):
        def clumsy(body):
            return expert(body) if len(body["messages"]) > 2 else says(None, tool("look", arguments))

        server = serve(clumsy)
        trajectory = play(server)
        assert trajectory.success and trajectory.length == 3
        assert trajectory.messages[3]["content"].startswith(f"Error: {error}")
        sent = server.bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(sent) == {"unreadable": arguments}  # servers refuse what is no JSON

    def test_what_has_no_utf8_is_replaced(self, serve):
        def odd(body):
            first = says("\ud800", tool("look\udc00", '{"name": "\\ud800"}'), reasoning_content="\udfff")
            return expert(body) if len(body["messages"]) > 2 else first

        server = serve(odd)
        trajectory = play(server)
        assert trajectory.success
        message = trajectory.messages[2]
        assert (message["content"], message["reasoning_content"]) == ("\ufffd", "\ufffd")
        (call,) = endpoint_policy.read(message).tool_calls
        assert (call.name, call.arguments) == ("look\ufffd", {"name": "\ufffd"})
        assert trajectory.messages[3]["content"].startswith("Error: unknown tool look\ufffd")

    def test_a_call_without_arguments_or_id(self):
        reply = {"tool_calls": [{"function": {"name": "look", "arguments": ""}}, {"function": {"name": None}}]}
        message = endpoint_policy.recorded(reply, 3)
        first, second = endpoint_policy.read(message).tool_calls
        assert (first.arguments, first.id, first.error) == ({}, "call_3_0", None)
        assert second.error == "the tool call has no name"
        assert endpoint_policy.as_api(message)["tool_calls"][0]["function"]["arguments"] == "{}"

    def test_thinking_that_is_not_closed_reaches_nobody(self, serve):
        server = serve(lambda b: says("Hm. <think>secret plan never closed", reason="length"))
        trajectory = play(server)
        message = trajectory.messages[2]
        assert (message["reasoning_content"], message["content"]) == ("secret plan never closed", "Hm. ")
        assert "secret" not in json.dumps(server.bodies)

    def test_half_a_character_can_be_kept_and_sent(self, serve):
        server = serve(
            lambda b: says("\ud800", tool("look", {"name": "\ud800"})) if len(b["messages"]) < 4 else expert(b)
        )
        trajectory = play(server)
        assert trajectory.success and trajectory.messages[2]["content"] == "\ufffd"
        assert endpoint_policy.read(trajectory.messages[2]).tool_calls[0].arguments == {"name": "\ufffd"}
        json.dumps(trajectory.messages, ensure_ascii=False).encode()

    def test_a_reply_cut_at_the_limit_is_truncated(self, serve):
        trajectory = play(
            serve(lambda body: says("I am", reason="length")), env={"name": "tests.fakes:Lookup", "max_turns": 1}
        )
        assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 0.0)

    def test_fields_can_be_added_and_left_out(self, serve):
        server = serve(expert)
        play(server, eval={"endpoint": {"extra_body": {"seed": None, "top_k": 3, "temperature": 0.1}}})
        assert "seed" not in server.bodies[0]
        assert (server.bodies[0]["top_k"], server.bodies[0]["temperature"]) == (3, 0.1)


class TestErrors:
    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_refusal_for_now_is_tried_again(self, serve, status):
        refused = [refusal(status)]
        server = serve(lambda body: refused.pop() if refused else expert(body))
        assert play(server).success and len(server.bodies) == 3

    def test_after_that_the_episode_is_excluded_not_lost(self, serve):
        server = serve(lambda body: refusal(503))
        trajectory = play(server)
        assert (trajectory.status, trajectory.reward) == (Status.ENVIRONMENT_ERROR, None)
        assert "overloaded" in trajectory.info["error"] and len(server.bodies) == 2

    @pytest.mark.parametrize("name", NO_ANSWERS)
    def test_what_is_no_answer_is_asked_for_again_and_then_excluded(self, serve, monkeypatch, name):
        monkeypatch.setattr(endpoints, "PAUSE", 0.0)
        server = serve(lambda body: (200, NO_ANSWERS[name]))
        trajectory = play(server)
        assert (trajectory.status, trajectory.reward) == (Status.ENVIRONMENT_ERROR, None)
        assert f"endpoint {server.url}: " in trajectory.info["error"] and len(server.bodies) == 2
        bad = [(200, NO_ANSWERS[name])]
        assert play(serve(lambda body: bad.pop() if bad else expert(body))).success

    @pytest.mark.parametrize("body", ["<html>Welcome</html>", '{"data": [', "null", '{"data": [null]}'])
    def test_a_wrong_base_url_is_one_line(self, serve, body):
        server = serve(expert)
        server.models = body
        with pytest.raises(EngineDiedError, match=r"is the base URL right\? it usually ends with /v1") as error:
            play(server)
        assert "\n" not in str(error.value)
        assert play(server, eval={"endpoint": {"model": "m"}}).success  # some endpoints do not tell

    def test_a_context_that_is_full_is_the_policys_end(self, serve):
        full = refusal(400, "This model's maximum context length is 512 tokens.")
        server = serve(lambda body: full if len(body["messages"]) > 2 else expert(body))
        assert (play(server).status, play(server).reward) == (Status.TRUNCATED, 0.0)
        assert play(serve(lambda body: full)).reward is None  # before any turn it is the setting's
        assert play(serve(lambda body: refusal(400, "no such field"))).status is Status.ENVIRONMENT_ERROR

    def test_a_withheld_reply_is_excluded(self, serve):
        assert play(serve(lambda body: says("", reason="content_filter"))).status is Status.ENVIRONMENT_ERROR

    @pytest.mark.parametrize(("status", "words"), [(401, "Incorrect API key"), (404, "no such model")])
    def test_what_no_request_will_change_ends_the_evaluation(self, serve, monkeypatch, status, words):
        monkeypatch.setenv("RTI_POLICY_API_KEY", KEY)
        server = serve(lambda body: refusal(status, f"{words} {KEY}"))
        with pytest.raises(EngineDiedError, match=f"endpoint {server.url}: .*{words} ") as error:
            play(server)
        assert KEY not in str(error.value) and "***" in str(error.value)
        assert KEY not in "".join(traceback.format_exception(error.value))

    def test_an_absent_endpoint_is_named(self, serve):
        server = serve(expert)
        server.http.close()
        with pytest.raises(EngineDiedError, match=f"endpoint {server.url}: Connection error"):
            play(server, eval={"endpoint": {"retries": 0}})

    def test_a_named_key_must_be_there(self, serve, monkeypatch):
        monkeypatch.delenv("OTHER_KEY", raising=False)
        with pytest.raises(ConfigError, match="key_variable=OTHER_KEY: this environment variable is not set"):
            play(serve(expert), eval={"endpoint": {"key_variable": "OTHER_KEY"}})


class Judged(Lookup):
    """Asks a judge, which the environment variables name, in theory."""

    @classmethod
    def endpoints(cls, config):
        return {"judge": ModelEndpoint(os.environ["RTI_JUDGE_URL"], os.environ.get("RTI_JUDGE_MODEL", ""))}


class TestEvaluation:
    def test_it_does_not_go_on_with_another_judge(self, serve, tmp_path, monkeypatch):
        server, output = serve(expert), tmp_path / "a.json"

        def judged_by(url, model):
            monkeypatch.setenv("RTI_JUDGE_URL", url)
            monkeypatch.setenv("RTI_JUDGE_MODEL", model)
            env = {"name": "tests.test_endpoint_policy:Judged", "max_turns": 4}
            keys = {"env": env, "eval": {"trials": 1, "limit": 1}}
            return evaluate.main(make_config(server, runs_dir=str(tmp_path), name="r", **keys), output=output)

        assert judged_by("http://a/v1", "x") == 0
        assert judged_by("http://b/v1", "x") == 0
        with pytest.raises(ConfigError, match="  judge: 'x' -> 'y'"):
            judged_by("http://a/v1", "y")
        with pytest.raises(ConfigError, match="  judge: 'x' -> 'the first at http://a/v1'"):
            judged_by("http://a/v1", "")

    def test_it_needs_no_model_and_keeps_no_key(self, serve, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("RTI_POLICY_API_KEY", KEY)
        server = serve(lambda body: time.sleep(0.02) or expert(body))  # long enough for others to come, if they may
        config = make_config(server, eval={"endpoint": {"concurrency": 3}}, runs_dir=str(tmp_path), name="r")
        assert evaluate.main(config) == 0
        result = json.loads((tmp_path / "r" / "evals" / "test_endpoint.json").read_text())
        assert result["model"] == "reference" and result["kinds"]["all"]["pass^2"]["mean"] == 1.0
        assert result["tasks"][0] == {
            "task": "test/0", "kind": "easy", "n": 2, "c": 2, "excluded": 0, "turns": 2.0, "turns_each": [2, 2],
        }  # fmt: skip
        assert server.most <= 3 and set(server.keys) == {f"Bearer {KEY}"}
        said = capsys.readouterr()
        page = view.main(tmp_path / "r" / "evals" / "test_endpoint.json").path.read_text()
        assert (
            "I know." in page and "answer({" in page and page.count("What is the code of") == 18
        )  # once a group, twice
        assert KEY not in said.out + said.err
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and KEY in p.read_text()]

    def test_it_goes_on_at_another_address_but_not_with_another_model(self, serve, tmp_path):
        names = iter(["eval/0/0", "eval/0/4"])
        broken = {Seat(0, 0, n, 0).seed_of(0, "policy") for n in names}
        server = serve(lambda body: refusal(500) if body["seed"] in broken else idle(body))
        config = make_config(server, runs_dir=str(tmp_path), name="r")
        output = tmp_path / "a.json"
        assert evaluate.main(config, output=output) == 0
        assert json.loads(output.read_text())["kinds"]["all"]["excluded"] == 2
        moved = serve(expert)
        assert evaluate.main(make_config(moved, runs_dir=str(tmp_path), name="r"), output=output) == 0
        assert len(moved.bodies) == 4
        result = json.loads(output.read_text())
        assert (result["kinds"]["all"]["excluded"], sum(r["c"] for r in result["tasks"])) == (0, 2)
        another = make_config(moved, eval={"endpoint": {"model": "other"}}, runs_dir=str(tmp_path), name="r")
        with pytest.raises(ConfigError, match="eval.endpoint.model: 'reference' -> 'other'"):
            evaluate.main(another, output=output)
