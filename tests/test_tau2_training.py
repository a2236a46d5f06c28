"""An RTI step on τ²-telecom, end to end: vLLM, a small policy, a user simulator and roles behind a local endpoint."""

import asyncio
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from envs.tau2 import Tau2
from tests.fakes import tiny_chat
from tests.json_server import JsonServer, says
from tests.tiny_models import make_qwen3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tau2") is None, reason="τ²-bench is not installed (extra tau2)"),
]
ROOT = pathlib.Path(__file__).parents[1]
ASK = "Please do this on your device: "
CONFIG = """\
# A step of RTI on one task of τ²-telecom.
name: run
steps: 1
model: {path: %(model)s, dtype: float32, scan_layers: false, remat: none}
env: {name: "tests.test_tau2_training:Telecom", domain: telecom, max_turns: 8, user: {url: "%(url)s", model: user}}
rollout: {groups_per_step: 1, group_size: 4}
sampling: {temperature: 1.0, max_tokens: 24, max_context: 4096, thinking: false}
rti:
  prompts: compact
  roles:
    validator: {endpoint: "%(url)s", model: validator}
    corrector: {endpoint: "%(url)s", model: corrector}
    verifier: {endpoint: "%(url)s", model: verifier}
gate: {delta: .inf}    # a random policy finds every sentence implausible
optimizer: {lr: 1.0e-3}
batch: {buckets: [4096], rows_per_microbatch: 1}
eval: {split: test, trials: 1}
"""


class Telecom(Tau2):
    """Two tasks whose gold actions are the user's and have no arguments, so that asking for them leaks nothing."""

    IDS = {
        "train": "[mobile_data_issue]airplane_mode_on|data_mode_off[PERSONA:None]",
        "test": "[service_issue]airplane_mode_on[PERSONA:None]",
    }

    @classmethod
    def tasks(cls, config, split):
        return [t for t in super().tasks(config, "full") if t.data["id"] == cls.IDS[split]]


def reply(body):
    """(text, calls) of the model that a request names: the user, who does what is asked for by name, or a role."""
    messages = body["messages"]
    last = messages[-1]["content"]
    if body["model"] == "user":
        if len(messages) == 2:
            return "My phone does not work.", []
        if messages[-1]["role"] == "tool":
            return "Done.", []
        asked = re.match(re.escape(ASK) + r"(\w+)\(\)", last)
        return (None, [asked[1]]) if asked else ("###STOP###", [])
    if body["model"] == "validator":
        return '{"verdict": "invalid", "reason": "it does not go on with the reference"}', []
    if body["model"] == "verifier":
        return '{"verdict": "accept"}', []
    actions = re.findall(r"^  \d+\. user, on the own device: (\w+\(\))", last, re.MULTILINE)
    done = sum(m["role"] == "assistant" and m["content"].startswith(ASK) for m in messages)
    return (ASK + actions[done] if done < len(actions) else "All is done."), []


@pytest.fixture
def endpoint():
    """(base URL, names of the models that were asked)."""
    asked = []

    def answer(path, body, key):
        asked.append(body["model"])
        text, calls = reply(body)
        functions = [{"name": name, "arguments": "{}"} for name in calls]
        return 200, says(text, *({"id": f"c{len(asked)}", "type": "function", "function": f} for f in functions))

    with JsonServer(answer) as server:
        yield f"http://{server.address}/v1", asked


def make_policy(folder):
    """A random Qwen3 whose tokenizer has each line of the agent's prompt as one token, so that episodes are short."""
    from rti_jax import tokenizer as tokenizer_lib

    async def prompt():
        env = Telecom.rehearsal(Telecom.Config(domain="telecom"), 8)
        return await env.reset(Telecom.tasks(env.config, "train")[0])

    start, chat = asyncio.run(prompt()), tiny_chat()
    text = chat.decode(chat.start(start.messages, start.tools))
    phrases = tokenizer_lib.common_lines([text])
    tokenizer = tokenizer_lib.train([text], vocab_size=len(phrases) + 800, phrases=phrases)
    end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    make_qwen3(
        folder,
        tokenizer=False,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=end,
        pad_token_id=pad,
    )
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, pad], "pad_token_id": pad}))


def test_a_step_replaces_a_failed_member_and_has_a_gradient(tmp_path, endpoint):
    make_policy(tmp_path / "policy")
    url, asked = endpoint
    (tmp_path / "run.yaml").write_text(CONFIG % {"model": tmp_path / "policy", "url": url})
    done = subprocess.run(
        [sys.executable, "-m", "rti_jax.cli", "train", str(tmp_path / "run.yaml"), f"runs_dir={tmp_path}"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["rollout/groups_all_failed"] == 1 and line["rollout/user_error"] == 0
    assert line["rti/successes"] == 1 and line["rti/replaced"] >= 1
    assert line["optimizer/grad_norm"] > 0 and line["corrector/tokens"] > 0
    assert line["rollout/post_success"] == 0.25
    assert set(asked) == {"user", "validator", "corrector", "verifier"}
    episodes = (tmp_path / "run" / "trajectories" / "step_000001.jsonl").read_text()
    assert ASK + "toggle_airplane_mode()" in episodes and "reward_basis" in episodes
