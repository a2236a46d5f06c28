"""Rendering by the tokenizer's own chat template, for families that `renderers` has no renderer for.

A template is a black box, so the next turn is found by rendering a stand-in conversation of the same shape: what stands
behind its assistant turn is appended to the sampled ids. Where the template changes an earlier turn when another
follows (drops its thinking, say), nothing can be appended, and the caller renders afresh.
"""

from collections.abc import Sequence
from typing import Any

from renderers import DefaultRenderer
from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig

USER = {"role": "user", "content": "x"}


class TemplateRenderer(DefaultRenderer):
    """`renderers.DefaultRenderer`, with the template's own end of turn, and turns that extend sampled ids.

    Tool calls are JSON objects in <tool_call> tags (Hermes, Qwen2.5).

    Raises ValueError if the tokenizer has no chat template or the template ends an assistant's turn without a special
    token.
    """

    def __init__(self, tokenizer, thinking: bool):
        super().__init__(tokenizer, DefaultRendererConfig(tool_parser="qwen3", enable_thinking=thinking))
        thinks = tokenizer.convert_tokens_to_ids("</think>") not in (None, tokenizer.unk_token_id)
        self._assistant = {"role": "assistant", "content": "<think>\nx\n</think>\n\ny" if thinks else "y"}
        self._bare = self.render_ids([USER, self._assistant])
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        prompt = self.render_ids([USER], add_generation_prompt=True)
        ends = [i for i, token in enumerate(self._bare) if i >= len(prompt) and token in special]
        if not ends:
            raise ValueError("its chat template ends an assistant's turn without a special token")
        self._end = ends[-1]

    def get_stop_token_ids(self) -> list[int]:
        return [self._bare[self._end]]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RenderedTokens | None:
        """Prompt, sampled ids, and what the template puts behind them; None where it changes the earlier turn."""
        whole = self.render_ids([USER, self._assistant, *new_messages], add_generation_prompt=True)
        if whole[: len(self._bare)] != self._bare:
            return None
        sampled = list(previous_completion_ids)
        if sampled[-1:] != [self._bare[self._end]]:
            sampled.append(self._bare[self._end])
        return RenderedTokens([*previous_prompt_ids, *sampled, *whole[self._end + 1 :]], [])
