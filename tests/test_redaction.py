"""No secret is printed, logged or written, and nothing else is changed."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from rti_jax import config as config_lib
from rti_jax import config_diff, redaction, runs, train
from rti_jax.eval_setup import Identity, Setup
from rti_jax.types import Group, Status, Trajectory, Turn

KEY = "k3y-0f+an/endpoint"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """What a test makes known is forgotten after it."""
    monkeypatch.setattr(redaction, "_known", set())
    redaction._pattern.cache_clear()
    yield
    redaction._pattern.cache_clear()


class TestForms:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("GET http://user:pass@host:80/v1?q=1", "GET http://***@host:80/v1?q=1"),
            ("https://sometoken@host/x.git", "https://***@host/x.git"),
            ("GET /place?key=abc123&city=Rome", "GET /place?key=***&city=Rome"),
            ("http://h/?q=1&access_token=abc'", "http://h/?q=1&access_token=***'"),
            ("{'Authorization': 'Bearer abcdefgh123'}", "{'Authorization': 'Bearer ***'}"),
            ("no key sk-abcdefghijklmnopqrstuv works", "no key *** works"),
            ("hf_" + "a" * 34, "***"),
        ],
    )
    def test_a_message_shows_no_form_of_a_secret(self, text, expected):
        assert redaction.redact(text) == expected
        assert redaction.redact(expected) == expected
        assert redaction.known_hidden(text) == text  # in an episode it is the task's

    @pytest.mark.parametrize(
        "text",
        [
            "mail ada@example.org about https://example.org/a@b?keyword=1&monkey=2",
            "models/hf_navigation-small and sk-learn",
            "a bearer of good news; the token count is 12",
            "http://127.0.0.1:8000/v1",
        ],
    )
    def test_other_text_stays(self, text):
        assert redaction.redact(text) == text


class TestKnown:
    def test_values_of_variables_that_are_named_like_a_key(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SOME_SERVICE_API_KEY", KEY)
        monkeypatch.setenv("SHORT_KEY", "abc")
        monkeypatch.setenv("SOME_KEY", str(tmp_path))  # of a file with the key: no secret itself
        monkeypatch.setenv("OTHER_TOKEN", "Placeholder")
        monkeypatch.setenv("PAD_TOKEN", "<|endoftext|>")
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-or-so")
        redaction.learn_environment()
        assert {v for v in redaction._known if v in (KEY, "abc", str(tmp_path), "Placeholder", "false-or-so")} == {KEY}
        assert "<|endoftext|>" not in redaction._known
        assert redaction.known_hidden(f"bad key {KEY}!") == "bad key ***!"
        assert redaction.known_hidden("?k=k3y-0f%2Ban%2Fendpoint&b") == "?k=***&b"

    def test_what_a_config_holds_or_names(self, monkeypatch):
        monkeypatch.setenv("MY_OWN_VARIABLE", "value-of-the-variable")
        monkeypatch.setenv("SERVICE_LOGIN", "value-of-the-login")
        headers = {"Authorization": "Bearer literal-secret", "X-Login": "Basic $SERVICE_LOGIN", "Accept": "text/plain"}
        env = {"name": "mcp", "headers": headers, "url": "http://ada:wonder%2Fland@host/?api_key=in-the-query"}
        config = config_lib.Config(env=env, eval={"endpoint": {"key_variable": "MY_OWN_VARIABLE"}})
        redaction.learn_config(config.model_dump())
        for value in ("value-of-the-variable", "value-of-the-login", "literal-secret", "wonder/land", "in-the-query"):
            assert redaction.known_hidden(f"<{value}>") == "<***>", value
        assert redaction.known_hidden("text/plain navigation train") == "text/plain navigation train"

    def test_the_longest_of_two_keys_is_replaced_as_a_whole(self):
        redaction.learn(["secret-one", "secret-one-and-more"])
        assert redaction.known_hidden("secret-one-and-more secret-one") == "*** ***"


class TestConfig:
    HEADERS = {"Authorization": "Bearer literal-secret", "X-Key": "$VARIABLE", "Accept": "text/plain"}

    def config(self, tmp_path, **keys):
        env = {"name": "mcp", "headers": self.HEADERS, "url": "http://ada:wonderland@host/mcp", "port_token": 7}
        return config_lib.Config(**{"name": "x", "runs_dir": str(tmp_path), "env": env} | keys)

    def test_a_described_config_has_everything_else(self, tmp_path):
        config = self.config(tmp_path)
        shown = config_lib.without_secrets(config)
        own = shown.env.own
        assert own["headers"] == {"Authorization": "***", "X-Key": "$VARIABLE", "Accept": "text/plain"}
        assert own["url"] == "http://***@host/mcp" and own["port_token"] == 7
        plain = lambda c: c.model_copy(update={"env": None})  # noqa: E731
        assert plain(shown) == plain(config)
        assert redaction.hidden_keys(shown.model_dump()) == ["env.headers.Authorization", "env.url"]
        assert redaction.hidden_keys({"env": {"system": "***"}}) == []

    def test_keys_that_open_nothing_are_no_secrets(self):
        assert redaction.names_secret("env.amap_key") and redaction.names_secret("OPENAI_API_KEY")
        assert not any(map(redaction.names_secret, ("answer_key", "env.answer_key", "sort_key", "eos_token")))

    def test_the_run_folder_has_none_and_the_run_goes_on(self, tmp_path):
        run = runs.open_run(self.config(tmp_path))
        text = run.config.read_text()
        assert "literal-secret" not in text and "wonderland" not in text and "***" in text
        runs.write_json(run.evaluation(0), {})
        assert runs.open_run(self.config(tmp_path, steps=7)).config.read_text().count("***") == 2
        with pytest.raises(config_lib.ConfigError, match="seed: 0 -> 1"):
            runs.open_run(self.config(tmp_path, seed=1))

    def test_a_run_that_an_older_version_began_goes_on_too(self, tmp_path):
        run = runs.open_run(self.config(tmp_path))
        runs.write_json(run.evaluation(0), {})
        config_lib.save_resolved(self.config(tmp_path), run.config)
        runs.open_run(self.config(tmp_path))
        assert "literal-secret" not in run.config.read_text()

    def test_a_run_that_begins_from_what_a_run_folder_keeps_needs_them_again(self, tmp_path):
        kept = config_lib.without_secrets(self.config(tmp_path))
        with pytest.raises(config_lib.ConfigError, match="env.headers.Authorization is hidden in this config"):
            train.main(kept)
        assert not list(tmp_path.iterdir())

    def test_a_config_is_no_other_one_than_what_its_run_folder_keeps_of_it(self, tmp_path):
        env = {"name": "mcp", "headers": {"Authorization": "Bearer literal-of-a-study"}}
        config = config_lib.Config(name="mine", env=env, runs_dir=str(tmp_path))
        kept = config_lib.load_config(runs.open_run(config).config)
        config_diff.check_resume(kept, config)
        assert kept != config and not config_diff.differences(kept, config)


class TestFiles:
    def test_what_a_server_echoes_is_not_in_the_trajectories(self, tmp_path):
        redaction.learn([KEY])
        says = f"user at http://me:pw@h/v1: 401 no such key {KEY}"
        turn = Turn("g/0/0", (1, 2), (3,), (-0.5,), "stop", 0)
        messages = ({"role": "tool", "content": f"bad key {KEY}, see http://h/?key=public"},)
        broken = Trajectory("g/0", "g", 0, "t", (turn,), Status.USER_ERROR, None, messages, {"error": says})
        path = tmp_path / "t.jsonl"
        runs.write_groups(path, [Group("g", "t", (broken,))], {})
        line = json.loads(path.read_text())
        assert line["info"]["error"] == "user at http://***@h/v1: 401 no such key ***"
        assert line["messages"][0]["content"] == "bad key ***, see http://h/?key=public"
        assert line["status"] == "user_error" and line["turns"][0]["response_ids"] == [3]

    def test_what_an_evaluation_was_made_with_has_none_and_is_compared_without(self, tmp_path):
        env = {"name": "mcp", "headers": {"Authorization": "Bearer literal-secret"}}
        policy = Identity("eval.endpoint.url", "m at http://ada:wonderland@h/v1", "digest")
        setup = Setup("eval", config_lib.Config(env=env), policy, ("t",), {"judge": "j at http://ada:wonderland@h/v1"})
        setup.write(tmp_path / "a.setup.yaml")
        text = (tmp_path / "a.setup.yaml").read_text()
        assert "literal-secret" not in text and "wonderland" not in text and "m at http://***@h/v1" in text
        assert Setup.read(tmp_path / "a.setup.yaml").differences(setup) == []


class TestLogs:
    @pytest.fixture
    def guarded(self):
        before = logging.getLogRecordFactory()
        redaction.guard_logs()
        yield
        logging.setLogRecordFactory(before)

    def test_no_handler_of_any_logger_gets_a_secret(self, guarded):
        redaction.learn([KEY])
        out = io.StringIO()
        handler, log = logging.StreamHandler(out), logging.getLogger("some.library")
        log.addHandler(handler)
        try:
            log.warning("request to %s failed: %s", "http://a:b@host/", {"key": KEY})
            try:
                raise ValueError(f"no such key {KEY}")
            except ValueError:
                log.exception("it broke")
        finally:
            log.removeHandler(handler)
        text = out.getvalue()
        assert "request to http://***@host/ failed: {'key': '***'}" in text
        assert KEY not in text and "ValueError: no such key ***" in text and "Traceback" in text

    def test_a_message_that_does_not_fit_its_arguments_stays_the_handlers_business(self, guarded):
        record = logging.getLogRecordFactory()("x", logging.INFO, "x.py", 1, "a number %d", ("none",), None)
        with pytest.raises(TypeError):
            record.getMessage()

    def test_guarding_twice_is_guarding_once(self, guarded):
        first = logging.getLogRecordFactory()
        redaction.guard_logs()
        assert logging.getLogRecordFactory() is first


CRASH = """
import os, sys
from rti_jax import cli, cli_training
from rti_jax.config import ConfigError
error = {"bug": RuntimeError, "mistake": ConfigError}[sys.argv.pop(1)]
def broken(*_):
    raise error("the server says: no key " + os.environ["MY_API_KEY"])
cli_training.load = broken
sys.argv = ["rti", "train", "x.yaml"]
cli.main()
"""


@pytest.mark.parametrize(("kind", "code"), [("bug", 1), ("mistake", 2)])
def test_neither_an_error_line_nor_a_traceback_shows_a_key(kind, code):
    environment = {**os.environ, "MY_API_KEY": KEY, "RTI_DEBUG": "1", "RTI_NO_LAUNCHER": "1"}
    command = [sys.executable, "-c", CRASH, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == code and KEY not in done.stdout + done.stderr
    assert "the server says: no key ***" in done.stderr and "Traceback" in done.stderr
