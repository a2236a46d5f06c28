"""One GRPO update: tokens per second and memory, against the same step in PyTorch with transformers.

    python benchmarks/update_step.py                              1M, 25M and 150M parameters; 256, 1024 and 4096 tokens
    python benchmarks/update_step.py --sizes 25M --lengths 1024
    python benchmarks/update_step.py --tunix-python VENV/bin/python      and against google-tunix, see tunix_step.py

Every arm loads the same random Qwen3 folder, in float32, and takes the same step on the same tokens: forward pass, the
clipped surrogate with three quarters of every row trained, backward pass, clipping, AdamW. Arms are processes that take
turns step by step, on the same cores, with the same allocator (turns.py); a number is the median of the steps after two
that warm up. Loss and gradient norm of the first step are compared, so that the arms are known to do the same work.
Tokens are rows times length, for all of them. PyTorch is spared the entropy of the policy, which our step also reports.
At 150M all arms compute the layers again in the backward pass, as one does with such models: transformers by gradient
checkpointing, ours all but attention (`model.remat=attention`), see the memory that each took. Fewer steps are taken,
and google-tunix is left out beside the three others, which fill 24 GB (`--sizes 150M --arms rti-jax` has it). Where
google-tunix is killed, its place is empty.
Memory is the process's peak during the measured steps less what it held when model and optimizer were ready; what a
compiler leaves behind counts, some 0.3 GB for ours, which shows at small sizes alone.
"""

import argparse
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import turns
from turns import RESULTS, ROOT

