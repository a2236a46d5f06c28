"""vLLM's arguments and environment from a config. Imports no vLLM."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from models.safetensors_file import DTYPES, TAGS
from rti_jax import weight_sync
from rti_jax.config import Config

MAX_SEQUENCES = 1024  # requests that one engine runs at once; more wait inside it
CPU_CACHE_BYTES = (64 << 20, 4 << 30)  # least and most for the key/value cache on CPU, unless engine.args says so

# Defaults of a vLLM that we start ourselves; what the user's environment sets wins.
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # set it to INFO to see vLLM's log
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is what a command was asked for, JSON for one
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}

# What a policy's server needs beside its arguments (`rti serve`).
SERVER = {"VLLM_SERVER_DEV_MODE": "1"}  # the routes of the weight update


def arguments(model_path: pathlib.Path, config: Config, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments: ours, overridden by config.engine.args key by key."""
    text = text_config(model_path)
    length = min(config.sampling.max_context, text.get("max_position_embeddings", config.sampling.max_context))
    sequences = min(config.rollout.concurrency, MAX_SEQUENCES)
    args: dict[str, Any] = {
        "model": str(model_path),
        "dtype": config.model.dtype,
        "max_model_len": length,
        "max_num_seqs": sequences,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # ids in, ids out
        "weight_transfer_config": {"backend": weight_sync.backend(config.engine.weight_transfer)},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if is_multimodal(model_path):
        args["language_model_only"] = True  # conversations are text: no vision tower, no image processor
    if on_cpu:
        # A prompt must not be split over steps: torch's CPU generators have no offset, so a seeded request dies then.
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(length, 16384), "enforce_eager": True}
        if _linear_layers(text):
            args["enable_prefix_caching"] = False  # vLLM keeps the states of prefixes only where it may split prompts
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            args["kv_cache_memory_bytes"] = _cache_bytes(text, sequences, length, config.model.dtype)
    else:
        args["gpu_memory_utilization"] = config.engine.memory_fraction
    if config.engine.sleep:
        args["enable_sleep_mode"] = True
    args |= config.engine.args
    return args


def server_arguments(model_path: pathlib.Path, config: Config, *, on_cpu: bool) -> dict[str, Any]:
    """The same for a server: its GPUs are its own, and it has a tokenizer, for those who send it text."""
    args = arguments(model_path, config, on_cpu=on_cpu)
    for key in ("gpu_memory_utilization", "skip_tokenizer_init"):
        if key not in config.engine.args:
            args.pop(key, None)
    return args


def variables(args: Mapping[str, Any], *, on_cpu: bool, engines: int = 1) -> dict[str, str]:
    """Environment of a vLLM with `args`, one of `engines` on this host."""
    found = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if on_cpu:
        found |= {
            # One core stays free for the trainer's side of the rollouts, as vLLM itself does by default.
            "OMP_NUM_THREADS": str(max(1, (len(os.sched_getaffinity(0)) - 1) // engines)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process; AsyncLLM still spawns that one
        }
    if args.get("enforce_eager"):
        found["TORCH_COMPILE_DISABLE"] = "1"
    return found


def text_config(model_path: pathlib.Path) -> dict[str, Any]:
    """config.json of a model folder; of a multimodal model the part of its language model."""
    model = json.loads((model_path / "config.json").read_text())
    return model.get("text_config", model)


def is_multimodal(model_path: pathlib.Path) -> bool:
    return "text_config" in json.loads((model_path / "config.json").read_text())


def _linear_layers(text: Mapping[str, Any]) -> int:
    """Layers with a recurrent state in the place of keys and values."""
    return list(text.get("layer_types") or ()).count("linear_attention")


def _cache_bytes(text: Mapping[str, Any], sequences: int, length: int, dtype: str) -> int:
    """Cache for twice what can be in flight: the second half keeps prefixes."""
    size, linear = DTYPES[TAGS[dtype]].itemsize, _linear_layers(text)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    per_token = 2 * (text["num_hidden_layers"] - linear) * heads * width * size
    per_sequence = 0
    if linear:  # every layer's page is as large as a state, which is float32
        state = text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"] * 4
        per_sequence = 2 * text["num_hidden_layers"] * state
    least, most = CPU_CACHE_BYTES
    return max(least, min(most, 2 * sequences * (length * per_token + per_sequence)))


@contextlib.contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, for as long as processes are being started."""
    before = dict(os.environ)
    os.environ.update({key: value for key, value in defaults.items() if key not in before})
    try:
        yield
    finally:
        # vLLM sets more of them (LD_PRELOAD for one), which later child processes of the trainer should not see.
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update({key: value for key, value in before.items() if os.environ.get(key) != value})
