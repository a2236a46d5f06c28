"""`rti doctor`: a config in order passes, and each thing that may be wrong is found under its name."""

import asyncio
import collections
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from fake_server import FakeServer
from tiny_models import byte_tokenizer
from typer.testing import CliRunner

from envs.base import ModelEndpoint, StepResult
from rti_jax import chat as chat_lib
from rti_jax import cli, doctor, doctor_engine, doctor_setup, environments, weight_sync
from rti_jax.config import load_config
from rti_jax.doctor_records import Check, Status, Subject, not_applicable, ok
from rti_jax.engine import GenerateResult
from rti_jax.engine_errors import EngineError
from tests.fakes import CANARY, Lookup

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SHIPPED = ROOT / "models" / "navigation-mini"


def rti(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def quickstart(*overrides):
    small = ["env.train_tasks=8", "env.test_tasks=8", "env.ood_tasks=0", "rollout.groups_per_step=2"]
    here = [f"model.path={SHIPPED}", *small, *overrides]
    return load_config(QUICKSTART, here, check_env=environments.env_config)


def look(config, name):
    """One check's finding, and all that it says."""
    (line,) = asyncio.run(doctor.examine(config, [c for c in doctor.CHECKS if c.name == name]))
    assert "\n" not in line.finding.message
    return line.finding


def found(finding, status, *words):
    text = f"{finding.message} -> {finding.remedy}"
    assert finding.status is status, text
    assert all(word in text for word in words), text
    assert bool(finding.remedy) == (status in (Status.WARNING, Status.FAILURE))


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped policy, to be broken."""
    return pathlib.Path(shutil.copytree(SHIPPED, tmp_path / "policy"))


def replaced(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


class TestReport:
    def test_the_quickstart_is_in_order(self, tmp_path):
        done = rti("doctor", QUICKSTART, f"model.path={SHIPPED}", f"runs_dir={tmp_path / 'runs'}", "--fast", "--json")
        report = json.loads(done.stdout)
        assert done.exit_code == 0 and report["ok"]
        fast = [c.name for c in doctor.CHECKS if not c.samples]
        assert [c["check"] for c in report["checks"]] == fast
        statuses = {c["check"]: c["status"] for c in report["checks"]}
        assert [n for n, s in statuses.items() if s != "ok"] == ["keys", "teacher vocabulary"]
        assert statuses["keys"] == statuses["teacher vocabulary"] == "not applicable"
        assert not any(c["remedy"] for c in report["checks"]) and not (tmp_path / "runs").exists()

    def test_lines_and_exit_code_of_a_failure(self, monkeypatch):
        async def good(subject):
            return ok("fine")

        async def raises(subject):
            raise RuntimeError("two\nlines")

        async def refuses(subject):
            raise EngineError("the engine is gone")

        checks = (
            Check("first", good),
            Check("second", raises),
            Check("third", good, ("second",)),
            Check("fourth", good, ("third",)),
            Check("fifth", refuses, ("first",)),
            Check("sixth", good, samples=True),
        )
        monkeypatch.setattr(doctor, "CHECKS", checks)
        done = rti("doctor", QUICKSTART, "--fast")
        lines = done.stdout.splitlines()
        assert done.exit_code == 1 and "Traceback" not in done.output
        assert lines[0].split() == ["ok", "first", "fine"]
        assert (
            lines[1].split() == ["failure", "second", "RuntimeError:", "two", "lines"] and lines[2].strip()[:2] == "->"
        )
        assert lines[3].split() == "not applicable third not looked at: second comes first".split()
        assert lines[4].split() == "not applicable fourth not looked at: third comes first".split()
        assert lines[5].split() == "failure fifth the engine is gone".split()
        assert lines[7] == "2 failed: second, fifth; 1 checks that need vLLM were left out (--fast)"

    def test_what_is_not_applicable_holds_nothing_up(self):
        async def absent(subject):
            return not_applicable("none here")

        async def good(subject):
            return ok("fine")

        lines = asyncio.run(doctor.examine(quickstart(), [Check("a", absent), Check("b", good, ("a",))]))
        assert [line.finding.status for line in lines] == [Status.NOT_APPLICABLE, Status.OK]

    def test_a_started_engine_is_closed_also_when_interrupted(self):
        closed = []

        class Engine:
            async def close(self):
                closed.append(True)

        async def start(subject):
            subject.engine = Engine()
            return ok("started")

        async def interrupted(subject):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(doctor.examine(quickstart(), [Check("a", start), Check("b", interrupted)]))
        assert closed

    def test_needs_come_before(self):
        for i, check in enumerate(doctor.CHECKS):
            assert set(check.needs) <= {c.name for c in doctor.CHECKS[:i]}, check.name
        assert [c.samples for c in doctor.CHECKS] == sorted(c.samples for c in doctor.CHECKS)

    def test_a_missing_model_is_one_failure(self, tmp_path):
        config = quickstart(f"model.path={tmp_path / 'nowhere'}", f"runs_dir={tmp_path}")
        lines = asyncio.run(doctor.examine(config, [c for c in doctor.CHECKS if not c.samples]))
        failed = [line for line in lines if line.finding.status is Status.FAILURE]
        assert [line.name for line in failed] == ["model"] and "no config.json there" in failed[0].finding.message


class TestTokens:
    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("<tool_response>", "<tool_result>", "the prompt after a tool result differs"),
            ("# Tools", "# Functions", "the first prompt differs from the folder's template"),
            ("reasoning_content", "hidden_content", "with thinking on the prompt after a tool result differs"),
        ],
    )
    def test_a_wrong_template_is_found(self, folder, old, new, words):
        replaced(folder / "chat_template.jinja", old, new)
        found(look(quickstart(f"model.path={folder}"), "template"), Status.FAILURE, words, "chat_template.jinja")

    def test_a_missing_template_is_found(self, folder):
        (folder / "chat_template.jinja").unlink()
        found(look(quickstart(f"model.path={folder}"), "template"), Status.FAILURE, "no chat template")

    def test_a_tokenizer_of_another_family_is_found(self, folder):
        replaced(folder / "tokenizer.json", "<|im_start|>", "<|start|>")
        replaced(folder / "tokenizer_config.json", "<|im_start|>", "<|start|>")
        finding = look(quickstart(f"model.path={folder}"), "tokenizer")
        found(finding, Status.FAILURE, "the tokenizer does not fit the qwen3 chat template")

    def test_more_tokens_than_rows_are_found(self, folder):
        replaced(folder / "config.json", '"vocab_size": 2048', '"vocab_size": 2047')
        found(look(quickstart(f"model.path={folder}"), "tokenizer"), Status.FAILURE, "2048 tokens", "2047 rows")

    def test_sampled_ids_that_are_lost_between_turns_are_found(self, monkeypatch):
        def forgets(self, prompt_ids, response_ids, new, tools=(), history=None):
            return (*prompt_ids, *response_ids[1:], *self.start(new))

        monkeypatch.setattr(chat_lib.Chat, "extend", forgets)
        found(
            look(quickstart(), "template"), Status.FAILURE, "neither appends to what was sampled nor is a fresh render"
        )

    @pytest.mark.parametrize(
        ("eos", "status", "words"),
        [
            ([2001], Status.FAILURE, "without the template's end of turn 2003"),
            ([2003, 5000], Status.FAILURE, "stop ids [5000] are outside the vocabulary"),
            (2003, Status.OK, "<|im_end|>"),
        ],
    )
    def test_stop_ids(self, folder, eos, status, words):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        found(look(quickstart(f"model.path={folder}"), "stop ids"), status, words)

    def test_a_stop_id_inside_a_turn_is_found(self, folder):
        inside = Subject(quickstart()).chat.tokenizer.convert_tokens_to_ids("<tool_call>")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2003, inside]}))
        found(
            look(quickstart(f"model.path={folder}"), "stop ids"), Status.FAILURE, "'<tool_call>') occurs inside a turn"
        )

    def test_no_generation_config_is_a_warning(self, folder):
        (folder / "generation_config.json").unlink()
        found(look(quickstart(f"model.path={folder}"), "stop ids"), Status.WARNING, "no generation_config.json")

    def test_padding_with_the_end_of_turn_is_a_warning(self, folder):
        replaced(folder / "tokenizer_config.json", '"pad_token": "<|endoftext|>"', '"pad_token": "<|im_end|>"')
        found(look(quickstart(f"model.path={folder}"), "padding"), Status.WARNING, "the pad token is the end of turn")

    @pytest.mark.parametrize("taken", [0, 2003])
    def test_masks_made_from_ids_are_found(self, monkeypatch, taken):
        build = doctor.doctor_chat.batching.build

        def by_id(groups, config):
            packed = build(groups, config)
            batches = [b._replace(loss_mask=b.loss_mask & (b.tokens != taken)) for b in packed.microbatches]
            return collections.namedtuple("Packed", "microbatches")(batches)

        monkeypatch.setattr(doctor.doctor_chat.batching, "build", by_id)
        found(look(quickstart(), "padding"), Status.FAILURE, "masks must come from lengths")

    def test_a_changed_tool_call_is_found(self, monkeypatch):
        read = chat_lib._tool_call
        monkeypatch.setattr(
            chat_lib,
            "_tool_call",
            lambda call: chat_lib.ToolCall(
                read(call).name, {k: str(v) for k, v in (read(call).arguments or {}).items()}
            ),
        )
        found(look(quickstart(), "tool calls"), Status.FAILURE, "'limit': '3'")

    def test_a_broken_call_that_passes_is_found(self, monkeypatch):
        monkeypatch.setattr(chat_lib.ParsedTurn, "malformed", None)
        found(look(quickstart(), "tool calls"), Status.FAILURE, "a broken tool call is not reported")


class TestTeacher:
    def test_its_vocabulary_is_compared(self, tmp_path):
        own = ("loss.baseline=opd", f"loss.teacher.path={SHIPPED}")
        found(look(quickstart(*own), "teacher vocabulary"), Status.OK, "the policy's: loss.teacher.path")
        byte_tokenizer().save_pretrained(tmp_path)
        shutil.copy(SHIPPED / "config.json", tmp_path)
        role = quickstart(f"rti.roles.corrector.model={tmp_path}")
        words = ("rti.roles.corrector.model=", "another vocabulary than the policy")
        found(look(role, "teacher vocabulary"), Status.FAILURE, *words)

    def test_stored_rollouts_are_read(self, tmp_path):
        path = tmp_path / "teacher.jsonl"
        path.write_text('{"task_id": "a", "messages": [{"role": "assistant", "content": "x"}]}\n')
        luffy = ("loss.baseline=luffy", f"loss.teacher.rollouts={path}")
        found(look(quickstart(*luffy), "teacher vocabulary"), Status.OK, "stored rollouts of 1 tasks")


class TestKeys:
    VALIDATOR = "rti.roles.validator.endpoint"

    @pytest.fixture(autouse=True)
    def no_keys(self, monkeypatch):
        for name in ("OPENAI_API_KEY", "RTI_USER_URL", "RTI_USER_API_KEY", "RTI_JUDGE_URL"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize(("key", "words"), [(None, "missing key: "), ("x", "wrong key: ")])
    @pytest.mark.parametrize("status", [401, 403])
    def test_a_missing_or_wrong_key_is_found(self, monkeypatch, key, words, status):
        server = FakeServer()
        server.overrides["/v1/chat/completions"] = (status, {"error": {"message": "who are you?"}})
        if key:
            monkeypatch.setenv("OPENAI_API_KEY", key)
        finding = look(quickstart(f"{self.VALIDATOR}={server.url}/v1"), "keys")
        found(
            finding,
            Status.FAILURE,
            f"{words}rti.roles.validator: endpoint {server.url}/v1: ",
            "who are you?",
            "set the key",
        )
        assert ("(OPENAI_API_KEY is not set)" in finding.message) is (key is None)

    def test_a_server_that_wants_none_is_asked_once(self):
        server = FakeServer()
        finding = look(quickstart(f"{self.VALIDATOR}={server.url}/v1"), "keys")
        found(finding, Status.OK, "1 answer: rti.roles.validator")
        (body,) = [body for path, body in server.calls if path == "/v1/chat/completions"]
        assert body["max_tokens"] == 1 and body["model"] == "policy"

    def test_an_endpoint_that_is_not_there_is_found(self):
        finding = look(quickstart(f"{self.VALIDATOR}=http://127.0.0.1:9/v1"), "keys")
        found(
            finding, Status.FAILURE, "rti.roles.validator: endpoint http://127.0.0.1:9/v1", "start what does not answer"
        )

    def test_servers_that_are_not_there_are_found(self):
        config = quickstart("engine.kind=server", "engine.urls=[http://127.0.0.1:9]")
        found(look(config, "keys"), Status.FAILURE, "engine.urls: http://127.0.0.1:9/v1/models: ConnectError")
        config = quickstart("engine.kind=server", f"engine.urls=[{FakeServer().url}/v1]")
        found(look(config, "keys"), Status.OK, "1 answer")

    def test_the_endpoint_that_is_evaluated_is_asked_too(self, monkeypatch):
        found(
            look(quickstart("eval.endpoint.url=http://127.0.0.1:9/v1"), "keys"),
            Status.FAILURE,
            "eval.endpoint: endpoint http://127.0.0.1:9/v1",
            "(RTI_POLICY_API_KEY is not set)",
        )
        server = FakeServer()
        chosen = [f"eval.endpoint.url={server.url}/v1", "eval.endpoint.key_variable=MY_KEY"]
        monkeypatch.delenv("MY_KEY", raising=False)
        found(look(quickstart(*chosen), "keys"), Status.FAILURE, "eval.endpoint.key_variable=MY_KEY")
        monkeypatch.setenv("MY_KEY", "x")
        found(look(quickstart(*chosen), "keys"), Status.OK, "1 answer: eval.endpoint")

    def test_roles_that_are_not_asked_need_nothing(self):
        config = quickstart("rti.enabled=false", f"{self.VALIDATOR}=http://127.0.0.1:9/v1")
        found(look(config, "keys"), Status.NOT_APPLICABLE, "names no endpoint")

    def test_an_environments_endpoints_are_asked_with_their_own_key(self, monkeypatch):
        asked = []

        async def answers(name, endpoint):
            asked.append((name, endpoint.key))
            return ""

        monkeypatch.setattr(doctor_setup, "_unanswered", answers)
        user = ModelEndpoint("https://user.example.com/v1", "m", "secret", "RTI_USER_API_KEY")
        monkeypatch.setattr(Lookup, "endpoints", classmethod(lambda cls, config: {"user": user}))
        found(look(lookup_config(Lookup), "keys"), Status.OK, "env.user")
        assert asked == [("env.user", "secret")] and "secret" not in repr(user)

    def test_tau2_without_a_user_is_found(self, monkeypatch):
        pytest.importorskip("tau2", reason="τ²-bench is not installed (extra tau2)")
        config = load_config(ROOT / "configs/tau2_retail_qwen3_8b.yaml", check_env=environments.env_config)
        found(look(config, "keys"), Status.FAILURE, "RTI_USER_URL is not set")
        server = FakeServer()
        server.overrides["/v1/chat/completions"] = (401, {"error": {"message": "who are you?"}})
        monkeypatch.setenv("RTI_USER_URL", f"{server.url}/v1")
        found(
            look(config, "keys"),
            Status.FAILURE,
            "missing key: env.user",
            "RTI_USER_API_KEY or OPENAI_API_KEY is not set",
        )


class TestClawEval:
    """On the tiny checkout: without gold play, and with a judge that is asked for."""

    def config(self, monkeypatch, tmp_path, *overrides):
        pytest.importorskip("fastapi", reason="mock services need fastapi (extra claw-eval)")
        monkeypatch.delenv("RTI_JUDGE_URL", raising=False)
        (tmp_path / "hard.txt").write_text("L003_shelf_report")
        root, subset = ROOT / "tests/data/claw_eval_mini", tmp_path / "hard.txt"
        env = (
            f"env={{name: claw_eval, root: '{root}', subset: '{subset}', split: rest_ood, max_turns: 8, prompt: plain}}"
        )
        sizes = ["sampling.max_context=8000", "batch.buckets=[8192]", "rollout.mix={}", "eval.split=hard20_id"]
        return load_config(
            QUICKSTART, [f"model.path={SHIPPED}", env, *sizes, *overrides], check_env=environments.env_config
        )

    def test_a_missing_judge_is_found(self, monkeypatch, tmp_path):
        config = self.config(monkeypatch, tmp_path)
        found(look(config, "keys"), Status.FAILURE, "env.judge.url is empty and RTI_JUDGE_URL is not set")
        monkeypatch.setenv("RTI_JUDGE_URL", f"{FakeServer().url}/v1")
        found(look(config, "keys"), Status.OK, "env.judge")

    def test_what_needs_no_endpoint_passes(self, monkeypatch, tmp_path):
        config = self.config(monkeypatch, tmp_path)
        found(look(config, "tasks"), Status.OK, "2 easy to train on, 1 held out, none in both")
        short = self.config(monkeypatch, tmp_path, "rti.enabled=false", "sampling.max_context=1024")
        assert "there is no gold play to measure" in look(short, "context").message
        found(look(config, "evidence canary"), Status.OK, "corrected")


def lookup_config(cls, *overrides):
    """The small environment of tests/fakes.py, played by the shipped policy's tokenizer."""
    own = [f"env={{name: '{cls.__module__}:{cls.__name__}', split: train, max_turns: 4}}", "rollout.mix={}"]
    given = [f"model.path={SHIPPED}", *own, "sampling.max_context=1000", "batch.buckets=[1024]", *overrides]
    return load_config(QUICKSTART, given, check_env=environments.env_config)


class Telling(Lookup):
    """Its tools give away what only the evidence may hold."""

    async def step(self, turn):
        result = await super().step(turn)
        shown = [{**m, "content": f"{m['content']} ({self.evidence().text})"} for m in result.messages]
        return StepResult(shown, result.done)


class TellingAtTheEnd(Lookup):
    async def score(self):
        outcome = await super().score()
        outcome.info["why"] = self.evidence().text
        return outcome


class Broken(Lookup):
    async def reset(self, task):
        raise OSError("no such machine")


class TestEvidence:
    def test_an_environment_that_keeps_it_passes(self):
        found(look(lookup_config(Lookup), "evidence canary"), Status.OK, "4 turns", "corrected")

    @pytest.mark.parametrize(
        ("cls", "where"), [(Telling, "policy's prompt of turn 2"), (TellingAtTheEnd, "the messages or the score")]
    )
    def test_a_leak_is_found(self, cls, where):
        finding = look(lookup_config(cls), "evidence canary")
        found(finding, Status.FAILURE, "evidence of train/0 reached", where)
        assert CANARY not in finding.message

    def test_a_role_that_never_sees_it_is_found(self, tmp_path):
        for role in ("validator", "corrector", "verifier"):
            (tmp_path / f"{role}.j2").write_text("{{ evidence }}" if role != "verifier" else "Accept it.")
        finding = look(lookup_config(Lookup, f"rti.prompts={tmp_path}"), "evidence canary")
        found(finding, Status.FAILURE, "prompts without the evidence: verifier", "rti.prompts")

    def test_an_environment_that_does_not_start_is_found(self):
        found(look(lookup_config(Broken), "evidence canary"), Status.FAILURE, "environment_error", "no such machine")

    def test_without_intervention_nobody_reads_it(self):
        found(look(lookup_config(Lookup, "rti.enabled=false"), "evidence canary"), Status.NOT_APPLICABLE)


class TestContext:
    @pytest.mark.parametrize(
        ("overrides", "status", "words"),
        [
            ([], Status.OK, "of sampling.max_context=512"),
            (["sampling.max_context=40"], Status.FAILURE, "context too small: the first prompt of train/"),
            (["sampling.max_context=100"], Status.FAILURE, "context too small: gold play of train/"),
            (["sampling.max_tokens=4"], Status.FAILURE, "raise sampling.max_tokens"),
            (["batch.buckets=[256]"], Status.FAILURE, "add a bucket of that length"),
            (["sampling.max_context=230", "rti.enabled=false"], Status.WARNING, "such episodes are truncated"),
            (["sampling.max_context=2048", "batch.buckets=[2048]"], Status.WARNING, "the model's 1024 positions"),
        ],
    )
    def test_each_limit(self, overrides, status, words):
        found(look(quickstart(*overrides), "context"), status, words)

    def test_the_models_positions_are_a_limit_too(self, folder):
        replaced(folder / "config.json", '"max_position_embeddings": 1024', '"max_position_embeddings": 100')
        found(look(quickstart(f"model.path={folder}"), "context"), Status.FAILURE, "gold play of train/", "context 100")

    def test_role_prompts_need_room_too(self):
        config = quickstart("rti.prompts=default", "sampling.max_context=250", "batch.buckets=[256]")
        found(look(config, "context"), Status.FAILURE, "a role's prompt at the first turn")
        found(look(quickstart("sampling.max_context=230"), "context"), Status.WARNING, "a role's prompt late in")

    def test_an_environment_without_an_expert_is_measured_by_its_prompts(self):
        found(look(lookup_config(Lookup), "context"), Status.OK, "there is no gold play to measure")


class TestAround:
    def test_weights_that_do_not_fit_are_found(self, folder):
        replaced(folder / "config.json", '"num_hidden_layers": 4', '"num_hidden_layers": 3')
        finding = look(quickstart(f"model.path={folder}"), "model")
        found(finding, Status.FAILURE, "missing: model.layers.3.input_layernorm.weight, ", "and 8 more")

    def test_a_mesh_that_does_not_fit_is_found(self):
        found(look(quickstart("mesh.fsdp=3"), "devices"), Status.FAILURE, "fsdp=3", "does not multiply")

    def test_tasks_that_are_in_both_splits_are_found(self):
        found(
            look(quickstart("eval.split=train"), "tasks"), Status.FAILURE, "are both trained (env.split) and evaluated"
        )

    @pytest.mark.parametrize(
        ("gib", "status", "words"),
        [
            (0.01, Status.FAILURE, "disk: 0.0 GiB free"),
            (0.05, Status.WARNING, "little room"),
            (9.0, Status.OK, "9.0 GiB"),
        ],
    )
    def test_disk(self, monkeypatch, tmp_path, gib, status, words):
        usage = collections.namedtuple("Usage", "total used free")(1 << 40, 0, int(gib * doctor_setup.GIB))
        monkeypatch.setattr(doctor_setup.shutil, "disk_usage", lambda path: usage)
        found(look(quickstart(f"runs_dir={tmp_path / 'a' / 'b'}"), "disk"), status, words, str(tmp_path))

    def test_a_run_folder_of_another_algorithm_is_found(self, tmp_path):
        config = quickstart(f"runs_dir={tmp_path}")
        found(look(config, "run folder"), Status.OK, "is free")
        (config.run_dir / "checkpoints" / "4").mkdir(parents=True)
        found(look(config, "run folder"), Status.FAILURE, "holds no run")
        doctor_setup.config_lib.save_resolved(config, config.run_dir / "config.yaml")
        found(look(config, "run folder"), Status.OK, "would go on")
        changed = quickstart(f"runs_dir={tmp_path}", "gate.delta=inf")
        found(
            look(changed, "run folder"), Status.FAILURE, "other values of keys that change the algorithm", "gate.delta"
        )


class StandIn:
    """An engine that has parameters of its own, and gives random tokens their log-probabilities under them.

    Args:
      fault: "" takes every update whole; "stale" none; "head" all but the head; "scaled" takes other values.
    """

    def __init__(self, subject, scorer, fault=""):
        self.scorer, self.fault, self.version = scorer, fault, 0
        self.params = self.head = subject.policy.params

    async def sync(self, model, params, version):
        assert version > self.version
        self.version = version
        if self.fault == "scaled":
            params = jax.tree.map(lambda x: 1.5 * x, params)
        if self.fault != "stale":
            self.params = params
        if self.fault not in ("stale", "head"):
            self.head = params
        return version

    async def generate(self, request):
        ids = tuple(np.random.default_rng(request.seed).integers(10, 1900, 12).tolist())
        both = {"body": self.params, "head": self.head}
        (logprobs,) = self.scorer.score(both, [(request.prompt_ids, ids)])
        if self.fault == "temperature":
            logprobs = logprobs * 1.2
        return GenerateResult(ids, tuple(logprobs.tolist()), "length", self.version)


class TestEngine:
    @pytest.fixture(scope="class")
    def parts(self):
        """Loaded and compiled once: the subject, and a scorer for the stand-in."""
        subject = Subject(quickstart("batch.buckets=[128]", "sampling.max_context=128"))
        model = doctor_engine._OtherHead(subject.policy.model)
        return subject, doctor_engine.scorer(subject.config, subject.policy.mesh, model)

    @pytest.fixture
    def run(self, monkeypatch, parts):
        monkeypatch.setattr(doctor_engine, "PROMPTS", 2)
        monkeypatch.setattr(weight_sync, "sync", lambda engine, *arguments: engine.sync(*arguments))

        def run(check, fault):
            subject, scorer = parts
            subject.engine = StandIn(subject, scorer, fault)

            async def checks():
                first = await doctor_engine.learner(subject)
                return first if check == "learner" else await doctor_engine.weight_update(subject)

            return asyncio.run(checks()), subject

        return run

    def test_an_engine_that_takes_every_weight_passes(self, run):
        finding, subject = run("update", "")
        found(finding, Status.OK, "(float32)")
        assert subject.engine.params is subject.policy.params and subject.engine.version == 2, (
            "the first weights are back"
        )

    def test_another_temperature_is_found(self, run):
        found(run("learner", "temperature")[0], Status.FAILURE, "log-probabilities differ by", "engine.args")

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("stale", "weights stale: the engine still samples with the old ones"),
            ("head", "tied head stale: the engine has the new layers and the old lm_head"),
            ("scaled", "weight update incomplete"),
        ],
    )
    def test_each_incomplete_update_is_named(self, run, fault, words):
        found(run("update", fault)[0], Status.FAILURE, words, "log-probabilities differ by")

    @pytest.mark.parametrize(
        ("dtype", "gap", "status"),
        [
            ("float32", (9e-4, 1e-5), Status.OK),
            ("float32", (2e-3, 1e-5), Status.WARNING),
            ("float32", (2e-2, 1e-5), Status.FAILURE),
            ("float32", (float("nan"), 1e-5), Status.FAILURE),
            ("bfloat16", (0.3, 1e-2), Status.OK),
            ("bfloat16", (0.3, 3e-2), Status.WARNING),
            ("bfloat16", (0.3, 0.2), Status.FAILURE),
        ],
    )
    def test_limits(self, dtype, gap, status):
        assert doctor_engine.Gap(*gap, 100).status(dtype) is status


@pytest.mark.slow
class TestWithVLLM:
    @pytest.mark.exhaustive
    def test_the_whole_quickstart_is_in_order(self, tmp_path):
        here = [f"model.path={SHIPPED}", f"runs_dir={tmp_path / 'runs'}"]
        command = [sys.executable, "-m", "rti_jax.cli", "doctor", str(QUICKSTART), *here, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
        report = json.loads(done.stdout)
        assert done.returncode == 0 and report["ok"] and len(report["checks"]) == len(doctor.CHECKS), done.stdout
        assert {c["status"] for c in report["checks"]} == {"ok", "not applicable"}

    @pytest.mark.exhaustive
    def test_a_tied_head_that_was_left_stale_is_named(self, monkeypatch):
        monkeypatch.setattr(weight_sync, "aliases", lambda expected: {})
        names = ("model", "tokenizer", "tasks", "devices", "engine", "engine and learner", "weight sync")
        lines = asyncio.run(doctor.examine(quickstart(), [c for c in doctor.CHECKS if c.name in names]))
        findings = {line.name: line.finding for line in lines}
        found(findings.pop("weight sync"), Status.FAILURE, "tied head stale: the engine has the new layers")
        assert {f.status for f in findings.values()} == {Status.OK}
