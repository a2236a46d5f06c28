"""Tiny random folders of every family, as transformers writes them, for parity tests: no download, a second to make.

Weights are drawn at a standard deviation of 0.2: at the usual 0.02 a wrong rotary base or a missing norm moves hardly
any logit past a test's tolerance. Norm scales are drawn around 1, so that a norm that is skipped or swapped shows.
"""

import json
import pathlib
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
BYTES = 256
VOCAB_SIZE = 272  # 256 bytes, the special tokens, and a few ids without a token, as real vocabularies are padded

# Behaves as Qwen3's: tools in the system turn, thinking kept only after the last user request, tool results of
# neighbouring tool messages inside one user turn, an empty thinking block when thinking is off.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with \
function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n\
</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set call = call.function if call.function else call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def byte_tokenizer():
    """A `PreTrainedTokenizerFast` of 256 bytes and Qwen3's special tokens (ids from 256 on); any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As in Qwen3: role markers are special, tool and thinking tags are added tokens that decoding keeps.
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_qwen3(path, **options: Any) -> pathlib.Path:
    """`make_model` of a Qwen3."""
    return make_model(path, "qwen3", **options)


SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rope_theta=10_000.0,
    bos_token_id=None,
    eos_token_id=BYTES + SPECIAL_TOKENS.index("<|im_end|>"),
    pad_token_id=BYTES + SPECIAL_TOKENS.index("<|endoftext|>"),
)
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},  # heads * head_dim differs from the width
    "qwen2": {},
    "llama": {"head_dim": 32},
    "qwen3_5_text": {
        "num_hidden_layers": 8,  # two units
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
}

FAMILY_SIZES["qwen3_5"] = FAMILY_SIZES["qwen3_5_text"]
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)


def make_model(
    path,
    model_type: str,
    *,
    tied: bool = True,
    seed: int = 0,
    std: float = 0.2,
    tokenizer: bool = True,
    max_shard_size: str = "5GB",
    dtype: str = "float32",
    **config_overrides: Any,
) -> pathlib.Path:
    """Writes a random model to the folder `path`: weights, config, generation_config and, if asked, the tokenizer.

    Two layers (Qwen3.5: eight), width 64, 4 heads over 2 key/value heads, mlp 128; `config_overrides` are fields of
    transformers' (text) config of that `model_type`; "qwen3_5" is multimodal, with a vision tower; a small
    `max_shard_size` ("100KB") gives a sharded folder with an index. The same arguments give the same weights.

    Returns:
      The folder, as a Path.
    """
    fields = SIZES | FAMILY_SIZES[model_type] | {"tie_word_embeddings": tied}
    if "rope_parameters" in config_overrides:
        del fields["rope_theta"]
    model = draw(new_model(model_type, fields | config_overrides), seed, std)
    path = pathlib.Path(path)
    model.to(dtype=getattr(__import__("torch"), dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    ends = [BYTES + SPECIAL_TOKENS.index(t) for t in ("<|im_end|>", "<|endoftext|>")]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2))
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path


def new_model(model_type: str, fields: dict[str, Any]):
    """transformers' model of these config fields, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if model_type == "qwen3_5":
        tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
        config = AutoConfig.for_model(model_type, text_config=dict(fields), vision_config=dict(VISION), **tied)
        return AutoModelForImageTextToText.from_config(config).float()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).float()


def draw(model, seed: int, std: float):
    """Draws the parameters of a torch model: matrices around 0, vectors (norms, biases) around 1.

    Of Qwen3.5, scales of norms that multiply by 1 + scale are drawn around 0, and decays between those of a head that
    remembers and of one that forgets: a head that forgets everything reads q k of one token, and where that is nearly
    0, its norm multiplies rounding errors in any implementation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    hybrid = "qwen3_5" in model.config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator)
            if name.endswith(".A_log"):
                parameter.copy_(torch.linspace(0.1, 8, parameter.numel()).log())
            elif name.endswith(".dt_bias"):
                parameter.copy_(noise - 2)
            elif parameter.ndim > 1 or (hybrid and not name.endswith("linear_attn.norm.weight")):
                parameter.copy_(noise)
            else:
                parameter.copy_(1 + noise)
    return model


def reference_logprobs(path, prompt_ids, response_ids, temperature: float = 1.0):
    """transformers' float32 log-probabilities of the response's tokens, as a numpy array of its length."""
    return ReferenceModel(path).logprobs(prompt_ids, response_ids, temperature)


class ReferenceModel:
    """transformers' own model in float32, loaded once."""

    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    def logits(self, ids):
        """[T, V] float32 torch tensor for one sequence of ids."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0].float()

    def logprobs(self, prompt_ids, response_ids, temperature: float = 1.0):
        """Log-probabilities of the response's tokens at `temperature`, numpy [len(response_ids)]."""
        logits = self.logits((*prompt_ids, *response_ids))[len(prompt_ids) - 1 : -1]
        table = (logits / temperature).log_softmax(-1)
        return table[range(len(response_ids)), list(response_ids)].numpy()
