"""The same weights in transformers and here, and what must be equal: modules, logits, padding, packing, gradients."""

import jax
import numpy as np
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from models import hf
from rti_jax.logprobs import token_logprobs

TOLERANCE = 1e-5  # of the largest value
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 75)).astype(np.int32)  # 256 is padding: no gradient in torch


class Pair:
    """A model folder in transformers, float32, and here."""

    def __init__(self, path, tolerance: float = TOLERANCE):
        self.torch = AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager").eval()
        self.model, self.params = hf.load(path)
        self.tolerance = tolerance
        self._logits = jax.jit(lambda p, *a: self.model.hidden(p, *a) @ self.model.head(p))

    def ours(self, tokens, positions=None, segment_ids=None):
        """Logits [B, T, V]."""
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        segment_ids = np.ones_like(tokens) if segment_ids is None else segment_ids
        arrays = (np.asarray(x, np.int32) for x in (tokens, positions, segment_ids))
        return np.asarray(self._logits(self.params, *arrays))

    def reference(self, tokens):
        """transformers' logits [B, T, V]."""
        with torch.no_grad():
            return self.torch(torch.tensor(np.asarray(tokens)).long()).logits.numpy()

    def layers(self):
        """Our decoder layers, in order."""
        whole = nnx.merge(self.model._graph, self.params)
        graph, stacked = nnx.split(whole.layers)
        for i in range(len(jax.tree.leaves(stacked)[0])):
            unit = nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], stacked))
            yield from (getattr(unit, f"layer_{j}") for j in range(unit.size)) if hasattr(unit, "size") else (unit,)

    def assert_close(self, ours, reference):
        assert np.abs(reference).max() > 1  # std 0.2 gives logits that a mistake would move
        np.testing.assert_allclose(ours, reference, atol=self.tolerance * np.abs(reference).max())


_call = jax.jit(lambda module, *args: module(*args))  # compiled once for the layers of one shape


def check_modules(pair: Pair) -> int:
    """Each module of each layer on the inputs that it has in transformers; returns how many there were."""
    seen = {}

    def hook(name):
        def keep(module, args, kwargs, output):
            x = args[0] if args else kwargs["hidden_states"]
            seen[name] = (x.detach().numpy(), (output[0] if isinstance(output, tuple) else output).detach().numpy())

        return keep

    handles = []
    for i, layer in enumerate(pair.torch.model.layers):
        for name, module in layer.named_children():
            handles.append(module.register_forward_hook(hook((i, name)), with_kwargs=True))
    pair.reference(TOKENS)
    for handle in handles:
        handle.remove()
    positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)
    cos, sin = pair.model.config.rope.tables(positions, pair.model.config.head_dim, ones)
    arguments = {"self_attn": (cos, sin, ones), "linear_attn": (ones,)}
    for i, layer in enumerate(pair.layers()):
        for name in [name for j, name in seen if j == i]:
            x, expected = seen[i, name]
            ours = _call(getattr(layer, name), x, *arguments.get(name, ()))
            scale = np.abs(expected).max()
            np.testing.assert_allclose(ours, expected, atol=pair.tolerance * scale, err_msg=f"layer {i}: {name}")
    return len(seen)


def check_padding(pair: Pair, left: int) -> None:
    """30 tokens with `left` padding tokens before them and others behind are as without."""
    real, length = 30, TOKENS.shape[1]
    tokens, positions, segment_ids = (np.zeros((1, length), np.int32) for _ in range(3))
    part = slice(left, left + real)
    tokens[:], tokens[0, part], positions[0, part], segment_ids[0, part] = 7, TOKENS[0, :real], np.arange(real), 1
    ours = pair.ours(np.tile(tokens, (2, 1)), np.tile(positions, (2, 1)), np.tile(segment_ids, (2, 1)))
    pair.assert_close(ours[:1, part], pair.reference(TOKENS[:1, :real]))


def check_packing(pair: Pair, lengths=(20, 3, 40)) -> None:
    """Sequences of one row are as in rows of their own, and do not change by a bit when an earlier one does."""
    tokens, positions, segment_ids = (np.zeros(TOKENS.shape, np.int32) for _ in range(3))
    parts, start = [], 0
    for segment, n in enumerate(lengths, 1):
        part = slice(start, start + n)
        tokens[:, part], positions[:, part], segment_ids[:, part] = TOKENS[:, part], np.arange(n), segment
        parts.append(part)
        start += n
    ours = pair.ours(tokens, positions, segment_ids)
    for part in parts:
        pair.assert_close(ours[:, part], pair.reference(TOKENS[:, part]))
    wrong = pair.ours(tokens, positions, (segment_ids > 0).astype(np.int32))  # what a leak would give
    assert np.abs(wrong - ours)[:, parts[1]].max() > 0.1

    tokens[:, parts[0]] = (tokens[:, parts[0]] + 1) % 256
    again = pair.ours(tokens, positions, segment_ids)
    later = slice(parts[1].start, start)
    assert np.array_equal(again[:, later], ours[:, later])  # bit for bit
    assert not np.array_equal(again[:, parts[0]], ours[:, parts[0]])


def check_gradients(pair: Pair, tolerance: float = 2e-5) -> None:
    """Gradients of the summed log-probability by every parameter are those of torch's autograd."""
    temperature = 0.7
    positions, ones = np.broadcast_to(np.arange(75, dtype=np.int32), TOKENS.shape), np.ones_like(TOKENS)

    def total(params):
        hidden = pair.model.hidden(params, TOKENS, positions, ones)
        return token_logprobs(hidden, pair.model.head(params), TOKENS, ones, temperature, chunk=64)[0].sum()

    value, grads = jax.jit(jax.value_and_grad(total))(pair.params)
    ids = torch.tensor(TOKENS).long()
    pair.torch.zero_grad()
    table = (pair.torch(ids).logits / temperature).log_softmax(-1)
    reference = table[:, :-1].gather(-1, ids[:, 1:, None]).sum()
    reference.backward()
    np.testing.assert_allclose(value, reference.item(), rtol=1e-6)
    expected = dict(pair.torch.named_parameters())
    ours = dict(hf.to_hf(pair.model, grads))
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        theirs = expected[name].grad.numpy()
        assert np.abs(theirs).max() > 0, name
        np.testing.assert_allclose(gradient, theirs, atol=tolerance * np.abs(theirs).max(), err_msg=name)
