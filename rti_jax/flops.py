"""Floating-point operations of a model, counted from its name table and sizes.

XLA's `cost_analysis` counts the body of a loop once, so it sees one layer of a scanned model; these are formulas, and a
test compares them with XLA's count of an unrolled one. A product [m, k] x [k, n] is 2 m k n operations; norms,
activations and softmax are left out (about 1% at the sizes that matter).
"""

import dataclasses
import math
from typing import Any

from models.gated_delta import CHUNK
from models.names import Tensor


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of one forward pass, apart by what the backward pass makes of them.

    Attributes:
      matrices: products with parameters inside the layers. closing: those of them that close a layer, whose result
        only the next layer needs. attention: scores and weighted values of full attention. recurrence: the gated
        delta rule. head: logits.
    """

    matrices: float
    closing: float
    attention: float
    recurrence: float
    head: float

    @property
    def forward(self) -> float:
        return self.matrices + self.attention + self.recurrence + self.head

    @property
    def model(self) -> float:
        """Forward and backward of the mathematics, three times the forward pass: what "MFU" divides by."""
        return 3 * self.forward

    def update(self, remat: str, attention: str = "blockwise") -> float:
        """Forward and backward as they are computed.

        Attention computes its scores again in the backward pass (five products where the forward pass has two), the
        head its logits (models/attention.py, logprobs.py); rematerialisation runs each layer again, but for its
        closing product; "attention" spares attention, "dots" all but recurrences. cuDNN's is never spared.

        Args:
          remat, attention: of `Execution`.
        """
        layers = self.matrices + self.recurrence
        spared = self.attention if attention != "cudnn" else 0.0
        whole = layers - self.closing + self.attention
        again = {"none": 0.0, "dots": self.recurrence + self.attention - spared, "attention": whole - spared}
        return 3 * layers + 3.5 * self.attention + 4 * self.head + again.get(remat, whole)


def forward(model: Any, tokens: float, pairs: float) -> Flops:
    """Operations of a forward pass.

    Args:
      model: models.hf.LanguageModel.
      tokens: in all rows. pairs: (query, key) pairs that attention computes, `causal_pairs` per row.
    """
    config, width = model.config, model.config.hidden_size
    attention = 4 * _attention_layers(config) * config.num_attention_heads * config.head_dim * pairs
    matrices = {t.path: 2 * tokens * math.prod(t.full_shape) for t in model.tensors if _multiplied(t)}
    return Flops(
        matrices=sum(matrices.values()),
        closing=sum(count for path, count in matrices.items() if "down_proj" in path),
        attention=attention,
        recurrence=tokens * _recurrent_layers(config) * _delta_rule(config),
        head=2 * tokens * width * config.vocab_size,
    )


def causal_pairs(length: float) -> float:
    """Pairs of a row that is one segment, a token seeing itself and what is before it; packed rows have fewer."""
    return length * (length + 1) / 2


def shared_pairs(length: float, devices: int) -> float:
    """`causal_pairs` of a row that devices share, times what waiting costs: they take as long as the last of them.

    Each has the queries of an equal part; the last part's see 2 - 1 / devices times as many keys as the average.
    """
    return causal_pairs(length) * (2 - 1 / devices)


def _multiplied(tensor: Tensor) -> bool:
    """True for the matrices of layers; depthwise convolutions are [taps, 1, channels], and the head is apart."""
    return bool(tensor.layers) and tensor.path[-1] == "kernel" and len(tensor.shape) == 2


def _recurrent_layers(config: Any) -> int:
    return list(getattr(config, "layer_types", ())).count("linear_attention")


def _attention_layers(config: Any) -> int:
    return config.num_hidden_layers - _recurrent_layers(config)


def _delta_rule(config: Any) -> float:
    """Operations per token of one layer's chunked gated delta rule, in the order of models/gated_delta.py."""
    if not _recurrent_layers(config):
        return 0.0
    c, key, value = CHUNK, config.linear_key_head_dim, config.linear_value_head_dim
    shared = 4 * c * key  # k k^T and q k^T, of a key head
    decays = 2 * c * c + 2 * c  # sums of log decays, as products with a triangle
    inverse = 2 / 3 * c * c  # halves joined by two products, down to pairs
    applied = 2 * c * (value + key)  # the inverse times values and keys
    handed_on = 6 * key * value + 2 * c * value  # from and to the state, and within the chunk
    return config.linear_num_key_heads * shared + config.linear_num_value_heads * (
        decays + inverse + applied + handed_on
    )
