"""A vLLM server that the trainer starts on its own host: `rti serve` in a process that never outlives it."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import httpx

from rti_jax.config import Config, save_resolved
from rti_jax.engine_errors import EngineError

START_SECONDS = 900.0  # a large model on a cold disk
STOP_SECONDS = 10.0
HOST = "127.0.0.1"


class ServerProcess:
    """One server; `start` may be called again when it has ended.

    It ends when its standard input does, so also when the trainer is killed, and a terminal's Ctrl-C does not reach it.

    Args:
      config: its vLLM's arguments follow from it. port: free. devices: CUDA_VISIBLE_DEVICES; empty leaves them as here.
      siblings: servers that share the host's cores.
    """

    def __init__(self, config: Config, port: int, devices: str = "", siblings: int = 1):
        self.url = f"http://{HOST}:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="rti_jax_server_")
        self.log = pathlib.Path(self._folder.name) / "log"
        path = pathlib.Path(self._folder.name) / "config.yaml"
        save_resolved(config, path)
        self._command = [sys.executable, "-m", "rti_jax.cli", "serve", str(path), "--host", HOST, "--port", str(port)]
        self._command += ["--owned", str(siblings)]
        chosen = {"CUDA_VISIBLE_DEVICES": devices, "TPU_VISIBLE_CHIPS": devices} if devices else {}
        self._environment = os.environ | chosen
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts it, and returns when it answers. Raises EngineError with its last words if it ends or is too slow."""
        await asyncio.to_thread(self.stop)
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
            while not await _answers(client):
                if not self.running or time.monotonic() > deadline:
                    raise EngineError(f"the vLLM server at {self.url} did not start: {self._last_words()}")
                await asyncio.sleep(0.2)

    def stop(self) -> None:
        """Ends it if it runs; may be called twice."""
        if self._process is None:
            return
        self._process.stdin.close()
        if self.running:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return (errors or lines or ["it said nothing"])[-1][-300:]


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> Sequence[int]:
    """Ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
