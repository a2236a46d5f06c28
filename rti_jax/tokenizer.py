"""A small tokenizer with Qwen3's special tokens and chat template, for policies that train on a laptop.

It drives the very code path of the real Qwen3 tokenizer (same special tokens, same rendering and parsing), with two
differences that make a policy of a million parameters able to copy names and numbers:

* a space, a sign and a two-digit group are tokens of their own, so a name or a coordinate is cut the same everywhere;
* *phrases*: text that every prompt repeats (tool schemas, JSON scaffolding of calls) is one token each, so an episode
  of four turns has fewer than 250 tokens.
"""

import collections
import pathlib
import re
from collections.abc import Iterable, Sequence

# Order as in Qwen3: the first three are special (skipped on decoding), the others are plain added tokens.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MINIMUM = 256 + len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)  # vocabulary of bytes alone
TEMPLATE = pathlib.Path(__file__).with_name("qwen3_template.jinja")

# Words, whole degrees with their sign ("-89."), groups of two digits, and every other character by itself.
PIECES = r"\p{L}+|-?\d+\.|\d{2}|\d|[^\p{L}\d]"


def common_lines(texts: Sequence[str], *, share: float = 0.05, min_chars: int = 6) -> list[str]:
    """Lines (with their newline) and parts of lines between markup that `share` of the texts have."""
    markup = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKUP_TOKENS)))
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update({line for piece in markup.split(text) for line in piece.splitlines(keepends=True)})
    lines = [line for line, n in counts.items() if n >= share * len(texts) and len(line) >= min_chars]
    return sorted(lines, key=lambda line: (-len(line), line))


def train(texts: Iterable[str], *, vocab_size: int, phrases: Sequence[str] = (), max_length: int = 4096):
    """Trains a byte-level BPE on `texts` and returns a `transformers` fast tokenizer.

    Args:
      texts: rendered transcripts; special tokens and phrases are cut out before merges are counted.
      vocab_size: size of the whole vocabulary, special tokens and phrases included.
      phrases: strings that become one token each.
      max_length: written to the tokenizer's configuration.

    Raises:
      ValueError: if the phrases leave no room for bytes and merges.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added = [*SPECIAL_TOKENS, *MARKUP_TOKENS, *dict.fromkeys(phrases)]
    room = vocab_size - len(added)
    if room < 256:
        raise ValueError(f"a vocabulary of {vocab_size} leaves {room} tokens beside {len(added)} fixed ones; need 256")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    splitter = re.compile("|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)))
    tokenizer.train_from_iterator((piece for text in texts for piece in splitter.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(t, special=t in SPECIAL_TOKENS, normalized=False) for t in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
