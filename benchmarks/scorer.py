"""The batched scorer against transformers: scored rows per second, same model, same rows, same machine, one run.

    python benchmarks/scorer.py                          25M parameters, 128 rows of log-normal length
    python benchmarks/scorer.py --size 1M --rows 512

Transformers scores the same rows sorted by length, in padded batches, as careful users do; ours packs them. Both are
processes that take turns pass by pass (turns.py); a number is the median of the passes after the first. Their
log-probabilities are compared, so that both are known to do the same work. Tokens are those of the rows, without
padding.
"""

import argparse
import pathlib
import sys
import tempfile

import numpy as np
import turns
from turns import RESULTS
from update_step import SIZES, make_folder

ARMS = "rti-jax", "transformers"
BATCH_TOKENS = 8192  # of a padded batch, as in our scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--median", type=int, default=200, help="tokens of the median row")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=2, help="measured ones, after the first")
    parser.add_argument("--threads", type=int, default=turns.cores())
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "scorer")
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        turns.serve(WORKERS[given.worker](given))
        return
    on = turns.machine(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_folder(pathlib.Path(folder), **SIZES[given.size])
        measured = turns.compare(commands(folder, given), given.threads, given.passes, warm_up=1)
    sums = [m.pop("sums") for m in measured.values()]
    gap = float(np.abs(np.subtract(*sums)).max())
    if gap > 1e-2:
        raise SystemExit(f"the two disagree: a row's log-probability differs by {gap}")
    tokens = int(lengths(given).sum())
    speed = {arm: tokens / m["step_s"] for arm, m in measured.items()}
    ratio = speed["rti-jax"] / speed["transformers"]
    head = ["model", "rows", "tokens", *(f"{arm} tok/s" for arm in ARMS), "ratio", "largest gap of a row's sum"]
    values = [f"{speed[arm]:.0f}" for arm in ARMS]
    text = turns.table(head, [[given.size, given.rows, tokens, *values, f"{ratio:.2f}", f"{gap:.1e}"]])
    print(text)
    result = {"size": given.size, "parameters": parameters, "rows": given.rows, "tokens": tokens, "arms": measured}
    turns.write(given.output, "The batched scorer", result | {"ratio": ratio}, text, on)


def commands(folder: str, given: argparse.Namespace) -> dict[str, list[str]]:
    """The worker of each arm."""
    keys = {k: getattr(given, k) for k in ("size", "rows", "median", "longest", "threads")}
    rest = ["--folder", folder, *(text for key, value in keys.items() for text in (f"--{key}", str(value)))]
    return {arm: [sys.executable, __file__, "--worker", arm, *rest] for arm in ARMS}


def lengths(given: argparse.Namespace) -> np.ndarray:
    """Tokens of each row: log-normal, sigma 0.8."""
    drawn = np.random.default_rng(0).lognormal(np.log(given.median), 0.8, given.rows)
    return np.clip(drawn, 8, given.longest).astype(int)


def rows(given: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) of each row; the prompt is its first half."""
    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, SIZES[given.size]["vocabulary"], n).tolist() for n in lengths(given)]
    return [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in drawn]


def ours(given: argparse.Namespace):
    """The function behind `rti score` and the gate."""
    from models import hf
    from rti_jax.config import MeshConfig
    from rti_jax.logprobs import Scorer
    from rti_jax.runtime import make_mesh

    mesh = make_mesh(MeshConfig())
    model, params = hf.load(given.folder, dtype="float32", mesh=mesh)
    scorer, data = Scorer(model, mesh), rows(given)
    return lambda: {"sums": [float(values.sum()) for values in scorer.score(params, data)]}


def pytorch(given: argparse.Namespace):
    """Padded batches of rows of similar length, logits of the whole batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    data = rows(given)
    order = sorted(range(len(data)), key=lambda i: -len(data[i][0]) - len(data[i][1]))

    @torch.inference_mode()
    def score() -> np.ndarray:
        sums, waiting = np.zeros(len(data)), list(order)
        while waiting:
            longest = sum(map(len, data[waiting[0]]))
            chosen, waiting = waiting[: max(1, BATCH_TOKENS // longest)], waiting[max(1, BATCH_TOKENS // longest) :]
            ids = torch.zeros((len(chosen), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for b, i in enumerate(chosen):
                tokens = [*data[i][0], *data[i][1]]
                ids[b, : len(tokens)], mask[b, : len(tokens)] = torch.tensor(tokens), 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            for b, i in enumerate(chosen):
                prompt, response = map(len, data[i])
                sums[i] = logprobs[b, prompt - 1 : prompt + response - 1].sum().item()
        return sums

    return lambda: {"sums": score().tolist()}


WORKERS = {"rti-jax": ours, "transformers": pytorch}

if __name__ == "__main__":
    main()
