"""`rti serve CONFIG`: a vLLM server of the policy, with everything that `rti train` needs of it.

It is vLLM's own server. Its arguments follow from the same config as the trainer's (dtype, context, log-probabilities
at the sampling temperature, `engine.args`), and the routes for token ids and for weight updates are there, which vLLM
has in its development mode only: keep such a server on a trusted network.
"""

import json
import os
import pathlib
import signal
import threading
import time
from typing import Any

from rti_jax import runtime, vllm_settings, weight_sync
from rti_jax.config import Config

EXIT_SECONDS = 10.0  # what a server without a trainer gets for a clean end


def main(config: Config, *, host: str, port: int, owned: int = 0) -> None:
    """Serves until it is ended.

    Args:
      owned: servers that a trainer started together with this one, which ends with its standard input; 0 for a user's.

    Raises:
      ConfigError: no model folder, vLLM missing, or an unknown key in engine.args.
    """
    folder = runtime.check_folder(config.model.path)
    if owned:
        threading.Thread(target=_end_with_input, daemon=True).start()
    from rti_jax import engine

    engine.check_installed()
    for name, value in (vllm_settings.QUIET | vllm_settings.SERVER | {weight_sync.OWNED_ENGINE: "1"}).items():
        os.environ.setdefault(name, value)
    on_cpu = engine.on_cpu()
    args = vllm_settings.server_arguments(folder, config, on_cpu=on_cpu)
    engine.check_arguments(args)
    for name, value in vllm_settings.variables(args, on_cpu=on_cpu, engines=max(1, owned)).items():
        os.environ.setdefault(name, value)
    print(f"starting vLLM for {folder} on http://{host}:{port}; VLLM_LOGGING_LEVEL=INFO shows its log", flush=True)
    engine.serve(command(folder, args, host, port))


def command(folder: pathlib.Path, args: dict[str, Any], host: str, port: int) -> list[str]:
    """Arguments of `vllm serve` for `folder` with these engine arguments."""
    flags = [flag for key, value in args.items() if key != "model" for flag in _flag(key, value)]
    return [
        *("--model", str(folder), "--host", host, "--port", str(port)),
        *("--enable-scale-out", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"),
        *flags,
    ]


def _flag(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_SECONDS)
    os._exit(1)
