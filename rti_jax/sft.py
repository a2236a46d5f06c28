"""`rti sft CONFIG`: supervised warm start on scripted-expert transcripts.

    rti sft configs/warmstart.yaml            makes the policy that the quickstart trains (models/navigation-mini)
    rti sft configs/warmstart.yaml steps=50   a short one
    rti sft configs/teacher.yaml              a teacher for the baselines: the same policy, taught the hard tasks too

With `init` a new model is drawn and, with `tokenizer`, a small tokenizer is trained on the same transcripts;
with `model.path` an existing Hugging Face folder is fine-tuned. Sections in the order in which data flows:
transcripts (rti_jax/transcripts.py) -> packed rows -> weighted next-token loss -> Hugging Face folder in `output`.

The loss is a weighted mean of -log p over tokens: weight 1 on what the assistant wrote in the trained turns,
`data.language_model_weight` on prompts, user and tool text (it makes copying emerge earlier), 0 on assistant turns
that are context only.
"""

import contextlib
import functools
import itertools
import json
import pathlib
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envs.base import Task
from envs.navigation.environment import Navigation
from models import hf
from rti_jax import config as config_lib
from rti_jax import own_turns
from rti_jax import tokenizer as tokenizer_lib
from rti_jax.chat import Chat
from rti_jax.environments import EnvironmentSource, env_config
from rti_jax.learner import TrainState, init_state
from rti_jax.logprobs import token_logprobs
from rti_jax.optimizer import make_optimizer
from rti_jax.own_turns import OwnTurn
from rti_jax.placement import row_spec
from rti_jax.runtime import check_folder, load_policy, make_mesh
from rti_jax.transcripts import Row, Transcripts


class InitConfig(config_lib.Section):
    """A new Qwen3; keys are Hugging Face's. The vocabulary size is the tokenizer's."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 1e4
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True


class TokenizerConfig(config_lib.Section):
    """A new tokenizer, trained on `transcripts` of the same stream; used with `init`."""

    vocab_size: int = pydantic.Field(2048, ge=512)
    transcripts: int = pydantic.Field(4000, ge=1)
    phrases: list[str] = []  # strings that are one token each, beside the lines that most prompts share


class DataConfig(config_lib.Section):
    """What the transcripts are. Shares need not sum to one."""

    shares: dict[str, float] = {"agent": 0.4, "validator": 0.2, "corrector": 0.2, "verifier": 0.2}
    language_model_weight: float = pydantic.Field(0.3, ge=0, le=1)
    leak_share: float = pydantic.Field(0.25, ge=0, le=1)  # correctors' transcripts whose rewrite leaks or fabricates
    hard_share: float = pydantic.Field(0.0, ge=0, le=1)  # of the agent's transcripts, hard tasks as the expert plays
    own_share: float = pydantic.Field(0.0, ge=0, le=1)  # of the turns that roles judge, the policy's own; needs vLLM
    own_after: float = pydantic.Field(0.5, ge=0, lt=1)  # share of the steps after which they are sampled, and used
    own_tasks: int = pydantic.Field(1000, ge=1)  # tasks that are played for them


class SFTConfig(config_lib.Section):
    """Keys of `rti sft`."""

    name: str = "sft"
    runs_dir: str = "runs"
    output: str = ""  # Hugging Face folder that is written (a README.md in it stays); empty = runs/NAME/export
    seed: int = 0
    steps: int = pydantic.Field(1000, ge=1)
    rows: int = pydantic.Field(32, ge=1)  # rows of a batch
    row_length: int = pydantic.Field(320, ge=16)  # tokens of a packed row; longer transcripts are dropped and counted
    init: InitConfig | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    model: config_lib.ModelConfig = config_lib.ModelConfig()
    env: config_lib.EnvConfig = config_lib.EnvConfig()
    sampling: config_lib.SamplingConfig = config_lib.SamplingConfig()
    rti: config_lib.RTIConfig = config_lib.RTIConfig()
    optimizer: config_lib.OptimizerConfig = config_lib.OptimizerConfig()
    mesh: config_lib.MeshConfig = config_lib.MeshConfig()

    @pydantic.model_validator(mode="after")
    def _one_source(self):
        if bool(self.model.path) == bool(self.init):
            raise ValueError("give either model.path (fine-tune a folder) or init (draw a new model)")
        if self.optimizer.offload:
            raise ValueError("optimizer.offload=true: rti sft keeps the moments on the device")
        return self

    @property
    def run_dir(self) -> pathlib.Path:
        return pathlib.Path(self.runs_dir) / self.name


class Batch(NamedTuple):
    """Packed rows, all [B, T]."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray  # 0 is padding
    weights: np.ndarray  # of each token in the loss


