"""The warm start: packing, the weighted loss, and a short run whose folder transformers reads."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from rti_jax import config as config_lib
from rti_jax import sft
from rti_jax.transcripts import Row

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "warmstart.yaml"


def rows(lengths, seed=0):
    rng = np.random.default_rng(seed)
    for n in lengths:
        yield Row("agent", rng.integers(1, 50, n).astype(np.int32), rng.uniform(0.1, 1, n).astype(np.float32))


def test_packing_keeps_every_transcript_whole_and_once():
    lengths = np.random.default_rng(1).integers(3, 30, 400)
    given = list(rows(lengths))
    stream, pool = iter(given), []
    batches = [sft.pack(stream, 4, 40, pool, depth=16) for _ in range(5)]
    found = []
    for batch in batches:
        for tokens, positions, segments, weights in zip(*batch, strict=True):
            for s in range(1, segments.max() + 1):
                at = segments == s
                assert (positions[at] == np.arange(at.sum())).all()
                assert weights[at][0] == 0.0
                found.append(tokens[at].tolist())
    taken = len(found) + len(pool)
    assert sorted(found + [r.ids.tolist() for r in pool]) == sorted(r.ids.tolist() for r in given[:taken])


def test_packed_rows_are_nearly_full():
    lengths = np.random.default_rng(2).integers(60, 200, 2000)
    batch = sft.pack(rows(lengths), 16, 384, [])
    assert (batch.segment_ids > 0).mean() > 0.93


def test_a_row_that_fits_nowhere_is_an_error_that_names_the_key():
    with pytest.raises(config_lib.ConfigError, match="row_length=5"):
        list(itertools.islice(sft.fitting(rows([10] * 100), 5), 1))


def test_an_error_of_the_transcripts_reaches_the_trainer():
    def fail():
        raise ValueError("broken map")

    with pytest.raises(ValueError, match="broken map"):
        next(sft.prefetch(fail))


def test_one_source_is_required(tmp_path):
    with pytest.raises(config_lib.ConfigError, match="model.path"):
        config_lib.load_config(CONFIG, ["model.path=somewhere"], sft.SFTConfig)


@pytest.mark.slow
def test_a_short_warm_start_writes_a_folder_that_transformers_reads(tmp_path):
    import jax.numpy as jnp
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from models import hf

    small = ["steps=20", "rows=4", "env.train_tasks=200", "env.min_population=5000", "tokenizer.transcripts=100"]
    tiny = ["init.hidden_size=32", "init.intermediate_size=64", "init.num_hidden_layers=2", "tokenizer.vocab_size=700"]
    folders = [f"output={tmp_path}/policy", f"runs_dir={tmp_path}/runs", "data.own_tasks=8"]
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "policy" / "README.md").write_text("a card")
    output = sft.run(config_lib.load_config(CONFIG, [*small, *tiny, *folders], sft.SFTConfig))
    losses = [json.loads(line)["loss/supervised"] for line in open(tmp_path / "runs/warmstart/metrics.jsonl")]
    assert losses[-1] < losses[0] and len(losses) == 2
    assert (output / "README.md").read_text() == "a card"

    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "From Troy to Utica."}], return_dict=True)[
        "input_ids"
    ]
    model, params = hf.load(output)
    shape = np.ones((1, len(ids)), np.int32)
    hidden = model.hidden(params, np.asarray([ids], np.int32), np.arange(len(ids))[None], shape)
    ours = np.asarray(hidden @ jnp.asarray(model.head(params)))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(output, dtype="float32")(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
