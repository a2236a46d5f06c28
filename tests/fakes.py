"""Stand-ins for tests: a scripted engine, a tokenizer that has two ways to write "hello", small environments."""

import asyncio
import json
from collections.abc import Callable, Sequence

from envs.base import (
    Environment,
    Evidence,
    JudgeError,
    Observation,
    Outcome,
    StepResult,
    Task,
    UserError,
    tool_error,
    tool_result,
)
from rti_jax.chat import Chat
from rti_jax.config import Config
from rti_jax.engine import GenerateRequest, GenerateResult
from rti_jax.environments import EnvironmentSource
from tests.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS

CANARY = "CANARY-7f3a9"


def tiny_tokenizer():
    """Bytes, Qwen3's special tokens, and merges up to "hello": h e l l o, he llo and hello are all ways to write it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_chat(thinking: bool = False, **kwargs) -> Chat:
    return Chat(tiny_tokenizer(), "qwen3", thinking, **kwargs)


class FakeEngine:
    """Answers by a function of the request: text (its end token is added), exact ids, or an exception to raise.

    Attributes:
      requests: every request in order of arrival.
    """

    def __init__(self, chat: Chat, answer: Callable[[GenerateRequest], str | Sequence[int] | Exception]):
        self.chat = chat
        self.answer = answer
        self.requests: list[GenerateRequest] = []
        self.version = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        await asyncio.sleep(0)
        answer = self.answer(request)
        if isinstance(answer, Exception):
            raise answer
        ids = self.chat.encode_text(answer) if isinstance(answer, str) else tuple(answer)
        ids = ids[: request.max_tokens]
        reason = "stop" if ids[-1] in request.stop_token_ids else "length"
        return GenerateResult(ids, tuple(-0.01 * (i + 1) for i in range(len(ids))), reason, self.version)

    def prompts(self, role: str) -> list[str]:
        return [self.chat.decode(r.prompt_ids) for r in self.requests if r.role == role]

    async def update_weights(self, tensors, version):
        self.version = version
        return version

    async def checksums(self):
        return {}

    async def sleep(self):
        pass

    async def wake_up(self):
        pass

    def pop_metrics(self):
        return {}

    async def close(self):
        pass


def call(tool: str, /, **arguments) -> str:
    """A tool call as a policy writes it."""
    return '<tool_call>\n{"name": "' + tool + '", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"


class Lookup(Environment):
    """Find a code with `look`, then `answer` with it; the code cannot be known before. Faults are named in the task."""

    closed: list[str] = []  # ids of tasks whose episode was closed
    judged: dict[str, int] = {}

    @classmethod
    def tasks(cls, config, split):
        if split not in ("train", "test"):
            raise ValueError(f"unknown split {split!r}")
        kinds = ("easy", "easy", "hard")
        return [lookup_task(f"{split}/{i}", kind=kinds[i % 3]) for i in range(9)]

    async def reset(self, task):
        self.task, self.answered, self.fault = task, None, task.data.get("fault", "")
        if self.fault == "reset":
            raise OSError("no such machine")
        text = f"What is the code of {task.data['name']}?"
        return Observation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], TOOLS)

    async def step(self, turn):
        if self.fault == "step":
            raise RuntimeError("lost connection")
        if self.fault == "user":
            raise UserError("simulator is down")
        if self.fault == "sleep":
            await asyncio.sleep(3600)
        while self.fault == "stubborn":
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass
        if self.fault == "silent":
            return StepResult([])
        if not turn.tool_calls:
            return StepResult([{"role": "user", "content": "Please use the tools."}])
        return StepResult([self._result(c) for c in turn.tool_calls], done=self.answered is not None)

    def _result(self, call):
        if call.error:
            return tool_error(call, call.error)
        if call.name == "look":
            return tool_result(call, {"code": self.task.data["code"]})
        if call.name == "answer":
            self.answered = call.arguments.get("code")
            return tool_result(call, "ok")
        return tool_error(call, f"no tool {call.name}")

    async def score(self):
        if self.fault.startswith("judge"):
            self.judged[self.task.id] = self.judged.get(self.task.id, 0) + 1
            if self.fault == "judge" or self.judged[self.task.id] <= 2:
                raise JudgeError("no verdict")
        if self.fault == "status":
            return Outcome("great", 1.0)
        success = self.answered == self.task.data["code"]
        return Outcome("success" if success else "failure", float(success), {"answered": str(self.answered)})

    def evidence(self):
        return Evidence(
            f"{CANARY}: look first, then answer {self.task.data['code']}.", (self.task.data["code"], CANARY)
        )

    def role_rules(self):
        return "Look before you answer."

    async def close(self):
        self.closed.append(self.task.id)
        if self.fault == "close":
            raise RuntimeError("cannot close")


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {argument: {"type": "string"}}}},
    }
    for name, argument in (("look", "name"), ("answer", "code"))
]


def lookup_task(task_id: str = "t", kind: str = "easy", code: str = "X4711", fault: str = "") -> Task:
    return Task(task_id, kind, {"name": "Ada", "code": code, "fault": fault})


def lookup_source(max_turns: int = 4) -> EnvironmentSource:
    return EnvironmentSource(Lookup, Lookup.Config(), max_turns)


def small_config(**sections) -> Config:
    """A config with short limits; each keyword is a section's overrides."""
    base = {
        "sampling": {"max_tokens": 200, "max_context": 8000, "thinking": False, "temperature": 1.0},
        "rollout": {"group_size": 2, "retries": 0, "episode_timeout": 5.0},
        "rti": {"prompts": "compact"},
    }
    return Config(**{k: base.get(k, {}) | sections.get(k, {}) for k in {*base, *sections}})
