"""Checks of `rti doctor` on the tokenizer: template, stop ids, padding, tool calls, vocabulary. Nothing is sampled."""

import json
from collections.abc import Sequence
from typing import Any

from envs.base import AssistantTurn, Message, ToolCall
from rti_jax import batching, frozen, luffy
from rti_jax.chat import Chat
from rti_jax.doctor_records import Finding, Subject, failure, not_applicable, ok, warning
from rti_jax.frozen_servers import FrozenServers
from rti_jax.types import Group, Status, Trajectory, Turn
from rti_jax.vllm_settings import text_config

TOOL = {
    "type": "function",
    "function": {
        "name": "find_place",
        "description": "Finds places.",
        "parameters": {
            "type": "object",
            "properties": {
                "keyword": {"type": "string"},
                "limit": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["keyword"],
        },
    },
}
# What breaks when arguments are quoted, escaped or split by hand.
ARGUMENTS = {"keyword": 'Saint-Étienne "Loire"\n\\ <b> 中', "limit": 3, "tags": ["a", "b, c", "{d}"]}
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
BROKEN = '<tool_call>\n{"name": "find_place", "arguments": {"keyword": 1\n</tool_call>'
EMPTY_THINKING = "<think>\n\n</think>\n\n"
ANOTHER_TEMPLATE = (
    "take tokenizer files and chat_template.jinja from the model that these weights belong to (an instruct or chat "
    "model of the family that config.json names)"
)


async def tokenizer(subject: Subject) -> Finding:
    """Every token has a row in the embedding, and text comes back from its ids."""
    rows, size = text_config(subject.folder)["vocab_size"], len(subject.chat.tokenizer)
    if size > rows:
        return failure(f"the tokenizer has {size} tokens, the model's embedding {rows} rows", ANOTHER_TEMPLATE)
    text = ARGUMENTS["keyword"]
    back = subject.chat.decode(subject.chat.tokenizer.encode(text, add_special_tokens=False))
    if back != text:
        return failure(f"{text!r} comes back from its ids as {back!r}", ANOTHER_TEMPLATE)
    return ok(f"{size} tokens in {rows} rows; text comes back from its ids")


async def template(subject: Subject) -> Finding:
    """What is rendered token by token is what the folder's own template renders, and turns only append."""
    if not subject.chat.tokenizer.chat_template:
        return failure("the model folder has no chat template", ANOTHER_TEMPLATE)
    afresh = []
    for thinking in (False, True):
        chat = Chat(subject.chat.tokenizer, subject.chat.model_type, thinking, subject.chat.stop_ids)
        mode = f"thinking {'on' if thinking else 'off'}"
        problem, rendered = _play(chat)
        if problem:
            return failure(f"with {mode} {problem}", ANOTHER_TEMPLATE)
        afresh += [f"{what} with {mode}" for what in rendered]
    tail = f"; rendered afresh, as a row of its own: {', '.join(afresh)}" if afresh else ""
    return ok(f"the folder's template renders the same; prompts append to what was sampled{tail}")


def _play(chat: Chat) -> tuple[str, list[str]]:
    """A conversation with a call, its result, an answer and a request: (the problem, what was rendered afresh)."""
    reasoning = "Let me see." if chat.thinking else ""
    prompt = chat.start(OPENING, [TOOL])
    exact = tuple(_own(chat, OPENING, tokenize=True, return_dict=False))
    if prompt != exact:
        return f"the first prompt differs from the folder's template: {_difference(chat, prompt, exact)}", []
    call = AssistantTurn("", (ToolCall("find_place", {"keyword": "Rome"}, id="call_0"),))
    found = {"role": "tool", "tool_call_id": "call_0", "name": "find_place", "content": "41.89,12.48"}
    turns = [(call, [found], "a tool result"), (AssistantTurn("Here."), [OPENING[1]], "a new request")]
    written, messages, afresh = list(OPENING), list(OPENING), []
    for turn, answer, what in turns:
        response = chat.encode_turn(turn, reasoning)
        parsed = chat.parse(prompt, response, [TOOL])
        history = [*written, parsed.as_written()]
        sampled, prompt = prompt + response, chat.extend(prompt, response, answer, [TOOL], history)
        written, messages = [*history, *answer], [*messages, parsed.as_message(), *answer]
        if prompt[: len(sampled)] != sampled:
            if prompt != chat.start(written, [TOOL]):
                return f"the prompt after {what} neither appends to what was sampled nor is a fresh render", []
            afresh.append(what)
        shown, wanted = (_without_empty(t) for t in (chat.decode(prompt), _own(chat, messages, tokenize=False)))
        if shown != wanted:
            return f"the prompt after {what} differs from the folder's template: {_parting(shown, wanted)}", []
        if problem := _asking(chat, prompt):
            return problem, []
    return "", afresh


def _asking(chat: Chat, prompt: tuple[int, ...]) -> str:
    """A role's prompt shares the history and ends in the same generation prompt."""
    asked, end = chat.ask(prompt, "Is it valid?"), len(chat.generation_prompt)
    if asked[: len(prompt) - end] != prompt[:-end] or asked[-end:] != prompt[-end:]:
        return "a role's prompt does not share the visible history token for token"
    return ""


def _own(chat: Chat, messages: Sequence[Message], **options: Any) -> Any:
    """The folder's own template."""
    return chat.tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, enable_thinking=chat.thinking, **options
    )


def _without_empty(text: str) -> str:
    """Qwen3's template drops the empty thinking block of earlier turns; sampled ids keep it."""
    return text.replace(EMPTY_THINKING, "")


