"""The update: what it learns, that its shapes are stable, and that devices, packing and micro-batches do not matter."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stand_in import MESHES, StandIn, forced_devices, init_params, make_config, make_groups, mesh, run

from rti_jax import batching, learner
from rti_jax.types import Author

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Equal programs of different tests are compiled once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def reference():
    """State after one update in one micro-batch, and its metrics."""
    state, history, _ = run(make_config(batch={"buckets": [32], "rows_per_microbatch": 16}), mesh(1), make_groups(), 1)
    return jax.tree.map(np.asarray, state.params), history[0]


def assert_same(params, expected, rtol=1e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6, err_msg=jax.tree_util.keystr(path))


class TestUpdate:
    def test_gradient_is_the_global_one(self, reference):
        """The accumulated gradient equals jax.grad of the whole loss, written out for one unpacked row at a time."""
        config, on, model = make_config(), mesh(1), StandIn()
        params = init_params(on)
        batches = batching.build(make_groups(), make_config(batch={"packing": False}), row_multiple=1).microbatches
        logprobs = learner.make_logprobs_step(model, config, on)
        behavior = [logprobs(params, b) + 0.1 * np.sin(b.tokens) for b in batches]

        def loss(p):
            total = 0.0
            for batch, old in zip(batches, behavior, strict=True):
                logits = model.hidden(p, batch.tokens, batch.positions, batch.segment_ids) @ model.head(p) / 0.8
                own = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), batch.tokens[:, 1:, None], -1)[..., 0]
                old = np.where(batch.author == Author.POLICY, old, batch.behavior_logprobs)[:, 1:]
                mask, scale = batch.loss_mask[:, 1:], batch.loss_scale[:, 1:]
                ratio = jnp.exp(jnp.where(mask, own - np.where(mask, old, 0), 0))
                advantage = batch.advantages[:, 1:]
                surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
                total -= (scale * batch.weights[:, 1:] * surrogate).sum() / batch.denominator
            return total

        value, gradient = jax.value_and_grad(loss)(params)
        _, metrics = reference
        assert metrics["loss/total"] == pytest.approx(float(value), rel=1e-5)
        norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
        assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)

    @pytest.mark.parametrize(
        "batch",
        [
            {"buckets": [16, 32], "rows_per_microbatch": 1},
            {"buckets": [64], "rows_per_microbatch": 3},
            {"buckets": [32], "rows_per_microbatch": 2, "packing": False},
        ],
    )
    def test_no_split_or_packing_changes_it(self, reference, batch):
        # averaging the micro-batches' gradients would scale them by their number
        state, history, _ = run(make_config(batch=batch), mesh(1), make_groups(), 1)
        assert history[0]["loss/total"] == pytest.approx(reference[1]["loss/total"], rel=1e-5, abs=1e-7)
        assert history[0]["optimizer/grad_norm"] == pytest.approx(reference[1]["optimizer/grad_norm"], rel=1e-5)
        assert_same(state.params, reference[0])

    def test_order_of_the_groups_does_not_matter(self, reference):
        config = make_config(batch={"buckets": [32], "rows_per_microbatch": 16})
        state, _, _ = run(config, mesh(1), make_groups()[::-1], 1)
        assert_same(state.params, reference[0])

    def test_without_a_correction_it_is_grpos_bit_for_bit(self):
        plain = make_config(rti={"enabled": False}, reweight={"enabled": False})
        ours, _, _ = run(make_config(), mesh(1), make_groups(corrected=False))
        theirs, _, _ = run(plain, mesh(1), make_groups(corrected=False))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        changed, _, _ = run(make_config(), mesh(1), make_groups(corrected=True))
        assert not np.array_equal(changed.params["layers"]["mixer"]["bias"], ours.params["layers"]["mixer"]["bias"])

    def test_corrected_tokens_run_the_same_program(self):
        """Weights are data: a batch with corrections after one without compiles nothing."""
        config, on = make_config(), mesh(1)
        _, _, update = run(config, on, make_groups(corrected=False), 1)
        before = dict(update.traces)
        params = init_params(on)
        optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
        batches = batching.build(make_groups(corrected=True), config).microbatches
        update(
            learner.init_state(params, optimizer, on),
            [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches],
        )
        assert dict(update.traces) == before == {"accumulate": 1, "apply": 1}

    def test_twenty_batches_compile_no_more_than_the_buckets(self):
        config, on = make_config(batch={"buckets": [16, 24, 32], "rows_per_microbatch": 1}), mesh(1)
        state, _, update = run(config, on, make_groups(), 1)
        for seed in range(20):
            groups = make_groups(count=1 + seed % 4, seed=seed, corrected=seed % 2 == 0)
            batches = batching.build(groups, config).microbatches
            state, _ = update(state, [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches])
        assert update.traces["accumulate"] <= 3 and update.traces["apply"] == 1
        assert update.compiled_programs("accumulate") <= 3 and update.compiled_programs("apply") == 1
        before, shapes = update.programs, set()
        for seed in range(20):  # the same shapes again
            groups = make_groups(count=1 + seed % 4, seed=seed, corrected=seed % 2 == 0)
            batches = batching.build(groups, config).microbatches
            shapes |= {b.tokens.shape for b in batches}
            state, _ = update(state, [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches])
        assert update.programs == before == len(shapes) + 2  # zeros and apply; what compile/programs says

    @pytest.mark.parametrize("offload", [False, True])
    def test_state_and_sums_are_donated(self, offload):
        """Else there would be two of each for a moment: parameters, moments and gradients."""
        config, on = make_config(batch={"buckets": [32], "rows_per_microbatch": 1}), mesh(1)
        params = init_params(on)
        optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
        state = learner.init_state(params, optimizer, on, offload=offload)
        update = learner.make_update_step(StandIn(), config, on, optimizer)
        batches = batching.build(make_groups(), config).microbatches
        batches = [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches]
        update._compile(state)
        accumulate, sums = update._compiled["accumulate"], []
        update._compiled["accumulate"] = lambda p, g, b: sums.append(g) or accumulate(p, g, b)
        update(state, batches)
        assert len(sums) == len(batches) > 1
        assert all(x.is_deleted() for x in jax.tree.leaves((state, sums)))

    def test_a_gradient_that_is_not_finite_is_skipped_and_counted(self):
        config, on = make_config(), mesh(1)
        state, _, update = run(config, on, make_groups(), 1)
        before = jax.tree.map(np.array, state)
        batches = batching.build(make_groups(), config).microbatches  # policy tokens without a behaviour: NaN
        state, metrics = update(state, batches)
        assert metrics["optimizer/skipped"] == 1
        jax.tree.map(np.testing.assert_array_equal, state, before)
        batches = [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches]
        state, metrics = update(state, batches)
        assert metrics["optimizer/skipped"] == 0 and state.step == before.step + 1

    def test_on_policy_needs_no_behavior_and_equals_recomputing_it(self):
        config, on, model = make_config(), mesh(1), StandIn()
        params = init_params(on)
        optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
        cached = batching.build(make_groups(), config).microbatches
        own = [b._replace(behavior_logprobs=learner.make_logprobs_step(model, config, on)(params, b)) for b in cached]
        gap = max(
            np.abs(a.behavior_logprobs - b.behavior_logprobs)[b.author == Author.CORRECTOR].max(initial=0)
            for a, b in zip(own, cached, strict=True)
        )
        results = []
        for on_policy, batches in ((True, cached), (False, own)):
            update = learner.make_update_step(model, config, on, optimizer, on_policy=on_policy)
            results.append(update(learner.init_state(init_params(on), optimizer, on), batches))
        (state, metrics), (recomputed, expected) = results
        assert metrics["policy/ratio"] == metrics["corrector/ratio"] == 1.0
        assert metrics["corrector/scorer_gap"] == pytest.approx(gap, rel=1e-4) and gap > 0.01
        assert metrics["mismatch/max"] == pytest.approx(expected["mismatch/max"], rel=1e-5)
        assert_same(state.params, recomputed.params)

    def test_denominators_must_agree(self):
        config, on = make_config(), mesh(1)
        state, _, update = run(config, on, make_groups(), 0)
        batches = batching.build(make_groups(), config).microbatches
        for bad in ([], [batches[0], batches[0]._replace(denominator=np.float32(3))]):
            with pytest.raises(ValueError, match="denominator"):
                update(state, bad)


class TestMetrics:
    def test_by_source(self):
        _, (metrics,), _ = run(make_config(), mesh(1), make_groups(), 1, norms_by_source=True)
        groups = make_groups()
        corrected = [t for g in groups for m in g.trajectories for t in m.corrected_turns]
        assert metrics["corrector/tokens"] == sum(len(t.response_ids) for t in corrected)
        total = sum(len(t.response_ids) for g in groups for m in g.trajectories for t in m.turns)
        assert metrics["policy/tokens"] + metrics["corrector/tokens"] == total
        assert metrics["policy/ratio"] == pytest.approx(1.0, abs=0.1) and metrics["policy/weight"] == 1.0
        assert 0.8 <= metrics["corrector/weight"] <= 1.2
        # both parts point somewhere; together they can only be shorter than their sum
        parts = metrics["policy/grad_norm"], metrics["corrector/grad_norm"]
        assert min(parts) > 0 and max(parts) - min(parts) <= metrics["optimizer/grad_norm"] <= sum(parts)
        assert metrics["policy/entropy"] > 0 and metrics["optimizer/lr"] == pytest.approx(1e-2)

    def test_a_teachers_part_of_the_gradient(self):
        loss = {"baseline": "luffy", "teacher": {"path": "unused"}}
        groups = make_groups(corrected=False, count=1)
        members = [
            dataclasses.replace(t, turns=tuple(dataclasses.replace(x, teacher=t.success) for x in t.turns))
            for t in groups[0].trajectories
        ]
        groups = [dataclasses.replace(groups[0], trajectories=tuple(members))]
        config = make_config(loss=loss)
        _, (metrics,), _ = run(config, mesh(1), groups, 1, norms_by_source=True)
        taught = sum(len(x.response_ids) for t in members if t.success for x in t.turns)
        assert metrics["teacher/tokens"] == taught and 0 < metrics["teacher/probability"] < 0.5
        parts = metrics["policy/grad_norm"], metrics["teacher/grad_norm"]
        assert min(parts) > 0 and max(parts) - min(parts) <= metrics["optimizer/grad_norm"] <= sum(parts)
        assert metrics["loss/entropy"] > 0 and metrics["policy/clip_fraction"] == 0
        plain = make_config(loss={**loss, "entropy_coef": 0.0})
        _, (without,), _ = run(plain, mesh(1), groups, 1)
        bonus = without["loss/total"] - metrics["loss/total"]
        assert bonus == pytest.approx(0.001 * metrics["loss/entropy"], rel=1e-3)
        assert metrics["optimizer/grad_norm"] != without["optimizer/grad_norm"]  # the bonus has a gradient

    def test_what_has_no_tokens_is_absent(self):
        _, (metrics,), update = run(make_config(), mesh(1), make_groups(corrected=False), 1, norms_by_source=True)
        assert metrics["corrector/tokens"] == 0 and "corrector/ratio" not in metrics
        assert "corrector/grad_norm" not in metrics and update.traces["corrected"] == 0


class TestDevices:
    @pytest.fixture(scope="class")
    def eight(self):
        """What stand_in.py gives on eight devices."""
        flags = {"XLA_FLAGS": forced_devices(8), "JAX_PLATFORMS": "cpu"}
        search = os.pathsep.join([str(HERE.parent), str(HERE)])
        done = subprocess.run(
            [sys.executable, str(HERE / "stand_in.py")],
            env={**os.environ, **flags, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    @pytest.mark.slow
    @pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
    @pytest.mark.parametrize("name", [name for name in MESHES if name != "1"])
    def test_no_mesh_or_split_changes_loss_or_gradient(self, eight, dtype, tolerance, name):
        one, other = eight[dtype]["1"], eight[dtype][name]
        assert (other["microbatches"] > one["microbatches"]) == ("," in name)
        assert other["loss"] == pytest.approx(one["loss"], rel=tolerance)
        largest = np.abs(one["gradient"]).max()
        assert largest > 0.01
        np.testing.assert_allclose(other["gradient"], one["gradient"], rtol=tolerance, atol=tolerance * largest)

    @pytest.mark.slow
    def test_eight_devices_give_the_same_update(self, eight):
        state, history, _ = run(make_config(), mesh(1), make_groups(), norms_by_source=True)
        assert eight["devices"] == 8
        for got, expected in zip(eight["history"], history, strict=True):
            assert got.keys() == expected.keys()
            for name in expected:
                assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        np.testing.assert_allclose(
            eight["kernel"], np.ravel(state.params["layers"]["mixer"]["kernel"]), rtol=1e-5, atol=1e-6
        )
        assert eight["shards"] == [[2, 16, 4]] * 3  # of the kernel and its two moments, after two updates
        assert eight["programs"] == {"accumulate": 1, "apply": 1, "corrected": 1}  # the first state's serve the others

    def test_moments_are_sharded_as_their_parameters(self):
        on = mesh(1)
        params = init_params(on)
        for name in ("adamw", "muon"):
            optimizer = learner.make_optimizer(make_config(optimizer={"name": name}).optimizer, params, 10)
            state = learner.init_state(params, optimizer, on)
            by_shape = {p.shape: p.sharding for p in jax.tree.leaves(params)}
            moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape in by_shape]
            assert moments and all(m.sharding == by_shape[m.shape] for m in moments)


class TestPrecision:
    def test_a_hundred_updates_of_one_millionth_arrive_under_bfloat16_weights(self):
        """Masters are float32: bfloat16 ones would hold 1.0 after any number of updates of 1e-6."""
        config, on = make_config(optimizer={"lr": 1e-6, "weight_decay": 0.0}, steps=100), mesh(1)
        params = init_params(on)
        optimizer = learner.make_optimizer(config.optimizer, params, 100)
        state = learner.init_state(params, optimizer, on)
        update = learner.make_update_step(Narrow(), config, on, optimizer)
        batches = batching.build(make_groups(), config).microbatches
        batches = [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches]
        before = np.asarray(params["layers"]["mixer"]["kernel"])
        for _ in range(100):
            state, metrics = update(state, batches)
        assert metrics["optimizer/skipped"] == 0
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim)
        moved = np.abs(np.asarray(state.params["layers"]["mixer"]["kernel"]) - before)
        # Adam moves each weight by up to lr a step, always to the same side here: the batch stays the same
        assert np.median(moved) == pytest.approx(1e-4, rel=0.1) and moved.max() < 1.2e-4
        assert (before.astype(jnp.bfloat16) + jnp.bfloat16(1e-6) == before.astype(jnp.bfloat16)).mean() > 0.99


class Narrow(StandIn):
    """Sees its weights in bfloat16 (and computes in float32: not every product of bfloat16 is implemented on CPU)."""

    def hidden(self, params, *batch):
        return super().hidden(jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params), *batch)

    def head(self, params):
        return super().head(params).astype(jnp.bfloat16).astype(jnp.float32)


class TestOffload:
    def test_moments_in_host_memory_change_nothing(self, tmp_path):
        from rti_jax import checkpoint

        config, on = make_config(), mesh(1)
        batches = batching.build(make_groups(), config).microbatches
        batches = [batching.with_behavior(b, np.full(b.tokens.shape, -3.0)) for b in batches]
        states = []
        for offload in (False, True):
            params = init_params(on)
            optimizer = learner.make_optimizer(config.optimizer, params, config.steps)
            state = learner.init_state(params, optimizer, on, offload=offload)
            update = learner.make_update_step(StandIn(), config, on, optimizer)
            for _ in range(2):
                state, _ = update(state, batches)
            states.append(state)
        jax.tree.map(np.testing.assert_array_equal, *states)
        kinds = lambda state: {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}  # noqa: E731
        assert [kinds(s) for s in states] == [{"device"}, {"pinned_host"}]
        assert {x.sharding.memory_kind for x in jax.tree.leaves(states[1].params)} == {"device"}
        checkpoint.save(tmp_path, 2, states[1], {})
        restored = checkpoint.restore(tmp_path, states[1]).state
        jax.tree.map(np.testing.assert_array_equal, restored, states[1])
        assert kinds(restored) == {"pinned_host"}