def pack(rows: Iterator[Row], batch: int, length: int, pool: list[Row], depth: int = 48) -> Batch:
    """Fills `batch` rows of `length` tokens, each with the longest transcripts of the pool that still fit.

    The pool is refilled from `rows` to `depth` transcripts and carried to the next batch, so none is lost.
    """
    dtypes = (np.int32, np.int32, np.int32, np.float32)
    out = Batch(*(np.zeros((batch, length), dtype) for dtype in dtypes))
    for b in range(batch):
        used = segment = 0
        while True:
            pool.extend(itertools.islice(rows, depth - len(pool)))
            fitting = [i for i, row in enumerate(pool) if len(row.ids) <= length - used]
            if not fitting:
                break
            row = pool.pop(max(fitting, key=lambda i: len(pool[i].ids)))
            end, segment = used + len(row.ids), segment + 1
            out.tokens[b, used:end], out.weights[b, used:end] = row.ids, row.weights
            out.positions[b, used:end], out.segment_ids[b, used:end] = np.arange(len(row.ids)), segment
            out.weights[b, used] = 0.0  # nothing predicts a segment's first token
            used = end
    return out


def prefetch(make, depth: int = 4) -> Iterator[Any]:
    """Runs `make()` in a thread, `depth` results ahead; an exception there is raised here."""
    results: queue.Queue = queue.Queue(depth)

    def work():
        while True:
            try:
                results.put((make(), None))
            except BaseException as error:
                results.put((None, error))
                return

    threading.Thread(target=work, daemon=True, name="transcripts").start()
    while True:
        value, error = results.get()
        if error:
            raise error
        yield value


def main(config: SFTConfig) -> int:
    """The command; returns the exit code."""
    run(config)
    return 0


def run(config: SFTConfig) -> pathlib.Path:
    """Trains and writes the Hugging Face folder; returns its path."""
    started = time.monotonic()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    config_lib.save_resolved(config_lib.without_secrets(config), config.run_dir / "config.yaml")
    env, tasks = make_environment(config)
    source = new_source(config, env, tasks) if config.init else check_folder(config.model.path)
    chat = Chat.from_folder(source, thinking=config.sampling.thinking)
    mesh = make_mesh(config.mesh)
    execution = {k: getattr(config.model, k) for k in ("dtype", "attention", "remat", "scan_layers")}
    if config.init:
        model, params = hf.init(source, jax.random.key(config.seed), mesh=mesh, **execution)
    else:
        policy = load_policy(config)
        model, params = policy.model, policy.params
    optimizer = make_optimizer(config.optimizer, params, config.steps)
    state = init_state(params, optimizer, mesh)
    step = make_step(model, optimizer, mesh)
    with Log(config) as log:
        own_step = round(config.data.own_after * config.steps) if config.data.own_share else config.steps
        state = fit(log, step, state, batches(config, stream(config, env, tasks, chat, config.seed)), own_step)
        if own_step < config.steps:
            turns = play_own(config, model, state.params, source, tasks)
            rows = stream(config, env, tasks, chat, config.seed + 2, turns)
            state = fit(log, step, state, batches(config, rows), config.steps - own_step)

    output = pathlib.Path(config.output or config.run_dir / "export")
    card = output / "README.md"
    text = card.read_text() if card.is_file() else None
    hf.save(model, state.params, output, source=source)
    if text and not card.is_file():
        card.write_text(text)
    minutes = (time.monotonic() - started) / 60
    print(f"wrote {output} after {config.steps} steps, {minutes:.1f} minutes; evaluate it with `rti eval`")
    return output


def make_environment(config: SFTConfig) -> tuple[Navigation, Sequence[Task]]:
    """The environment and its tasks; the transcripts' mistakes and habits are Navigation's."""
    if config.env.name != "navigation":
        raise config_lib.ConfigError(f"env.name={config.env.name}: scripted transcripts exist for navigation only")
    own = env_config(config.env)
    if own.tasks_file:  # so it is on every map but the embedded one
        raise config_lib.ConfigError("env.tasks_file: transcripts are scripted on generated tasks only")
    return Navigation(own, config.env.max_turns), Navigation.tasks(own, config.env.split)


def stream(
    config: SFTConfig, env: Navigation, tasks: Sequence[Task], chat: Chat, seed: int, own: Sequence[OwnTurn] = ()
) -> Transcripts:
    """The transcripts of a config."""
    return Transcripts(
        env,
        tasks,
        chat,
        style=config.rti.prompts,
        shares=config.data.shares,
        leak_share=config.data.leak_share,
        text_weight=config.data.language_model_weight,
        seed=seed,
        hard_share=config.data.hard_share,
        own=own,
        own_share=config.data.own_share,
    )


def batches(config: SFTConfig, rows: Iterator[Row]) -> Iterator[Batch]:
    """Packed batches of a stream, made in a thread."""
    fitted, pool = fitting(iter(rows), config.row_length), list[Row]()
    return prefetch(lambda: pack(fitted, config.rows, config.row_length, pool))


