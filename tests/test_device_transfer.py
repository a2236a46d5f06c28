"""vLLM's transfer between devices as far as it can be run without CUDA: what is sent, and to whom."""

import asyncio
import threading

import numpy as np
import pytest
from tiny_models import make_qwen3

from models import hf
from rti_jax import weight_sync

SHAPES = {"model.embed_tokens.weight": (3, 2), "model.norm.weight": (2,)}
TENSORS = [(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape)) for name, shape in SHAPES.items()]


def test_flax_weights_come_as_they_are_announced_and_may_be_read_again(tmp_path):
    weights = weight_sync.FlaxWeights(*hf.load(make_qwen3(tmp_path, tokenizer=False)))
    for _ in range(2):
        assert [(name, array.shape) for name, array in weights] == list(weights.shapes.items())


@pytest.mark.slow
class TestTransfer:
    def test_what_is_announced_is_what_is_sent_in_the_serving_dtype(self):
        import torch

        from rti_jax.device_transfer import NamedTensors

        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        source = NamedTensors(SHAPES, "bfloat16", aliases, device="cpu")
        source.tensors = TENSORS
        sent = list(source)
        assert [(m.name, m.shape, m.dtype) for m in source.metadata()] == [
            (n, tuple(t.shape), t.dtype) for n, t in sent
        ]
        assert [name for name, _ in sent] == ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
        assert sent[1][1].dtype == torch.bfloat16 and sent[1][1].tolist() == [[0, 1], [2, 3], [4, 5]]

    def test_every_engine_takes_every_step_with_ranks_of_its_own(self):
        from rti_jax.device_transfer import Client

        seen, loop = [], asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        def engine(number):
            async def call(step, arguments):
                seen.append((number, step, arguments))

            return call

        client = Client([engine(0), engine(1)], [4, 2], loop)
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
        client.start_weight_update()
        client.update_weights({"names": ["w"]})
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        offsets = {n: a["init_info"]["rank_offset"] for n, step, a in seen if step == "init_weight_transfer_engine"}
        assert offsets == {0: 1, 1: 5}
        assert sorted(n for n, step, _ in seen if step == "update_weights") == [0, 1]
