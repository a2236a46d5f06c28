"""Conversations as token ids: what the engine sees, what the policy sampled, and how a completion is read.

Built on the library `renderers`, which renders each model family token by token and appends to sampled ids instead of
re-encoding them. A sampled id is never decoded and encoded again between turns: `extend` keeps it, and where a
template drops earlier thinking (Qwen3, when a new user message comes) the next prompt is rendered afresh, is no
extension of the last one, and becomes a training row of its own.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from renderers import ParsedToolCall, ToolCallParseStatus, config_from_name, create_renderer

from envs.base import AssistantTurn, Message, ToolCall
from envs.chat_api import encodable
from rti_jax.config import ConfigError
from rti_jax.plain_json import unbounded
from rti_jax.template_renderer import TemplateRenderer

# Template family of each `model_type` of a Hugging Face config.json; TEMPLATE is the tokenizer's own chat template.
TEMPLATE = "template"
RENDERERS = {
    "llama": TEMPLATE,  # or Llama 3's, by its tokens: SmolLM2 and many others share this model_type
    "qwen2": TEMPLATE,
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
}


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A completion as it was read.

    Attributes:
      turn: what the environment sees: never the thinking, malformed calls with their error.
      reasoning: the thinking, without its tags.
      text: the decoded completion with its thinking, without the end token; what roles and the viewer read.
      body: `text` after the thinking, tool markup included; what a fresh render of the conversation shows.
      complete: ended with a stop token, outside the thinking.
    """

    turn: AssistantTurn
    reasoning: str
    text: str
    body: str
    complete: bool

    @property
    def malformed(self) -> str | None:
        """Why this turn cannot be played as it was meant, or None."""
        if not self.complete:
            return "truncated"
        if not self.turn.content.strip() and not self.turn.tool_calls:
            return "empty"
        return next((c.error for c in self.turn.tool_calls if c.error), None)

    def as_message(self) -> Message:
        """OpenAI-format message for viewers and endpoints; malformed calls as the text that was written."""
        good = tuple(c for c in self.turn.tool_calls if not c.error)
        whole = len(good) == len(self.turn.tool_calls)
        message = dataclasses.replace(self.turn, content=self.turn.content if whole else self.body, tool_calls=good)
        return self._with_reasoning(message.as_message())

    def as_written(self) -> Message:
        """The turn for a fresh render: its text as sampled, so that nothing is reformatted."""
        return self._with_reasoning({"role": "assistant", "content": self.body})

    def _with_reasoning(self, message: Message) -> Message:
        return message | {"reasoning_content": self.reasoning} if self.reasoning else message


