"""Where the time of a GRPO update goes: its parts one by one, ours beside those of PyTorch with transformers.

    python benchmarks/update_parts.py                        25M at 16 x 256, 4 x 1024 and 1 x 4096
    python benchmarks/update_parts.py --sizes 1M --lengths 256

The models and the steps are those of update_step.py, which measures the update as a whole. Here each part, forward and
backward, is a program of its own on tensors of the same shapes, of all layers; the table has seconds:

    products     of the tokens with the layers' weights, and both gradients of each
    attention    of rotated queries and keys, and values
    elementwise  what else is before the head: norms, rotation, activation, residuals, embedding (all of it is measured,
                 less the two above)
    head         hidden states to log-probabilities, in ours also the policy's entropy
    optimizer    AdamW with clipping
    rest         the update as a whole less all of these: the loss, sums of gradients, norms that are metrics; below
                 zero where parts take less time within a whole than alone

Arms are processes that take turns; a number is the median of the steps after one that warms up.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import turns
import update_step
from turns import RESULTS, ROOT
from update_step import SIZES, make_folder

PARTS = "products", "attention", "elementwise", "head", "optimizer", "rest", "update"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["25M"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=4096, help="of a step: rows times length (at least one row)")
    parser.add_argument("--steps", type=int, default=3, help="measured ones")
    parser.add_argument("--threads", type=int, default=turns.cores())
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "update_parts")
    parser.add_argument("--worker", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.remat = "none"
    if given.worker:
        turns.serve(MEASURED[given.worker](given.folder, *given.shape, given))
        return
    on, rows = turns.machine(given.threads), []
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(pathlib.Path(folder), **SIZES[size])
            for length in given.lengths:
                shape = max(1, given.tokens // length), length
                for arm, parts in measure(folder, shape, given).items():
                    rows.append({"size": size, "rows": shape[0], "length": length, "arm": arm, **parts})
                turns.write(given.output, "Where the time of an update goes", {"rows": rows}, table(rows), on)
    print("\n" + table(rows))


def measure(folder: str, shape: tuple[int, int], given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of each part, for each arm."""
    own = [sys.executable, str(ROOT / "benchmarks" / "update_parts.py"), "--folder", folder]
    own += ["--shape", *map(str, shape), "--threads", str(given.threads)]
    arms = [turns.Arm(name, [*own, "--worker", name], given.threads) for name in MEASURED]
    try:
        taken = {arm.name: [] for arm in arms}
        for _ in range(1 + given.steps):
            for arm in arms:
                taken[arm.name].append(arm.step())
    finally:
        for arm in arms:
            arm.close()
    return {name: derived([s["parts"] for s in steps[1:]]) for name, steps in taken.items()}