def _difference(chat: Chat, first: Sequence[int], second: Sequence[int]) -> str:
    a, b = chat.decode(first), chat.decode(second)
    return "the same text, cut into other tokens" if a == b else _parting(a, b)


def _parting(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    return f"{first[max(0, at - 16) : at + 24]!r} here, {second[max(0, at - 16) : at + 24]!r} there"


async def stop_ids(subject: Subject) -> Finding:
    """The end of a turn ends a response, here and wherever the exported folder is served."""
    chat, file = subject.chat, subject.folder / "generation_config.json"
    name = chat.decode([chat.end_id])
    rows = text_config(subject.folder)["vocab_size"]
    if outside := [i for i in chat.stop_ids if not 0 <= i < rows]:
        return failure(
            f"stop ids {outside} are outside the vocabulary of {rows}", "correct eos_token_id in generation_config.json"
        )
    response = chat.encode_turn(AssistantTurn("It is there.", (ToolCall("find_place", ARGUMENTS, id="call_0"),)))
    if early := [i for i in response[:-1] if i in chat.stop_ids]:
        return failure(
            f"stop id {early[0]} ({chat.decode(early[:1])!r}) occurs inside a turn, which would be cut there",
            "take it out of eos_token_id in generation_config.json",
        )
    if not file.is_file():
        return warning(
            f"no generation_config.json: only the template's {name!r} ends a response, and the exported policy may not "
            "stop elsewhere",
            "copy the model's generation_config.json into its folder",
        )
    eos = json.loads(file.read_text()).get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    if chat.end_id not in eos:
        return failure(
            f"eos_token_id of generation_config.json is {eos}, without the template's end of turn "
            f"{chat.end_id} ({name!r})",
            f"add {chat.end_id} to eos_token_id in generation_config.json: the exported policy would not stop",
        )
    shown = ", ".join(f"{i} {chat.decode([i])!r}" for i in chat.stop_ids)
    return ok(f"a response ends at {shown}")


async def padding(subject: Subject) -> Finding:
    """End tokens are trained and padding is not, whatever their ids are."""
    chat, pad = subject.chat, subject.chat.tokenizer.pad_token_id
    prompt = chat.start([{"role": "user", "content": "x"}])
    response = (0, *chat.encode_turn(AssistantTurn("y")), chat.end_id)  # id 0 and the end token within a response
    turns = [
        Turn(f"pad/{i}/0", prompt, response, (-0.1,) * len(response), "stop", 0) for i in range(2)
    ]  # one of them wins
    members = tuple(
        Trajectory(f"pad/{i}", "pad", i, "t", (t,), Status.SUCCESS if i else Status.FAILURE, float(i))
        for i, t in enumerate(turns)
    )
    batches = batching.build([Group("pad", "t", members)], subject.config).microbatches
    trained = sorted(int(t) for b in batches for t in b.tokens[b.loss_mask])
    if trained != sorted(response * 2):
        return failure(
            f"{len(trained)} tokens of a batch are trained, but {2 * len(response)} were sampled",
            "masks must come from lengths: this is a fault of rti-jax, please report it",
        )
    if pad == chat.end_id:
        return warning(
            f"the pad token is the end of turn ({chat.end_id}); masks here come from lengths, so training is right, "
            "but tools that mask by id would not train the end of a turn",
            "give the tokenizer a pad_token of its own",
        )
    return ok(
        f"pad id {pad} is not the end of turn {chat.end_id}; masks come from lengths"
        if pad is not None
        else "no pad token is needed: masks come from lengths"
    )


async def tool_calls(subject: Subject) -> Finding:
    """A call is read as it was written, a broken one is an error for the policy."""
    chat = subject.chat
    prompt = chat.start(OPENING, [TOOL])
    calls = (ToolCall("find_place", ARGUMENTS), ToolCall("find_place", {"keyword": "Rome"}))
    response = chat.encode_turn(AssistantTurn("", calls), "Let me see." if chat.thinking else "")
    parsed = chat.parse(prompt, response, [TOOL])
    read = [(c.name, c.arguments, c.error) for c in parsed.turn.tool_calls]
    wanted = [(c.name, c.arguments, None) for c in calls]
    if read != wanted or not parsed.complete:
        return failure(f"calls {wanted} are read as {read}", ANOTHER_TEMPLATE)
    broken = chat.encode_turn({"role": "assistant", "content": BROKEN}, "Hm." if chat.thinking else "")
    if not chat.parse(prompt, broken, [TOOL]).malformed:
        return failure("a broken tool call is not reported to the policy", ANOTHER_TEMPLATE)
    return ok("two calls come back as they were written; a broken one is an error for the policy")


async def teacher(subject: Subject) -> Finding:
    """The vocabulary of a teacher, and of frozen models in the roles, must be the policy's."""
    config = subject.config
    folders, servers = config.frozen_folders, config.loss.teacher.urls
    if config.loss.baseline == "opd" and config.loss.teacher.path:
        folders = {**folders, "loss.teacher.path": config.loss.teacher.path}
    if config.loss.teacher.rollouts:
        episodes = luffy.read_episodes(config.loss.teacher.rollouts)
        return ok(f"stored rollouts of {len(episodes)} tasks, encoded with the policy's tokenizer")
    if not folders and not servers:
        return not_applicable("the config names no teacher and no frozen model")
    for key, folder in folders.items():
        frozen.check_vocabulary(subject.chat, folder, key)
    if servers:
        await FrozenServers(servers, subject.chat.tokenizer, concurrency=1).close()
    return ok(f"the policy's: {', '.join([*folders, *servers])}")
