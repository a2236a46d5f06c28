"""Models that a run samples from and never updates: a teacher, and stronger models in the three roles.

A Hugging Face folder with the policy's vocabulary is served by a vLLM of its own, one for each folder, shared by all
that name it. With one vocabulary the ids of h_t are good for both, and what the other model samples is used as it is.
"""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Mapping

from rti_jax.chat import Chat
from rti_jax.config import Config, ConfigError
from rti_jax.engine import Engine, make_engine


def check_vocabulary(chat: Chat, folder: str, key: str) -> None:
    """Refuses a model whose tokenizer gives ids another meaning than the policy's.

    Args:
      key: the config's, for the message.

    Raises:
      ConfigError: no model there, or another vocabulary.
    """
    if not (pathlib.Path(folder) / "config.json").is_file():
        raise ConfigError(f"{key}={folder} is not a Hugging Face folder: it has no config.json")
    ours, theirs = chat.tokenizer.get_vocab(), Chat.from_folder(folder, chat.thinking).tokenizer.get_vocab()
    if ours != theirs:
        different = sum(theirs.get(token) != i for token, i in ours.items())
        raise ConfigError(
            f"{key}={folder} has another vocabulary than the policy ({len(theirs)} tokens against {len(ours)}, "
            f"{different} of the policy's missing or with other ids)"
        )


@contextlib.asynccontextmanager
async def serving(folders: Mapping[str, str], config: Config) -> AsyncIterator[dict[str, Engine]]:
    """Engines by name, for as long as the block runs; names with the same folder share one.

    Args:
      folders: name -> Hugging Face folder.
    """
    given = {k: v for k, v in config.engine.args.items() if k != "gpu_memory_utilization"}  # the policy's share
    settings = {"kind": "vllm", "memory_fraction": config.engine.frozen_fraction, "args": given}
    settings["weight_transfer"] = "auto"
    own = config.model_copy(update={"engine": config.engine.model_copy(update=settings)})
    engines: dict[str, Engine] = {}
    try:
        for folder in dict.fromkeys(folders.values()):
            starting = asyncio.ensure_future(asyncio.to_thread(make_engine, folder, own))
            try:
                engines[folder] = await asyncio.shield(starting)
            except asyncio.CancelledError:  # a thread cannot be cancelled: its engine is closed with the others
                engines[folder] = await starting
                raise
        yield {name: engines[folder] for name, folder in folders.items()}
    finally:
        for engine in engines.values():
            await engine.close()