def play_own(config: SFTConfig, model, params, source: pathlib.Path, tasks: Sequence[Task]) -> list[OwnTurn]:
    """Lets the policy play `own_tasks` of the tasks, as it is now; returns its turns."""
    folder = hf.save(model, params, config.run_dir / "own", source=source)
    player = config_lib.Config(
        name=config.name, seed=config.seed, model={"path": str(folder)}, sampling=config.sampling, rti=config.rti
    )
    chosen = random.Random(config.seed).sample(list(tasks), min(config.data.own_tasks, len(tasks)))
    environment = EnvironmentSource(Navigation, env_config(config.env), config.env.max_turns)
    with Progress(TextColumn("the policy plays"), BarColumn(), MofNCompleteColumn()) as progress:
        bar = progress.add_task("", total=len(chosen))
        turns = own_turns.collect(folder, environment, chosen, player, lambda _: progress.advance(bar))
    print(f"{len(turns)} turns of its own from {len(chosen)} tasks")
    return turns


def new_source(config: SFTConfig, env: Navigation, tasks: Sequence[Task]) -> pathlib.Path:
    """A folder with a new tokenizer, trained on transcripts, and the config.json of the new model."""
    bytes_only = tokenizer_lib.train((), vocab_size=tokenizer_lib.MINIMUM)
    draft = stream(config, env, tasks, Chat(bytes_only, "qwen3", config.sampling.thinking), config.seed + 1)
    rows = itertools.islice(draft, config.tokenizer.transcripts)
    texts = [bytes_only.decode(row.ids) for row in rows]
    phrases = [*config.tokenizer.phrases, *tokenizer_lib.common_lines(texts)]
    tokenizer = tokenizer_lib.train(texts, vocab_size=config.tokenizer.vocab_size, phrases=phrases)
    folder = config.run_dir / "source"
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    architecture = config.init.model_dump() | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "eos_token_id": ends[0],
        "pad_token_id": ends[1],
        "dtype": "float32",
    }
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True}
    (folder / "config.json").write_text(json.dumps(architecture, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder


def fitting(rows: Iterator[Row], length: int) -> Iterator[Row]:
    """The rows that fit; raises if hardly any does."""
    dropped = kept = 0
    for row in rows:
        if len(row.ids) <= length:
            kept += 1
            yield row
        elif (dropped := dropped + 1) > 20 + kept:
            raise config_lib.ConfigError(
                f"row_length={length}: {dropped} of {dropped + kept} transcripts are longer; raise it"
            )


def make_step(model, optimizer, mesh):
    """(state, batch) -> (state, loss, mean -log p of the tokens that an answer consists of).

    A gradient that is not finite leaves the state as it was.
    """
    rows = jax.sharding.NamedSharding(mesh, row_spec(mesh))

    def objective(params, batch: Batch):
        hidden = model.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        logprobs, _ = token_logprobs(hidden, model.head(params), batch.tokens, batch.segment_ids, mesh=mesh)
        loss = -jnp.sum(logprobs * batch.weights) / jnp.sum(batch.weights)
        written = batch.weights == 1.0
        answers = -jnp.sum(jnp.where(written, logprobs, 0.0)) / jnp.sum(written)
        return loss, answers

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch):
        (loss, answers), gradients = jax.value_and_grad(objective, has_aux=True)(state.params, batch)
        finite = jnp.isfinite(optax.global_norm(gradients))
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), loss, answers

    return lambda state, batch: step(state, Batch(*(jax.device_put(x, rows) for x in batch)))


class Log:
    """metrics.jsonl, a line every ten steps, and a progress bar; counts steps over all calls of `fit`."""

    COLUMNS = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))

    def __init__(self, config: SFTConfig):
        self._steps, self._done, self._tokens = config.steps, 0, 0
        self._file = open(config.run_dir / "metrics.jsonl", "w")
        self._progress = Progress(*self.COLUMNS, TimeRemainingColumn())
        self._bar = self._progress.add_task("sft", total=config.steps, loss="")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def step(self, batch: Batch, loss: jax.Array, answers: jax.Array) -> None:
        """Raises ConfigError for a loss that is not finite."""
        self._done += 1
        self._tokens += int(np.count_nonzero(batch.segment_ids))
        if self._done % 10 == 0 or self._done == self._steps:
            line = {"step": self._done, "loss/supervised": float(loss), "loss/answers": float(answers)}
            if not np.isfinite(line["loss/supervised"]):
                raise config_lib.ConfigError(
                    f"the loss is not finite at step {self._done}; lower optimizer.lr or muon_lr"
                )
            self._file.write(json.dumps(line | {"tokens": self._tokens}) + "\n")
            self._file.flush()
            self._progress.update(self._bar, loss=f"loss {loss:.3f}, of answers {answers:.3f}")
        self._progress.advance(self._bar)


def fit(log: Log, step, state: TrainState, batches: Iterator[Batch], steps: int) -> TrainState:
    """So many steps of the loop."""
    with log.shown():
        for batch in itertools.islice(batches, steps):
            state, loss, answers = step(state, batch)
            log.step(batch, loss, answers)
    return state
