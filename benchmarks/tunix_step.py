"""The step of update_step.py in google-tunix: its Qwen3, its GRPO loss and its trainer's compiled step.

    python3 -m venv VENV && VENV/bin/pip install google-tunix==0.1.7
    python benchmarks/update_step.py --tunix-python VENV/bin/python

Started by update_step.py, in an environment of its own: google-tunix pins other versions of what we use. It is the
train step that its GRPO learner compiles, given one batch: rows without padding (the prompt is the first quarter), no
reference, no old log-probabilities (the ratio's denominator is the step's own forward pass, as in ours), the same
clipping and AdamW. Without a TPU or GPU its attention holds the scores [rows, heads, tokens, tokens], and its loss the
logits of the whole batch; layers are computed again where update_step.py says so, and where the scores of all layers
would take over 2 GB.

Its 0.1.7 applies a rope theta of 1e6 whatever its config says, so that is what the model of update_step.py has.
"""

import argparse
import json
import pathlib

import turns
from update_step import BETAS, CLIP, LR, NORM, WEIGHT_DECAY, data

SCORE_BYTES = 2e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--shape", type=int, nargs=2, required=True)
    parser.add_argument("--remat", choices=["none", "attention", "full"], default="none")
    given = parser.parse_args()
    turns.serve(make_step(given.folder, *given.shape, given.remat))


def make_step(folder: pathlib.Path, batch: int, length: int, remat: str):
    """A step of google-tunix's trainer on the batch of update_step.py."""
    import jax
    import jax.numpy as jnp
    import optax
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params
    from tunix.rl import algo_core, common, trainer
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft.peft_trainer import TrainingConfig

    raw = json.loads((folder / "config.json").read_text())
    scores = 4 * raw["num_hidden_layers"] * raw["num_attention_heads"] * batch * length**2
    again = remat != "none" or scores > SCORE_BYTES
    config = qwen3.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=int(raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        use_tied_embedding=raw["tie_word_embeddings"],
        remat_config=qwen3.RematConfig.DECODER if again else qwen3.RematConfig.NONE,
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = params.create_model_from_safe_tensors(str(folder), config, mesh, dtype=jnp.float32)
    adamw = optax.adamw(LR, *BETAS, weight_decay=WEIGHT_DECAY)
    training = trainer.Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(NORM), adamw),
        TrainingConfig(eval_every_n_steps=1_000_000),
        custom_checkpoint_metadata_fn=dict,
    )
    algorithm = GRPOConfig(beta=0.0, epsilon=CLIP)
    algorithm.temperature = 1.0

    def loss(model, train_example):
        return algo_core.grpo_loss_fn(model, train_example, algorithm, pad_id=-1, eos_id=-1)

    training.with_loss_fn(loss, has_aux=True).with_gen_model_input_fn(lambda example: {"train_example": example})
    tokens, mask, advantages = data((batch, length), raw["vocab_size"])
    prompt = int((~mask[0]).sum())
    example = common.TrainExample(
        prompt_ids=jnp.asarray(tokens[:, :prompt]),
        prompt_mask=jnp.ones((batch, prompt), bool),
        completion_ids=jnp.asarray(tokens[:, prompt:]),
        completion_mask=jnp.ones((batch, length - prompt), jnp.int32),
        advantages=jnp.asarray(advantages),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    with mesh:
        compiled, _ = training.jit_train_and_eval_step(cache_nnx_graph=True)

    def step() -> dict[str, float]:
        with mesh:
            value, _, norm = compiled(example)
        return {"loss": float(value), "grad_norm": float(norm)}

    return step


if __name__ == "__main__":
    main()