def derived(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians, with "elementwise" and "rest" in place of "layers"."""
    found = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
    layers = found.pop("layers")
    found["elementwise"] = layers - found["products"] - found["attention"]
    found["rest"] = found["update"] - layers - found["head"] - found["optimizer"]
    return {name: found[name] for name in PARTS}


def timed(programs: dict[str, Callable[[], Any]]) -> Callable[[], dict[str, Any]]:
    """A worker's step: the seconds of each program; a program returns when its work is done."""

    def step() -> dict[str, Any]:
        seconds = {}
        for name, program in programs.items():
            started = time.perf_counter()
            program()
            seconds[name] = time.perf_counter() - started
        return {"parts": seconds}

    return step


def projections(config: Any) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's products with weights."""
    d, f = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return [(d, heads), (d, kv), (d, kv), (heads, d), (d, f), (d, f), (f, d)]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def ours(folder: pathlib.Path, batch: int, length: int, given: argparse.Namespace):
    import jax
    import jax.numpy as jnp
    import optax

    from models import hf
    from models.attention import attention
    from models.layers import project
    from rti_jax.config import load_config
    from rti_jax.learner import make_optimizer
    from rti_jax.logprobs import token_logprobs

    update = update_step.ours(folder, batch, length, given)
    model, params = hf.load(folder, dtype="float32", remat="none", scan_layers=False)
    c = model.config
    tokens = jnp.asarray(update_step.data((batch, length), c.vocab_size)[0])
    positions, segments = jnp.tile(jnp.arange(length), (batch, 1)), jnp.ones_like(tokens)
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"optimizer.clip_norm={update_step.NORM}"])
    optimizer = make_optimizer(config.optimizer, params, 1000)

    def random(*shape):
        return jnp.asarray(normal(*shape))

    def both_ways(f, differentiated, *others):
        """f(differentiated, *others), and the gradient of the former for random ones of its values."""
        seeds = jax.tree.map(lambda x: random(*x.shape), jax.eval_shape(f, differentiated, *others))

        @jax.jit
        def run(differentiated, others, seeds):
            values, backward = jax.vjp(lambda x: f(x, *others), differentiated)
            return values, backward(seeds)

        return lambda: jax.block_until_ready(run(differentiated, others, seeds))

    def multiplied(pairs):
        return [project(x, kernel) for x, kernel in pairs]

    def attended(qkv, segments):
        return [attention(q, k, v, segments, model.execution) for q, k, v in qkv]

    def scored(both, tokens, segments):
        return token_logprobs(*both, tokens, segments, entropy=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def apply(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    applied = jax.tree.map(jnp.copy, params), optimizer.init(params)

    def optimize():
        nonlocal applied
        applied = jax.block_until_ready(apply(*applied, params))

    sizes, layers = projections(c), range(c.num_hidden_layers)
    heads = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
    qkv = [[random(batch, length, n, c.head_dim) for n in heads] for _ in layers]
    pairs = [(random(batch, length, i), random(i, o)) for _ in layers for i, o in sizes]
    last = random(batch, length, c.hidden_size), model.head(params)
    return timed(
        {
            "products": both_ways(multiplied, pairs),
            "attention": both_ways(attended, qkv, segments),
            "layers": both_ways(model.hidden, params, tokens, positions, segments),
            "head": both_ways(scored, last, tokens, segments),
            "optimizer": optimize,
            "update": update,
        }
    )


def pytorch(folder: pathlib.Path, batch: int, length: int, given: argparse.Namespace):
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    update = update_step.pytorch(folder, batch, length, given, compiled=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    c = model.config
    optimizer = torch.optim.AdamW(model.parameters(), lr=update_step.LR, fused=True)
    tokens = torch.from_numpy(update_step.data((batch, length), c.vocab_size)[0]).long()

    def leaf(*shape):
        return torch.from_numpy(normal(*shape)).requires_grad_()

    def both_ways(f, leaves):
        seeds = [torch.from_numpy(normal(*x.shape)) for x in f()]

        def run():
            torch.autograd.backward(f(), seeds)
            for x in leaves:
                x.grad = None

        return run

    layers = range(c.num_hidden_layers)
    pairs = [(leaf(batch, length, i), leaf(o, i)) for _ in layers for i, o in projections(c)]
    heads = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
    qkv = [[leaf(batch, n, length, c.head_dim) for n in heads] for _ in layers]
    hidden, weights = leaf(batch, length, c.hidden_size), list(model.parameters())

    def multiplied():
        return [F.linear(x, kernel) for x, kernel in pairs]

    def attended():
        return [F.scaled_dot_product_attention(*layer, is_causal=True, enable_gqa=True) for layer in qkv]

    def hidden_states():
        return [model.model(input_ids=tokens, use_cache=False).last_hidden_state]

    def head():
        logits = model.lm_head(hidden)[:, :-1]
        return [torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])]

    def optimize():
        torch.nn.utils.clip_grad_norm_(weights, update_step.NORM)
        optimizer.step()

    def with_gradients():
        for w in weights:
            w.grad = torch.ones_like(w)

    return timed(
        {
            "products": both_ways(multiplied, sum(pairs, ())),
            "attention": both_ways(attended, sum(qkv, [])),
            "layers": both_ways(hidden_states, weights),
            "head": both_ways(head, [hidden, model.lm_head.weight]),
            "gradients": with_gradients,  # not a part: what the optimizer needs
            "optimizer": optimize,
            "update": update,
        }
    )


MEASURED = {"rti-jax": ours, "torch": pytorch}


def table(rows: list[dict[str, Any]]) -> str:
    """A line per shape and arm: seconds of each part."""
    head = ["model", "rows x tokens", "arm", *(f"{part} s" for part in PARTS)]
    lines = [[r["size"], f"{r['rows']} x {r['length']}", r["arm"], *(f"{r[part]:.2f}" for part in PARTS)] for r in rows]
    return turns.table(head, lines)


if __name__ == "__main__":
    main()
