"""The small tokenizer: Qwen3's format by its own template and by the renderer, names cut the same everywhere."""

import pytest
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

from rti_jax import tokenizer as tokenizer_lib

PREFIX = '{"name": "search_places", "arguments": {"keyword": "'
TEXTS = ["From Springfield, Illinois to Decatur.\n39.80,-89.65\nSpringfield | Illinois\n"] * 20
TOOLS = [{"type": "function", "function": {"name": "search_places", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "1", "function": {"name": "search_places", "arguments": {"keyword": "Zürich"}}}
CONVERSATIONS = {
    "plain": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
    "tools": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Wie weit?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "A", "tool_call_id": "1"},
        {"role": "tool", "content": "B", "tool_call_id": "1"},
    ],
    "thinking": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "dropped", "reasoning_content": "old"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "kept", "tool_calls": [CALL]},
        {"role": "tool", "content": "A", "tool_call_id": "1"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_lib.train(TEXTS, vocab_size=400, phrases=[PREFIX, '"}}\n'])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_template_renders_what_the_renderer_renders(tokenizer, name, tools):
    messages = CONVERSATIONS[name]
    renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=True))
    ours = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert ours == tokenizer.decode(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))


def test_generation_prompt_without_thinking_is_closed(tokenizer):
    text = tokenizer.apply_chat_template(
        CONVERSATIONS["plain"], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_name_is_cut_the_same_after_a_space_a_quote_and_a_newline(tokenizer):
    name = tokenizer.tokenize("Springfield")
    for before in (" ", PREFIX, "\n"):
        assert tokenizer.tokenize(before + "Springfield")[-len(name) :] == name


def test_phrases_and_coordinates_are_few_tokens(tokenizer):
    assert tokenizer.tokenize(PREFIX) == [PREFIX]
    assert tokenizer.tokenize("39.80,-89.65") == ["39.", "80", ",", "-89.", "65"]


@pytest.mark.parametrize("text", ['Ñandú 東京 \t<tool_call>\n"}}\n', "a  b\n\n-12.5,,", "<|im_start|>x<|im_end|>"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_token_is_eos_and_pad_is_another(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ValueError, match="need 256"):
        tokenizer_lib.train(TEXTS, vocab_size=200)


def test_common_lines_leave_markup_and_rare_lines_out():
    texts = [f"<tool_call>always here\nrare {i} line\n" for i in range(50)]
    assert tokenizer_lib.common_lines(texts) == ["always here\n"]
