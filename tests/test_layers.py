"""Shared blocks: norm, rotary positions, projection, attention and the layer loop, by hand and against references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import Mesh

from models import accelerated_attention, attention, layers


def naive_attention(q, k, v, segment_ids):
    """The definition, with T x T scores."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones((length, length), bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v)


def draw(length, heads=4, kv_heads=2, dim=8, rows=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(length), 4)
    shapes = [(rows, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def segments(length, rows=2):
    """Row 0: three segments and padding; row 1: one segment."""
    cuts = np.array([0.3, 0.35, 0.8]) * length
    first = np.where(np.arange(length) >= cuts[2], 0, 1 + np.searchsorted(cuts[:2], np.arange(length), side="right"))
    return jnp.asarray(np.stack([first, np.ones(length)]).astype(np.int32))


class TestRMSNorm:
    def test_by_hand(self):
        norm = layers.RMSNorm(2, eps=0.5)
        norm.scale[...] = jnp.array([1.0, 10.0])
        # mean of squares of (1, 2) is 2.5; plus 0.5 is 3
        np.testing.assert_allclose(norm(jnp.array([[1.0, 2.0]])), [[1 / 3**0.5, 20 / 3**0.5]], rtol=1e-6)

    def test_statistics_are_float32(self):
        x = jnp.full((1, 512), 300.0, jnp.bfloat16)  # squares sum to 4.6e7; in bfloat16 the sum would stall
        np.testing.assert_allclose(layers.RMSNorm(512, 1e-6)(x).astype(jnp.float32), 1.0, rtol=1e-2)


class TestProject:
    def test_gradients_are_those_of_a_matrix_product(self):
        x, w, d = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((2, 3, 4), (4, 5), (2, 3, 5))))
        ours = jax.grad(lambda x, w: (layers.project(x, w) * d).sum(), (0, 1))(x, w)
        reference = jax.grad(lambda x, w: (x @ w * d).sum(), (0, 1))(x, w)
        for a, b in zip(ours, reference, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)

    def test_kernel_gradient_is_accumulated_in_float32(self):
        x, w = jnp.ones((1, 4096, 1), jnp.bfloat16), jnp.ones((1, 1))
        grad = jax.grad(lambda w: layers.project(x, w).sum().astype(jnp.float32))(w)
        assert grad.dtype == jnp.float32
        assert grad[0, 0] == 4096  # ones added one by one in bfloat16 stop at 256


