"""The batched scorer against transformers: scored rows per second, same model, same rows, same machine, one run.

    python benchmarks/scorer.py                          25M parameters, 128 rows of log-normal length
    python benchmarks/scorer.py --size 1M --rows 512

Transformers scores the same rows sorted by length, in padded batches, as careful users do; ours packs them. Both run in
a process of their own with the same threads and allocator; a number is the median of the passes after the first. Their
log-probabilities are compared, so that both are known to do the same work.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from update_step import RESULTS, ROOT, SIZES, make_folder

ARMS = "rti-jax", "transformers"
BATCH_TOKENS = 8192  # of a padded batch, as in our scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--median", type=int, default=200, help="tokens of the median row")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=2, help="measured ones, after the first")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "scorer.json")
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(WORKERS[given.worker](given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_folder(pathlib.Path(folder), **SIZES[given.size])
        measured = {arm: run(arm, folder, given) for arm in ARMS}
    sums = [m.pop("sums") for m in measured.values()]
    gap = float(np.abs(np.subtract(*sums)).max())
    if gap > 1e-2:
        raise SystemExit(f"the two disagree: a row's log-probability differs by {gap}")
    tokens = int(lengths(given).sum())
    speed = {arm: tokens / m["pass_s"] for arm, m in measured.items()}
    ratio = speed["rti-jax"] / speed["transformers"]
    text = (
        f"| model | rows | tokens | rti-jax tok/s | transformers tok/s | ratio | largest gap of a row's sum |\n"
        f"| --- | --- | --- | --- | --- | --- | --- |\n"
        f"| {given.size} | {given.rows} | {tokens} | {speed['rti-jax']:.0f} | {speed['transformers']:.0f} | "
        f"{ratio:.2f} | {gap:.1e} |\n"
    )
    print(text)
    given.output.parent.mkdir(exist_ok=True)
    result = {"size": given.size, "parameters": parameters, "rows": given.rows, "tokens": tokens, "arms": measured}
    given.output.write_text(json.dumps(result | {"threads": given.threads, "ratio": ratio}, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(text)


def run(arm: str, folder: str, given: argparse.Namespace) -> dict[str, Any]:
    """The worker's measurements."""
    from rti_jax.launcher import find_tcmalloc

    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    if library := find_tcmalloc():
        environment["LD_PRELOAD"] = library
    keys = {k: getattr(given, k) for k in ("size", "rows", "median", "longest", "passes", "threads")}
    command = [sys.executable, __file__, "--worker", arm, "--folder", folder]
    command += [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def lengths(given: argparse.Namespace) -> np.ndarray:
    """Tokens of each row: log-normal, sigma 0.8."""
    drawn = np.random.default_rng(0).lognormal(np.log(given.median), 0.8, given.rows)
    return np.clip(drawn, 8, given.longest).astype(int)


def rows(given: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) of each row; the prompt is its first half."""
    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, SIZES[given.size]["vocabulary"], n).tolist() for n in lengths(given)]
    return [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in drawn]


def timed(score, passes: int) -> dict[str, Any]:
    """Seconds of the first pass and of the others, and each row's sum of log-probabilities."""
    seconds, sums = [], []
    for _ in range(passes + 1):
        started = time.perf_counter()
        sums = score()
        seconds.append(time.perf_counter() - started)
    return {"first_s": seconds[0], "pass_s": statistics.median(seconds[1:]), "sums": [float(x) for x in sums]}


def ours(given: argparse.Namespace) -> dict[str, Any]:
    """The function behind `rti score` and the gate."""
    from models import hf
    from rti_jax.config import MeshConfig
    from rti_jax.logprobs import Scorer
    from rti_jax.runtime import make_mesh

    mesh = make_mesh(MeshConfig())
    model, params = hf.load(given.folder, dtype="float32", mesh=mesh)
    scorer, data = Scorer(model, mesh), rows(given)
    return timed(lambda: [values.sum() for values in scorer.score(params, data)], given.passes)


def pytorch(given: argparse.Namespace) -> dict[str, Any]:
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

    return timed(score, given.passes)


WORKERS = {"rti-jax": ours, "transformers": pytorch}

if __name__ == "__main__":
    main()
