"""Token-exact conversations: prompts against the template itself, sampled ids kept, completions never raise."""

import functools
import importlib.util
import os
import pathlib

import pytest
from tokenizers import AddedToken

from envs.base import AssistantTurn, ToolCall
from rti_jax.chat import Chat
from rti_jax.config import ConfigError
from tests.fakes import TOOLS, call, tiny_chat, tiny_tokenizer

START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Route?"}]
RESULT = [{"role": "tool", "tool_call_id": "c", "name": "look", "content": "X4711"}]


def template(chat, messages, tools=TOOLS, generate=True):
    """What the tokenizer's own chat template gives."""
    text = chat.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generate, enable_thinking=chat.thinking, tokenize=False
    )
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


@functools.cache
def real_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def real_qwen3(thinking):
    folder = os.environ.get("RTI_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("RTI_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer")
    return Chat(real_tokenizer(folder), "qwen3", thinking)


@pytest.fixture(params=["tiny", "real"])
def make_chat(request):
    return tiny_chat if request.param == "tiny" else real_qwen3


class TestPrompts:
    @pytest.mark.parametrize("thinking", [True, False])
    def test_start_is_the_template(self, make_chat, thinking):
        chat = make_chat(thinking)
        assert chat.start(START, TOOLS) == template(chat, START)
        assert chat.start(START) == template(chat, START, tools=None)
        assert chat.start(START)[-len(chat.generation_prompt) :] == chat.generation_prompt

    def test_extension_by_a_tool_result_is_the_template(self, make_chat):
        """The newline after the end token included: the engine stops at the end token and never samples it."""
        chat = make_chat(True)
        turn = AssistantTurn("", (ToolCall("look", {"name": "Ada"}),))
        response = chat.encode_turn(turn, reasoning="I look it up.")
        prompt = chat.start(START, TOOLS)
        message = turn.as_message() | {"reasoning_content": "I look it up."}
        extended = chat.extend(prompt, response, RESULT, TOOLS)
        assert extended == template(chat, [*START, message, *RESULT])
        assert extended[: len(prompt) + len(response)] == prompt + response

    def test_sampled_ids_are_kept_where_the_tokenizer_writes_others(self):
        chat = tiny_chat()
        he, llo, hello = chat.tokenizer.convert_tokens_to_ids(["he", "llo", "hello"])
        sampled = (he, llo, chat.end_id)
        assert chat.encode_text("hello") == (hello, chat.end_id)  # what a re-encoding would give
        prompt = chat.start(START, TOOLS)
        after = chat.extend(prompt, sampled, [{"role": "user", "content": "x"}], TOOLS)
        assert after[: len(prompt) + 3] == prompt + sampled

    def test_a_new_user_message_drops_thinking_and_renders_afresh(self, make_chat):
        chat = make_chat(True)
        prompt = chat.start(START)
        response = chat.encode_turn(AssistantTurn("Which city?"), reasoning="Unclear.")
        user = [{"role": "user", "content": "Bern."}]
        history = [*START, chat.parse(prompt, response).as_written()]
        after = chat.extend(prompt, response, user, history=history)
        assert after[: len(prompt) + len(response)] != prompt + response
        assert after == template(chat, [*START, {"role": "assistant", "content": "Which city?"}, *user], tools=None)
        with pytest.raises(ValueError, match="history"):
            chat.extend(prompt, response, user)

    def test_without_thinking_a_user_message_extends(self, make_chat):
        chat = make_chat(False)
        prompt, response = chat.start(START), chat.encode_turn(AssistantTurn("Which city?"))
        after = chat.extend(prompt, response, [{"role": "user", "content": "Bern."}])
        assert after[: len(prompt) + len(response)] == prompt + response

    def test_a_truncated_response_gets_an_end_token_in_the_prompt(self):
        chat = tiny_chat()
        prompt, response = chat.start(START), tuple(chat.tokenizer.encode("Which ci"))
        after = chat.extend(prompt, response, [{"role": "user", "content": "?"}])
        assert after[: len(prompt) + len(response) + 1] == (*prompt, *response, chat.end_id)

    def test_another_end_token_is_kept_and_the_templates_follows(self):
        tokenizer = tiny_tokenizer()
        other = tokenizer.convert_tokens_to_ids("X")
        chat = Chat(tokenizer, "qwen3", False, stop_ids=[other])
        prompt, response = chat.start(START), (*tokenizer.encode("Ja"), other)
        assert chat.parse(prompt, response).complete and chat.parse(prompt, response).turn.content == "Ja"
        after = chat.extend(prompt, response, [{"role": "user", "content": "?"}])
        assert after[: len(prompt) + len(response) + 1] == (*prompt, *response, chat.end_id)

    @pytest.mark.parametrize("thinking", [True, False])
    def test_ask_is_one_more_user_message(self, make_chat, thinking):
        chat = make_chat(thinking)
        asked = chat.ask(chat.start(START, TOOLS), "Judge: <tool_call>")
        assert asked == chat.start([*START, {"role": "user", "content": "Judge: <tool_call>"}], TOOLS)
        assert asked[-len(chat.generation_prompt) :] == chat.generation_prompt
        with pytest.raises(ValueError, match="generation prompt"):
            chat.ask(asked[:-1], "again")

    def test_ask_keeps_sampled_ids(self):
        chat = tiny_chat(thinking=True)
        he, llo = chat.tokenizer.convert_tokens_to_ids(["he", "llo"])
        prompt = chat.extend(chat.start(START, TOOLS), (he, llo, chat.end_id), RESULT, TOOLS)
        asked = chat.ask(prompt, "Judge.")
        shared = len(prompt) - len(chat.generation_prompt)
        assert asked[:shared] == prompt[:shared]

    @pytest.mark.parametrize("thinking", [True, False])
    def test_encoded_turns_parse_back(self, make_chat, thinking):
        chat = make_chat(thinking)
        turn = AssistantTurn("I look.", (ToolCall("look", {"name": "Zürich"}), ToolCall("look", {"name": "Bern"})))
        ids = chat.encode_turn(turn, reasoning="Two." if thinking else "")
        assert ids[-1] == chat.end_id and ids.count(chat.end_id) == 1
        parsed = chat.parse(chat.start(START, TOOLS), ids, TOOLS)
        assert [(c.name, c.arguments) for c in parsed.turn.tool_calls] == [
            ("look", {"name": "Zürich"}),
            ("look", {"name": "Bern"}),
        ]
        assert parsed.turn.content == "I look." and parsed.complete and parsed.malformed is None
        assert parsed.reasoning == ("Two." if thinking else "")


class TestParse:
    def parse(self, text, *, end="<|im_end|>", thinking=True, prompt_tail=""):
        chat = tiny_chat(thinking)
        encode = chat.tokenizer.encode
        return chat.parse((*chat.start(START, TOOLS), *encode(prompt_tail)), encode(text + end), TOOLS)

    @pytest.mark.parametrize("tail", ["<think>\n", ""])
    def test_a_closer_without_opener_splits(self, tail):
        parsed = self.parse("R</think>\n\nA", prompt_tail=tail)
        assert (parsed.reasoning, parsed.turn.content, parsed.complete) == ("R", "A", True)
        assert parsed.text == "R</think>\n\nA" and parsed.body == "A"

    @pytest.mark.parametrize(
        "thought",
        ["<think>\ntry {}\n</think>\n\n", "try {}\n</think>\n\n", "<think>\n{}{}</think>\n\n<think>{}</think>"],
    )
    def test_a_call_in_the_thinking_is_not_executed(self, thought):
        parsed = self.parse(thought.replace("{}", call("answer", code="1")) + call("look", name="Ada"))
        assert [c.name for c in parsed.turn.tool_calls] == ["look"]
        assert "answer" in parsed.reasoning and parsed.malformed is None

    def test_a_call_in_thinking_that_never_closes_is_not_executed(self):
        parsed = self.parse("<think>\nI will " + call("answer", code="1"))
        assert parsed.turn == AssistantTurn() and not parsed.complete and parsed.malformed

    def test_thinking_does_not_reach_the_environment(self):
        parsed = self.parse("<think>\nSECRET\n</think>\n\nHi " + call("look", name="Ada"))
        assert "SECRET" not in repr(parsed.turn) and parsed.turn.content.strip() == "Hi"

    @pytest.mark.parametrize(
        "body, error",
        [
            ('{"name": "look", "arguments": {"a": 1}', "not valid JSON"),
            ('{"a": 1', "not valid JSON"),
            ('{"arguments": {}}', "no name"),
            ('{"name": 5, "arguments": {}}', "no name"),
            ('{"name": "look", "arguments": [1]}', "not an object"),
            ('{"name": "look", "arguments": "x"}', "not valid JSON"),
            ("[" * 3000, "tool call"),
            ('{"name": "look", "arguments": {"a": ' + "9" * 5000 + "}}", "unreadable"),
        ],
    )
    def test_a_malformed_call_is_an_error_of_that_call(self, body, error):
        parsed = self.parse(f"<tool_call>\n{body}\n</tool_call>")
        (bad,) = parsed.turn.tool_calls
        assert error in bad.error and bad.arguments is None and error in parsed.malformed
        assert "<tool_call>" in parsed.as_message()["content"]

    def test_the_other_calls_stand(self):
        parsed = self.parse(call("look", name="A") + "\n<tool_call>\n{\n</tool_call>\n" + call("look", name="B"))
        assert [bool(c.error) for c in parsed.turn.tool_calls] == [False, True, False]
        assert len({c.id for c in parsed.turn.tool_calls}) == 3

    def test_arguments_as_a_string_of_json(self):
        parsed = self.parse('<tool_call>\n{"name": "look", "arguments": "{\\"name\\": \\"A\\"}"}\n</tool_call>')
        assert parsed.turn.tool_calls[0].arguments == {"name": "A"}

    @pytest.mark.parametrize("text, malformed", [("Hel", "truncated"), ('<tool_call>\n{"name"', "truncated")])
    def test_truncated(self, text, malformed):
        parsed = self.parse(text, end="")
        assert not parsed.complete and parsed.malformed == malformed

    @pytest.mark.parametrize("text", ["", "<think>\n\n</think>\n\n", "  \n"])
    def test_empty(self, text):
        assert self.parse(text).malformed == "empty"

    def test_ids_of_calls_are_unique_in_a_conversation(self):
        chat = tiny_chat()
        prompt = chat.start(START, TOOLS)
        response = chat.encode_text(call("look", name="A"))
        later = chat.extend(prompt, response, RESULT, TOOLS)
        ids = [chat.parse(p, response, TOOLS).turn.tool_calls[0].id for p in (prompt, later)]
        assert ids[0] != ids[1]


def shipped_template(name):
    """A published chat template, as trl carries it."""
    spec = importlib.util.find_spec("trl")
    folder = os.environ.get("RTI_CHAT_TEMPLATES") or (spec and pathlib.Path(spec.origin).parent / "chat_templates")
    if not folder:
        pytest.skip("RTI_CHAT_TEMPLATES names no folder with trl's chat templates, and trl is not installed")
    return (pathlib.Path(folder) / f"{name}.jinja").read_text()


def bytes_with(template, *more):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in more])
    tokenizer.chat_template = template
    return tokenizer


VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA3 = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)
# Qwen2.5's layout, in short; a user's folder brings its own.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content or '' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Books.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "nights": {"type": "integer"},
                    "price": {"type": "number"},
                    "rooms": {"type": "array", "items": {"type": "object"}},
                },
            },
        },
    }
]
ARGUMENTS = {"city": "Zürich <b>\n10", "nights": 3, "price": 2.5, "rooms": [{"beds": 2, "view": "lake"}]}


class TestOtherFamilies:
    """Each family's format of thinking and calls: rendered as its template does, parsed back."""

    @pytest.fixture(params=["qwen3_5", "qwen2", "chatml", "llama3"])
    def chat(self, request):
        if request.param == "qwen3_5":
            return Chat(bytes_with(shipped_template("qwen3_5_think"), *VISION), "qwen3_5", True)
        if request.param == "llama3":
            dated = "{% set date_string = '26 Jul 2024' %}" + shipped_template("llama3_2")  # not today's
            tokenizer = bytes_with(dated, *LLAMA3)
            tokenizer.bos_token = "<|begin_of_text|>"
            return Chat(tokenizer, "llama", False)
        template = CHATML if request.param == "chatml" else shipped_template("qwen2_5")
        return Chat(bytes_with(template), "llama" if request.param == "chatml" else "qwen2", False)

    def test_start_is_the_template(self, chat):
        assert chat.start(START, TYPED) == template(chat, START, TYPED)
        assert chat.start(START) == template(chat, START, None)

    def test_turns_parse_back(self, chat):
        turn = AssistantTurn(
            "" if "eot" in str(chat.decode([chat.end_id])) else "I book.", (ToolCall("book", ARGUMENTS),)
        )
        ids = chat.encode_turn(turn, reasoning="Two." if chat.thinking else "")
        assert ids[-1] == chat.end_id and ids.count(chat.end_id) == 1
        parsed = chat.parse(chat.start(START, TYPED), ids, TYPED)
        assert [(c.name, c.arguments) for c in parsed.turn.tool_calls] == [("book", ARGUMENTS)]
        assert (parsed.turn.content, parsed.complete, parsed.malformed) == (turn.content, True, None)
        assert parsed.reasoning == ("Two." if chat.thinking else "")

    def test_a_tool_result_extends_the_sampled_ids_as_the_template_does(self, chat):
        turn = AssistantTurn("", (ToolCall("look", {"name": "Ada"}, id="c"),))
        response = chat.encode_turn(turn, reasoning="Why." if chat.thinking else "")
        prompt = chat.start(START, TOOLS)
        extended = chat.extend(prompt, response, RESULT, TOOLS)
        assert extended[: len(prompt) + len(response)] == prompt + response
        message = turn.as_message() | ({"reasoning_content": "Why."} if chat.thinking else {})
        assert extended == template(chat, [*START, message, *RESULT])

    def test_a_user_message_follows(self, chat):
        response, user = chat.encode_turn(AssistantTurn("Where?"), "Hm." if chat.thinking else ""), {"role": "user"}
        prompt, new = chat.start(START), [user | {"content": "Bern."}]
        history = [*START, {"role": "assistant", "content": "Where?"}]
        after = chat.extend(prompt, response, new, history=history)
        assert chat.decode(after).endswith(chat.decode(chat.start([*START, *new])[-len(chat.generation_prompt) - 10 :]))
        if not chat.thinking:
            assert after[: len(prompt) + len(response)] == prompt + response
        truncated = chat.extend(prompt, response[:3], new, history=history)
        if not chat.thinking:
            assert truncated[: len(prompt) + 4] == (*prompt, *response[:3], chat.end_id)

    @pytest.mark.parametrize("thinking", [True, False])
    def test_qwen3_5_opens_thinking_in_the_prompt(self, thinking):
        chat = Chat(bytes_with(shipped_template("qwen3_5_think"), *VISION), "qwen3_5", thinking)
        assert chat.start(START, TYPED) == template(chat, START, TYPED)
        assert chat.decode(chat.generation_prompt).endswith("<think>\n" if thinking else "<think>\n\n</think>\n\n")
        xml = "<tool_call>\n<function=book>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
        text = ("I think of " + xml + "</think>\n\n" if thinking else "") + xml + "<|im_end|>"
        parsed = chat.parse(chat.start(START, TYPED), chat.tokenizer.encode(text), TYPED)
        assert [(c.name, c.arguments) for c in parsed.turn.tool_calls] == [("book", {"city": "Bern"})]
        broken = chat.parse(chat.start(START, TYPED), chat.tokenizer.encode(text.replace("<function=book>", "")), TYPED)
        assert broken.malformed and broken.turn.tool_calls[0].arguments is None

    def test_a_template_that_drops_thinking_renders_afresh(self):
        from tiny_models import CHAT_TEMPLATE

        chat = Chat(bytes_with(CHAT_TEMPLATE), "qwen2", True)
        prompt, response = chat.start(START), chat.encode_text("<think>\nU\n</think>\n\nWhere?")
        with pytest.raises(ValueError, match="history"):
            chat.extend(prompt, response, [{"role": "user", "content": "Bern."}])
        assert chat.extend(prompt, response, RESULT)[: len(prompt) + len(response)] == prompt + response

    def test_without_a_template(self):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ConfigError, match="does not fit the template chat template: .*chat_template"):
            Chat(tokenizer, "qwen2", False)


class TestFolder:
    def test_every_end_token_of_generation_config(self, tmp_path):
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
        chat = Chat.from_folder(tmp_path, thinking=True)
        assert {7, 9, chat.end_id} <= set(chat.stop_ids)
        assert chat.parse((1,), (70, 9)).complete

    @pytest.mark.parametrize(
        "files, words",
        [
            ({}, "config.json is missing"),
            ({"config.json": '{"model_type": "qwen3"}'}, "tokenizer"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path, files, words):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=words) as error:
            Chat.from_folder(tmp_path, thinking=True)
        assert "\n" not in str(error.value)

    def test_unknown_model_type(self):
        with pytest.raises(ConfigError, match="'gpt2'; known: .*qwen3"):
            Chat(tiny_tokenizer(), "gpt2", True)

    def test_a_tokenizer_without_the_special_tokens(self):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
        with pytest.raises(ConfigError, match="does not fit the qwen3 chat template"):
            Chat(bare, "qwen3", True)