class TestAttention:
    @pytest.mark.parametrize("unrolled", [512, 0])
    @pytest.mark.parametrize(("length", "block"), [(1, None), (65, 64), (90, 24)])  # one tile, a last block of 1, of 18
    def test_values_and_gradients(self, length, block, unrolled, monkeypatch):
        monkeypatch.setattr(attention, "UNROLLED", unrolled)
        q, k, v, d = draw(length)
        ids = segments(length)

        keep = (ids > 0)[..., None, None]

        def grads(function):
            return jax.jit(jax.value_and_grad(lambda *a: (function(*a, ids) * d * keep).sum(), (0, 1, 2)))

        (ours, our_grads) = grads(lambda *a: attention.blockwise(*a, block=block))(q, k, v)
        (reference, reference_grads) = grads(naive_attention)(q, k, v)
        np.testing.assert_allclose(ours, reference, rtol=1e-5)
        for a, b in zip(our_grads, reference_grads, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)

    def test_other_segments_change_nothing(self):
        q, k, v, _ = draw(70)
        ids = segments(70)
        first = np.asarray(ids[0] == 1)
        run = jax.jit(lambda *a: attention.blockwise(*a, ids, block=16))
        before = run(q, k, v)
        noise = jnp.where(first[None, :, None, None], 0.0, 1e4)
        after = run(q + noise, k + noise, v + noise)
        assert np.array_equal(before[0, first], after[0, first])  # bit for bit
        assert not np.allclose(before[0, ~first], after[0, ~first])

    def test_padding_is_finite_in_both_directions(self):
        q, k, v, _ = draw(20)
        ids = jnp.zeros((2, 20), jnp.int32)
        grads = jax.jit(jax.grad(lambda *a: attention.blockwise(*a, ids, block=8).sum(), (0, 1, 2)))(q, k, v)
        assert all(np.isfinite(g).all() for g in grads)

    def test_bfloat16_keeps_float32_statistics(self):
        q, k, v, d = draw(64)
        ids = segments(64)
        half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
        ours = jax.jit(lambda *a: attention.blockwise(*a, ids, block=32))(*half)
        reference = naive_attention(*(x.astype(jnp.float32) for x in half), ids)
        keep = np.asarray(ids > 0)
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32)[keep], reference[keep], atol=2e-2)

    def test_bfloat16_sums_the_gradients_of_many_tiles_in_float32(self, monkeypatch):
        monkeypatch.setattr(attention, "UNROLLED", 0)
        q, k, v, d = draw(256)
        half = [x.astype(jnp.bfloat16) for x in (q, k, v)]

        def gradients(function, *inputs):
            ids = jnp.ones(q.shape[:2], jnp.int32)
            return jax.jit(jax.grad(lambda *a: (function(*a, ids).astype(jnp.float32) * d).sum(), (0, 1, 2)))(*inputs)

        ours = gradients(lambda *a: attention.blockwise(*a, block=4), *half)
        reference = gradients(naive_attention, *(x.astype(jnp.float32) for x in half))
        for a, b in zip(ours, reference, strict=True):
            assert a.dtype == jnp.bfloat16
            assert np.linalg.norm(a.astype(jnp.float32) - b) < 6e-3 * np.linalg.norm(b)

    def test_padding_on_both_sides_is_not_seen(self, monkeypatch):
        monkeypatch.setattr(attention, "UNROLLED", 0)
        q, k, v, d = draw(14)
        ids = jnp.array([[0] * 2 + [1] * 8 + [0] * 4, [0] + [1] * 9 + [0] * 4])
        d = d * (ids > 0)[..., None, None]

        def run(function):
            return jax.jit(jax.value_and_grad(lambda *a: (function(*a, ids) * d).sum(), (0, 1, 2)))(q, k, v)

        ours, reference = run(lambda *a: attention.blockwise(*a, block=4)), run(naive_attention)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
            visible = True if a.ndim == 0 else np.asarray(ids > 0)
            np.testing.assert_allclose(a[visible], b[visible], rtol=1e-5, atol=2e-6)

    def test_nothing_of_size_t_by_t_is_held(self):
        length = 512
        q, k, v, d = draw(length, heads=1, kv_heads=1, rows=1)
        ids = jnp.ones((1, length), jnp.int32)

        def largest(function):
            jaxpr = jax.make_jaxpr(jax.grad(lambda q, k, v: (function(q, k, v, ids) * d).sum(), (0, 1, 2)))(q, k, v)
            return max(sizes(jaxpr.jaxpr))

        block = 16
        assert largest(naive_attention) >= length * length
        assert largest(lambda *a: attention.blockwise(*a, block=block)) <= max(block * block, length * 8)

    def test_tiles_by_hand(self):
        """Row 0: segments of 5, 3 and 4 tokens in one of 16; row 1: one of 16. Two rows see what either needs."""
        ids = jnp.array([[1] * 5 + [2] * 3 + [3] * 4 + [0] * 4, [1] * 16])

        def visited(ids, first=0, others=None):
            part = None if others is None else attention.Part(others, jnp.int32(first))
            place = attention._visible_tiles(ids, part, 4)
            return [list(range(a, b)) for a, b in zip(place.first, place.end, strict=True)]

        assert visited(ids[1:]) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert visited(ids[:1]) == [[0], [0, 1], [2], []]
        assert visited(ids) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert visited(ids[:1, 4:8], 4, ids[:1]) == [[0, 1]]
        assert visited(ids[:1, 8:], 8, ids[:1]) == [[2], []]
        assert visited(ids[1:, 6:10], 6, ids[1:]) == [[0, 1, 2]]  # places 6 to 9

    def test_what_is_not_visible_in_any_tile_is_not_read(self, monkeypatch):
        monkeypatch.setattr(attention, "UNROLLED", 0)
        q, k, v, d = draw(64, rows=1)
        ids = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([32, 16, 16]), axis=1)
        poisoned = [x.at[:, 48:].set(jnp.nan) for x in (q, k, v)]
        poisoned[1:] = [x.at[:, :32].set(jnp.nan) for x in poisoned[1:]]
        run = jax.jit(
            jax.value_and_grad(lambda *a: (attention.blockwise(*a, ids, block=8) * d)[:, 32:].sum(), (0, 1, 2))
        )
        clean = jax.value_and_grad(lambda *a: (naive_attention(*a, ids) * d)[:, 32:48].sum(), (0, 1, 2))(q, k, v)
        (ours, our_grads), (reference, grads) = run(q, *poisoned[1:]), clean
        np.testing.assert_allclose(ours, reference, rtol=1e-5)
        for a, b in zip(our_grads, grads, strict=True):
            np.testing.assert_allclose(a[:, 32:48], b[:, 32:48], atol=2e-6)

    # In tiles of 11 keys, the second ends one key after the first query of the part that begins at 20.
    @pytest.mark.parametrize(("block", "packed"), [(None, True), (8, True), (11, False)])
    def test_a_part_of_a_row_is_that_part_of_its_attention(self, block, packed):
        """What a device computes that has some tokens of a row: all keys, its queries (the last block is not full)."""
        q, k, v, d = draw(60)
        ids = segments(60) if packed else jnp.ones((2, 60), int)
        d = d * (ids > 0)[..., None, None]

        def part(first):
            rows = slice(first, first + 20)
            place = attention.Part(ids, jnp.int32(first))

            def loss(q, k, v):
                return (attention.blockwise(q[:, rows], k, v, ids[:, rows], block, place) * d[:, rows]).sum()

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

        whole = jax.value_and_grad(lambda *a: (naive_attention(*a, ids) * d).sum(), (0, 1, 2))(q, k, v)
        parts = [part(first) for first in (0, 20, 40)]
        for a, *b in zip(jax.tree.leaves(whole), *map(jax.tree.leaves, parts), strict=True):
            assert min(np.abs(x).max() for x in b) > 0.1
            np.testing.assert_allclose(sum(b), a, rtol=1e-5, atol=1e-5)

    def test_auto_by_device(self):
        half = jnp.zeros((1, 128, 2, 128), jnp.bfloat16)
        assert attention._best("cpu", half) == "blockwise"
        assert attention._best("gpu", half) == "cudnn"
        assert attention._best("gpu", half.astype(jnp.float32)) == "blockwise"  # cuDNN's kernels are half precision
        assert attention._best("tpu", half) == "splash"
        assert attention._best("tpu", half[:, :100]) == "blockwise"
        assert attention._best("tpu", half, parts=2) == "blockwise"  # 64 tokens on each of two devices

    @pytest.mark.slow
    def test_splash_interpreted(self):
        q, k, v, _ = draw(256, heads=2, kv_heads=1, dim=128)
        ids = segments(256)
        ours = accelerated_attention.splash(q, k, v, ids, None, interpret=True)
        keep = np.asarray(ids > 0)
        np.testing.assert_allclose(ours[keep], naive_attention(q, k, v, ids)[keep], atol=1e-4)

    def test_splash_lowers_for_tpu(self):
        q, k, v, _ = draw(256, heads=2, kv_heads=1, dim=128, dtype=jnp.bfloat16)
        ids = segments(256)

        def loss(q, k, v):
            return accelerated_attention.splash(q, k, v, ids, None).astype(jnp.float32).sum()

        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(q, k, v)
        assert "tpu_custom_call" in exported.mlir_module()

    def test_splash_says_what_it_needs(self):
        q, k, v, _ = draw(100)
        with pytest.raises(ValueError, match="multiples of 128, not 100 and 8; use attention=blockwise"):
            accelerated_attention.splash(q, k, v, segments(100), None)

    def test_cudnn_masks_blocks_of_queries(self, monkeypatch):
        """The kernel itself needs a GPU; here its masks are checked through the reference implementation."""
        kernel, masks = jax.nn.dot_product_attention, []

        def plain(q, k, v, mask, implementation):
            assert implementation == "cudnn"
            masks.append(mask.shape)
            return kernel(q, k, v, mask=mask, implementation="xla")

        monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
        monkeypatch.setattr(accelerated_attention, "CUDNN_BLOCK", 32)
        q, k, v, _ = draw(70)
        ids = segments(70)
        keep = np.asarray(ids > 0)
        ours = jax.jit(accelerated_attention.cudnn)(q, k, v, ids)
        np.testing.assert_allclose(ours[keep], naive_attention(q, k, v, ids)[keep], atol=1e-5)
        assert masks == [(2, 1, 32, 32), (2, 1, 32, 64), (2, 1, 6, 70)]
        part = attention.Part(ids, jnp.int32(35))
        ours = jax.jit(accelerated_attention.cudnn)(q[:, 35:], k, v, ids[:, 35:], part)
        np.testing.assert_allclose(ours[keep[:, 35:]], naive_attention(q, k, v, ids)[:, 35:][keep[:, 35:]], atol=1e-5)
        assert masks[3:] == [(2, 1, 32, 70), (2, 1, 3, 70)]