class Chat:
    """Renders and parses the conversations of one model family; holds no conversation.

    Args:
      tokenizer: a Hugging Face tokenizer.
      model_type: of the model's config.json; chooses the template family.
      thinking: whether the generation prompt lets the model think.
      stop_ids: end-of-turn ids beside the template's own, e.g. all of generation_config.json.

    Raises:
      ConfigError: for a model type without a renderer, or a tokenizer without the template's special tokens.
    """

    def __init__(self, tokenizer, model_type: str, thinking: bool, stop_ids: Sequence[int] = ()):
        if model_type not in RENDERERS:
            raise ConfigError(f"no chat template for model_type {model_type!r}; known: {', '.join(sorted(RENDERERS))}")
        self.tokenizer = tokenizer
        self.model_type = model_type
        self.thinking = thinking
        self._renderer = _renderer(tokenizer, RENDERERS[model_type], thinking)
        own = self._renderer.get_stop_token_ids()
        self.end_id: int = own[0]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *stop_ids]))
        self._think, self._think_end = (self._single(t) for t in ("<think>", "</think>"))
        user = [{"role": "user", "content": "x"}]
        bare = self._render(user, None, generate=False)
        self.generation_prompt: tuple[int, ...] = self._render(user, None)[len(bare) :]

    @classmethod
    def from_folder(cls, path: str | pathlib.Path, thinking: bool) -> "Chat":
        """Reads the tokenizer, the model type and every end-of-turn id from a Hugging Face folder.

        Raises:
          ConfigError: for a folder that is missing or holds no tokenizer.
        """
        from transformers import AutoTokenizer

        folder = pathlib.Path(path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: no Hugging Face model at {folder} (config.json is missing)")
        model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds for one mistake
            raise ConfigError(f"model.path: no usable tokenizer in {folder}: {str(error).splitlines()[0]}") from error
        return cls(tokenizer, model_type, thinking, _generation_stop_ids(folder))

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation, ending in the generation prompt."""
        return self._render(messages, tools)

    def extend(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        history: Sequence[Message] | None = None,
    ) -> tuple[int, ...]:
        """The next prompt: sampled ids as they are, then the template's separator and the new messages.

        Where the template drops earlier thinking, `history` (all messages before the new ones, assistant turns as
        `ParsedTurn.as_written`) is rendered afresh instead, as the template would.

        Raises:
          ValueError: if a fresh render is needed and `history` is None.
        """
        response = list(response_ids)
        if response and response[-1] in self.stop_ids and response[-1] not in self._renderer.get_stop_token_ids():
            response.append(self.end_id)  # the template's own end of turn after another one; in the prompt, untrained
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_ids), response, list(new_messages), tools=list(tools) or None
        )
        if bridged is not None:
            return tuple(bridged.token_ids)
        if history is None:
            raise ValueError("this template drops earlier thinking here: extend needs the history to render afresh")
        return self._render([*history, *new_messages], tools)

    def ask(self, prompt_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """`prompt_ids` with one more user message before its generation prompt, which stays the same ids.

        Role prompts are made so: they share the visible history with h_t token for token (and its cached prefix).

        Raises:
          ValueError: if `prompt_ids` does not end in the generation prompt.
        """
        end = len(self.generation_prompt)
        if tuple(prompt_ids[-end:]) != self.generation_prompt:
            raise ValueError("the prompt does not end in this template's generation prompt")
        first, second = {"role": "user", "content": "x"}, {"role": "user", "content": encodable(text)}
        bare = self._render([first], None, generate=False)
        both = self._render([first, second], None)
        if both[: len(bare)] != bare:
            raise ValueError("this template changes a user message when another follows it")
        return (*prompt_ids[:-end], *both[len(bare) :])

    def parse(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedTurn:
        """Reads a completion; never raises. Tool syntax inside the thinking, closed or not, is thinking."""
        ids, stopped = self._without_stop(response_ids)
        opened = self._opens_thinking(prompt_ids)
        reasoning_ids, body_ids, closed = self._split_thinking(ids, opened)
        content, calls = self._read_body(body_ids, tools)
        prefix = f"call_{len(prompt_ids)}"  # unique within a conversation, and the same on every run
        return ParsedTurn(
            turn=AssistantTurn(content, tuple(dataclasses.replace(c, id=f"{prefix}_{i}") for i, c in enumerate(calls))),
            reasoning=self.decode(reasoning_ids).strip("\n"),
            text=self.decode(ids),
            body=self.decode(body_ids).lstrip("\n"),
            complete=stopped and closed,
        )

    def encode_turn(self, turn: AssistantTurn | Message, reasoning: str = "") -> tuple[int, ...]:
        """Ids that a policy would sample for this turn, end token included: experts' and other models' turns."""
        message = turn.as_message() if isinstance(turn, AssistantTurn) else dict(turn)
        if reasoning:
            message["reasoning_content"] = reasoning
        user = {"role": "user", "content": "x"}
        prompt = self._render([user], None)
        whole = self._render([user, message], None, generate=False)
        if whole[: len(prompt)] != prompt:
            raise ValueError("this template renders a turn that does not follow its generation prompt")
        ids = whole[len(prompt) :]
        return ids[: len(ids) - ids[::-1].index(self.end_id)] if self.end_id in ids else (*ids, self.end_id)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a turn written by another model as plain text, encoded once, up to its one end token."""
        ids, _ = self._without_stop(self.tokenizer.encode(text, add_special_tokens=False))
        return (*ids, self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False) if len(ids) else ""

    def _render(self, messages, tools, generate: bool = True) -> tuple[int, ...]:
        tools = list(tools) if tools else None
        return tuple(self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=generate))

    def _single(self, token: str) -> int | None:
        i = self.tokenizer.convert_tokens_to_ids(token)
        return i if isinstance(i, int) and i != self.tokenizer.unk_token_id else None

    def _without_stop(self, ids: Sequence[int]) -> tuple[list[int], bool]:
        end = next((i for i, t in enumerate(ids) if t in self.stop_ids), None)
        return (list(ids), False) if end is None else (list(ids[:end]), True)

    def _opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """True if the prompt's last thinking tag is an opener that belongs to this turn."""
        for token in reversed(prompt_ids):
            if token == self._think and token is not None:
                return True
            if token in self.stop_ids or token == self._think_end:
                return False
        return False

    def _split_thinking(self, ids: list[int], opened: bool) -> tuple[list[int], list[int], bool]:
        """(thinking, body, closed). All before a closer without an opener is thinking: the opener was in the prompt."""
        if self._think_end is None:
            return [], ids, True
        tags = [t for t in ids if t in (self._think, self._think_end)]
        inside = opened or (bool(tags) and tags[0] == self._think_end)
        thinking, body = [], []
        for token in ids:
            if token in (self._think, self._think_end):
                inside = token == self._think
            else:
                (thinking if inside else body).append(token)
        return thinking, body, not inside

    def _read_body(self, ids: list[int], tools) -> tuple[str, list[ToolCall]]:
        try:
            parsed = self._renderer.parse_response(ids, tools=list(tools) or None)
        except Exception as error:  # absurd JSON (too deep, too many digits) is the policy's mistake, never ours
            return "", [ToolCall("", None, error=f"unreadable tool call: {type(error).__name__}")]
        return (parsed.content or "").strip("\n"), [_tool_call(call) for call in parsed.tool_calls]