ARMS = "rti-jax", "torch", "torch-compiled"
SIZES: dict[str, dict[str, int]] = {
    "1M": dict(width=128, mlp=384, layers=4, heads=4, kv=2, vocabulary=2048),
    "25M": dict(width=384, mlp=1024, layers=8, heads=6, kv=2, vocabulary=32768),
    "150M": dict(width=768, mlp=2304, layers=18, heads=12, kv=4, vocabulary=32768),
}
LARGE = ("150M",)
REMAT = {"none": "", "attention": ", layers computed again, ours but attention", "full": ", layers computed again"}
CLIP, LR, WEIGHT_DECAY, BETAS, NORM = 0.2, 1e-6, 0.1, (0.9, 0.98), 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=4096, help="of a step: rows times length (at least one row)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tunix-python", metavar="PATH", help="Python of a virtual environment with google-tunix")
    parser.add_argument("--steps", type=int, help="measured ones; by default 3, of large models 2")
    parser.add_argument("--threads", type=int, default=turns.cores())
    parser.add_argument(
        "--remat", choices=REMAT, help="of ours; the others compute all again or nothing; attention for large models"
    )
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "update_step")
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        turns.serve(WORKERS[given.worker](given.folder, *given.shape, given))
        return
    on, rows = turns.machine(given.threads), []
    if given.tunix_python:
        on["versions"] |= turns.versions_of(given.tunix_python, ("google-tunix",))
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_folder(pathlib.Path(folder), **SIZES[size])
            remat = given.remat or ("attention" if size in LARGE else "none")
            steps, warm_up = (2, 1) if size in LARGE else (3, 2)
            common = {"size": size, "parameters": parameters, "remat": remat}
            for length in given.lengths:
                shape = max(1, given.tokens // length), length
                arms = commands(folder, shape, given, remat)
                if size in LARGE and len(arms) > 3:
                    arms.pop("tunix")
                try:
                    measured = turns.compare(arms, given.threads, given.steps or steps, warm_up)
                except turns.ArmDied as died:
                    if died.arm != "tunix":
                        raise
                    print(f"{size} {shape[0]} x {shape[1]}, left out: {died}", file=sys.stderr)
                    arms.pop("tunix")
                    measured = turns.compare(arms, given.threads, given.steps or steps, warm_up)
                turns.check_same_work(measured, ("loss", "grad_norm"))
                shaped = common | {"rows": shape[0], "length": length}
                rows += [shaped | {"arm": arm, **result} for arm, result in measured.items()]
                print(line(size, shape, measured), flush=True)
                turns.write(given.output, "One GRPO update", {"rows": rows}, table(rows), on)
    print("\n" + table(rows))


def commands(folder: str, shape: tuple[int, int], given: argparse.Namespace, remat: str) -> dict[str, list[str]]:
    """The worker of each arm."""
    rest = ["--folder", folder, "--shape", *map(str, shape), "--remat", remat]
    own = [sys.executable, str(ROOT / "benchmarks" / "update_step.py"), *rest, "--threads", str(given.threads)]
    found = {arm: [*own, "--worker", arm] for arm in given.arms}
    if given.tunix_python:
        found["tunix"] = [given.tunix_python, str(ROOT / "benchmarks" / "tunix_step.py"), *rest]
    return found


def make_folder(folder: pathlib.Path, width, mlp, layers, heads, kv, vocabulary) -> int:
    """Writes a random Qwen3 with tied embeddings; returns its parameter count."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=width // heads,
        max_position_embeddings=65536,
        rope_theta=1e6,  # Qwen3's, and the only one that google-tunix 0.1.7 applies
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def data(shape: tuple[int, int], vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, T], trained mask [B, T] and advantages [B]."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, shape).astype(np.int32)
    mask = np.broadcast_to(np.arange(shape[1]) >= shape[1] // 4, shape)
    return tokens, mask, rng.choice([-1.0, 1.0, 0.5], shape[0]).astype(np.float32)


def ours(folder: pathlib.Path, batch: int, length: int, given: argparse.Namespace):
    """Our update: the very function that `rti train` calls."""
    from models import hf
    from rti_jax import batching
    from rti_jax.config import load_config
    from rti_jax.learner import init_state, make_optimizer, make_update_step
    from rti_jax.runtime import make_mesh
    from rti_jax.types import Author

    keys = {"lr": LR, "weight_decay": WEIGHT_DECAY, "b1": BETAS[0], "b2": BETAS[1], "clip_norm": NORM}
    overrides = [f"optimizer.{k}={v}" for k, v in keys.items()] + ["sampling.temperature=1.0"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    mesh = make_mesh(config.mesh)
    again = given.remat != "none"  # unrolled, the CPU compiler would compute layers again long before they are needed
    model, params = hf.load(folder, dtype="float32", remat=given.remat, scan_layers=again, mesh=mesh)
    optimizer = make_optimizer(config.optimizer, params, 1000)
    state = init_state(params, optimizer, mesh)
    update = make_update_step(model, config, mesh, optimizer, on_policy=True)
    tokens, mask, advantages = data((batch, length), model.config.vocab_size)
    packed = batching.empty((batch, length), float(batch))
    packed = packed._replace(
        tokens=tokens,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        segment_ids=np.ones_like(tokens),
        loss_mask=mask,
        author=np.where(mask, Author.POLICY, Author.TEMPLATE).astype(np.int8),
        trajectory=np.broadcast_to(np.arange(batch, dtype=np.int32)[:, None], tokens.shape),
        advantages=np.where(mask, advantages[:, None], 0).astype(np.float32),
        loss_scale=np.where(mask, 1.0 / mask[0].sum(), 0).astype(np.float32),
    )

    def step() -> dict[str, float]:
        nonlocal state
        state, metrics = update(state, [packed])
        return {"loss": metrics["loss/total"], "grad_norm": metrics["optimizer/grad_norm"]}

    return step


def pytorch(folder: pathlib.Path, batch: int, length: int, given: argparse.Namespace, compiled: bool):
    """The same step as its users write it: logits of the whole batch, log_softmax, autograd, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    if given.remat != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    tokens, mask, advantages = data((batch, length), model.config.vocab_size)
    ids, trained = torch.from_numpy(tokens).long(), torch.from_numpy(mask[:, 1:].copy()).float()
    advantage = torch.from_numpy(advantages)[:, None]

    def objective() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return -((surrogate * trained).sum(1) / trained.sum(1)).mean()

    chosen = torch.compile(objective) if compiled else objective

    def step() -> dict[str, float]:
        loss = chosen()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    return step


WORKERS = {
    "rti-jax": ours,
    "torch": lambda *a: pytorch(*a, compiled=False),
    "torch-compiled": lambda *a: pytorch(*a, compiled=True),
}


def line(size: str, shape: tuple[int, int], measured: dict[str, dict[str, Any]]) -> str:
    speeds = ", ".join(f"{arm} {shape[0] * shape[1] / m['step_s']:.0f} tok/s" for arm, m in measured.items())
    return f"{size} {shape[0]} x {shape[1]}: {speeds}"


def table(rows: list[dict[str, Any]]) -> str:
    """A line per shape: tokens per second and peak memory of each arm, and the ratio to the fastest other."""
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    head = ["model", "rows x tokens", *(f"{a} tok/s" for a in arms), *(f"{a} GB" for a in arms), "to the fastest other"]
    lines = []
    shapes = dict.fromkeys((r["size"], r["rows"], r["length"], r["remat"]) for r in rows)
    for size, batch, length, remat in shapes:
        here = {r["arm"]: r for r in rows if (r["size"], r["rows"], r["length"]) == (size, batch, length)}
        speed = {arm: batch * length / r["step_s"] for arm, r in here.items()}
        others = [s for arm, s in speed.items() if arm != "rti-jax"]
        ratio = f"{speed['rti-jax'] / max(others):.2f}" if others and "rti-jax" in speed else ""
        memory = [f"{here[a]['peak_bytes'] / 1e9:.2f}" if a in here else "" for a in arms]
        speeds = [f"{speed[a]:.0f}" if a in speed else "" for a in arms]
        lines.append([f"{size}{REMAT[remat]}", f"{batch} x {length}", *speeds, *memory, ratio])
    return turns.table(head, lines)


if __name__ == "__main__":
    main()