def equations(jaxpr):
    """All equations of a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if inner := getattr(parameter, "jaxpr", parameter if hasattr(parameter, "eqns") else None):
                yield from equations(inner)


def sizes(jaxpr):
    """Sizes of all arrays that a jaxpr computes."""
    for equation in equations(jaxpr):
        yield from (np.prod(v.aval.shape, dtype=int) for v in equation.outvars if hasattr(v.aval, "shape"))


class TestRunLayers:
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = layers.Linear(4, 4, std=0.5, rngs=rngs)

        def __call__(self, x, shift):
            return jnp.tanh(self.linear(x)) + shift

    @pytest.mark.parametrize("remat", layers.REMAT)
    @pytest.mark.parametrize("scan_layers", [True, False])
    def test_every_way_is_the_same_function(self, scan_layers, remat):
        stacked = layers.stack(self.Layer, 3, nnx.Rngs(0))
        x, shift = jax.random.normal(jax.random.key(1), (2, 3, 4)), jnp.float32(0.1)

        graph, state = nnx.split(stacked)

        def run(**options):
            execution = layers.Execution(**options)

            def loss(state):
                return layers.run_layers(nnx.merge(graph, state), x, execution, shift).sum()

            return jax.jit(jax.value_and_grad(loss))(state)

        ours, reference = run(scan_layers=scan_layers, remat=remat), run()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, reference)
        by_hand = x
        for i in range(3):
            by_hand = jnp.tanh(by_hand @ stacked.linear.kernel[...][i]) + shift
        np.testing.assert_allclose(reference[0], by_hand.sum(), rtol=1e-5)

    def test_offload_keeps_layer_inputs_in_host_memory(self):
        graph, state = nnx.split(layers.stack(self.Layer, 3, nnx.Rngs(0)))

        def moved(remat):
            execution = layers.Execution(remat=remat)
            loss = lambda s: layers.run_layers(nnx.merge(graph, s), jnp.ones((2, 3, 4)), execution, 0.1).sum()  # noqa: E731
            return str(jax.make_jaxpr(jax.grad(loss))(state)).count("<host>")

        assert moved("offload") > 0 and moved("full") == moved("dots") == 0

    @pytest.mark.parametrize(("remat", "products"), [("attention", 8), ("dots", 8), ("full", 11)])
    def test_attention_whose_output_is_kept_is_not_computed_again(self, remat, products):
        """Three products forward, of which two run (scores with hidden ones, or without), and five backward."""
        q, k = jnp.ones((1, 1024, 4, 8)), jnp.ones((1, 1024, 2, 8))

        assert self.count("dot_general", attention.blockwise, remat, q, k) == products
        devices = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
        shared = lambda *x: attention._on_each(attention.blockwise, *x, devices, 1)  # noqa: E731
        assert self.count("dot_general", shared, remat, q, k) == products

    @pytest.mark.parametrize(("remat", "kernels"), [("attention", 3), ("dots", 3), ("full", 4)])
    def test_nor_is_splash_attention(self, remat, kernels):
        q, k = jnp.ones((1, 1024, 2, 128)), jnp.ones((1, 1024, 1, 128))
        run = lambda *x: accelerated_attention.splash(*x, None, interpret=True)  # noqa: E731
        assert self.count("pallas_call", run, remat, q, k) == kernels

    def count(self, primitive, run, remat, q, k) -> int:
        """How often a primitive is in what value and gradient of a layer need that is `run` and a tanh."""

        def loss(q, k, v):
            y = lambda q: jnp.tanh(run(q, k, v, jnp.ones(q.shape[:2], int)))  # noqa: E731
            return jax.checkpoint(y, policy=layers.POLICIES[remat])(q).sum()

        program = jax.make_jaxpr(jax.value_and_grad(loss))(q, k, k).jaxpr
        needed, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
        return sum(equation.primitive.name == primitive for equation in equations(needed))


class TestExecution:
    @pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("attention", "flash"), ("remat", "some")])
    def test_a_wrong_choice_is_named(self, field, value):
        with pytest.raises(ValueError, match=f"{field} is '{value}'; choose one of"):
            layers.Execution(**{field: value})

    def test_float32_is_computed_in_float32_everywhere(self):
        assert layers.Execution(dtype="float32").precision == "highest"