def _renderer(tokenizer, name: str, thinking: bool):
    if name == TEMPLATE and _has(tokenizer, "<|start_header_id|>"):
        name = "llama-3"
    try:
        if name == TEMPLATE:
            return TemplateRenderer(tokenizer, thinking)
        config = config_from_name(name)
        if "enable_thinking" in type(config).model_fields:
            config = config.model_copy(update={"enable_thinking": thinking})
        return create_renderer(tokenizer, config)
    except Exception as error:  # the library asserts each special token
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"the tokenizer does not fit the {name} chat template: {cause}") from error


def _has(tokenizer, token: str) -> bool:
    return tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id)


def _generation_stop_ids(folder: pathlib.Path) -> list[int]:
    file = folder / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _tool_call(call: ParsedToolCall) -> ToolCall:
    name = encodable(call.name) if isinstance(call.name, str) else ""
    arguments = call.arguments
    if call.status is ToolCallParseStatus.OK and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name, None, error="the arguments of the tool call are not valid JSON")
    if call.status is not ToolCallParseStatus.OK:
        return ToolCall(name, None, error=_parse_error(call))
    if not name:
        return ToolCall("", None, error="the tool call has no name")
    if not isinstance(arguments, dict):
        return ToolCall(name, None, error="the arguments of the tool call are not an object")
    if problem := unbounded(arguments):
        return ToolCall(name, None, error=problem)
    return ToolCall(name, encodable(arguments))


def _parse_error(call: ParsedToolCall) -> str:
    if call.status is ToolCallParseStatus.INVALID_JSON:
        try:
            json.loads(call.raw)
        except (ValueError, RecursionError) as error:
            return f"the tool call is not valid JSON: {error}"
        return "the tool call is not valid JSON"
    if call.status is ToolCallParseStatus.UNCLOSED_BLOCK:
        return "the tool call is not closed"
    if call.status is ToolCallParseStatus.MISSING_NAME:
        return "the tool call has no name"
    return f"the tool call is malformed ({call.status.value})"
