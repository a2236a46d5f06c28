"""Rows, packing and denominators: every token once, at its place, with its author, whatever the packing."""

import dataclasses
import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rti_jax import batching, losses, packing
from rti_jax.config import Config, ConfigError, LossConfig, load_config
from rti_jax.types import Author, Correction, Group, IntervenedRollout, Intervention, Status, Trajectory, Turn

NAN = math.nan
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def config(**sections):
    batch = {"buckets": [16, 32], "rows_per_microbatch": 2} | sections.pop("batch", {})
    return Config.model_validate({"batch": batch, **sections})


def turn(trajectory, index, prompt, response, correction=None, logprob=-0.5):
    logprobs = tuple(logprob - 0.1 * i for i in range(len(response)))
    return Turn(f"{trajectory}/{index}", tuple(prompt), tuple(response), logprobs, "stop", 0, correction)


def trajectory(group, member, turns, reward):
    status = Status.TIMEOUT if reward is None else Status.SUCCESS if reward else Status.FAILURE
    return Trajectory(f"{group}/{member}", group, member, "task", tuple(turns), status, reward)


def simple(group, rewards, lengths):
    """Members of one turn with a prompt of three tokens and responses of the given lengths."""
    members = [
        trajectory(group, i, [turn(f"{group}/{i}", 0, [1, 2, 3], range(10, 10 + n))], r)
        for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(group, "task", tuple(members))


@pytest.fixture
def corrected():
    """Two turns, the second one written by the corrector; the prompt of the second extends the first."""
    scores = {"rollout_logprobs": tuple(np.log([0.4, 0.5])), "corrector_logprobs": tuple(np.log([0.6, 0.55]))}
    first = turn("g/0", 0, [1, 2, 3], [10, 11])
    second = turn("g/0", 1, [1, 2, 3, 10, 11, 4, 5], [20, 21], Correction((20, 9), **scores), logprob=-7.0)
    return Group("g", "task", (trajectory("g", 0, [first, second], 1.0), simple("g", [0, 0], [2, 2]).trajectories[1]))


class TestRows:
    def test_a_prompt_that_extends_continues_the_row(self, corrected):
        (row,) = batching.trajectory_rows(corrected.trajectories[0], 3, 2.0, 0.25, config())
        t, e, p, c = Author.TEMPLATE, Author.ENVIRONMENT, Author.POLICY, Author.CORRECTOR
        assert row.tokens.tolist() == [1, 2, 3, 10, 11, 4, 5, 20, 21]
        assert row.author.tolist() == [t, t, t, p, p, e, e, c, c]
        assert row.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
        assert row.trajectory == 3
        np.testing.assert_array_equal(row.advantages, 2.0 * row.loss_mask)
        np.testing.assert_array_equal(row.loss_scale, 0.25 * row.loss_mask)

    def test_what_corrected_tokens_carry(self, corrected):
        (row,) = batching.trajectory_rows(corrected.trajectories[0], 0, 1.0, 1.0, config())
        rollout = np.log([0.4, 0.5])
        # the sampler's values, -7 and -7.1, are under the corrector's prompt and must not appear
        np.testing.assert_allclose(row.behavior_logprobs, [NAN] * 7 + list(rollout), rtol=1e-6)
        np.testing.assert_allclose(row.sampler_logprobs, [NAN] * 3 + [-0.5, -0.6] + [NAN] * 4, rtol=1e-6)
        np.testing.assert_allclose(row.weights, [1] * 7 + [1.2, 1.1], rtol=1e-6)

    def test_reweighting_off(self, corrected):
        (row,) = batching.trajectory_rows(corrected.trajectories[0], 0, 1.0, 1.0, config(reweight={"enabled": False}))
        assert (row.weights == 1).all()

    def test_behavior_of_the_engine(self, corrected):
        (row,) = batching.trajectory_rows(corrected.trajectories[0], 0, 1.0, 1.0, config(loss={"behavior": "engine"}))
        np.testing.assert_allclose(row.behavior_logprobs[3:5], [-0.5, -0.6], rtol=1e-6)
        np.testing.assert_allclose(row.behavior_logprobs[7], np.log(0.4), rtol=1e-6)

    def test_a_prompt_that_drops_earlier_thinking_starts_a_row(self):
        # the template removed token 10 from turn 0 when it rendered turn 1
        turns = [
            turn("g/0", 0, [1, 2], [10, 11]),
            turn("g/0", 1, [1, 2, 11, 3], [12]),
            turn("g/0", 2, [1, 2, 11, 3, 12, 4], [13]),
        ]
        rows = batching.trajectory_rows(trajectory("g", 0, turns, 1.0), 0, 1.0, 1.0, config())
        assert [r.tokens.tolist() for r in rows] == [[1, 2, 10, 11], [1, 2, 11, 3, 12, 4, 13]]
        # token 11 is trained in its own row only; merging by position would train it twice
        assert [r.loss_mask.sum() for r in rows] == [2, 2]

    def test_a_shorter_prompt_is_no_extension(self):
        turns = [turn("g/0", 0, [1, 2], [10, 11]), turn("g/0", 1, [1, 2, 10], [11])]
        rows = batching.trajectory_rows(trajectory("g", 0, turns, 1.0), 0, 1.0, 1.0, config())
        assert [len(r) for r in rows] == [4, 4]

    def test_an_unscored_correction_is_named(self):
        bad = trajectory("g", 0, [turn("g/0", 0, [1], [2], Correction((3,)))], 1.0)
        with pytest.raises(ValueError, match="g/0/0"):
            batching.trajectory_rows(bad, 0, 1.0, 1.0, config())


class TestBuild:
    def test_every_trained_token_once(self):
        groups = [simple("a", [1, 0, 0], [2, 9, 4]), simple("b", [0, 0, None], [3, 3, 3])]
        packed = batching.build(groups, config())
        # the timed-out member has no row; the all-failed group stays
        assert packed.trajectory_ids == ("a/0", "a/1", "a/2", "b/0", "b/1")
        trained = np.concatenate([b.trajectory[b.loss_mask] for b in packed.microbatches])
        assert np.bincount(trained).tolist() == [2, 9, 4, 3, 3]
        assert packed.metrics["batch/trained_tokens"] == 21
        advantages = np.concatenate([b.advantages[b.loss_mask] for b in packed.microbatches])
        np.testing.assert_allclose(advantages[trained == 0], 1.41421356, rtol=1e-6)
        assert (advantages[trained >= 3] == 0).all()

    def test_positions_restart_and_padding_is_marked(self):
        packed = batching.build([simple("a", [1, 0], [4, 5])], config())
        (batch,) = packed.microbatches
        assert batch.tokens.shape == (4, 16)  # twice the two lines of the longest bucket
        assert batch.positions[0].tolist() == [*range(8), *range(7), 0]
        assert batch.segment_ids[0].tolist() == [1] * 8 + [2] * 7 + [0]
        assert (batch.author[batch.segment_ids == 0] == Author.PADDING).all()
        assert (batch.trajectory[batch.segment_ids == 0] == -1).all()
        assert packed.metrics["batch/padding_fraction"] == pytest.approx(1 - 15 / 64)

    def test_same_input_same_arrays(self):
        groups = [simple("a", [1, 0, 0], [2, 9, 4]), simple("b", [0, 1], [3, 3])]
        one, two = (batching.build(groups, config()).microbatches for _ in range(2))
        for a, b in zip(one, two, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)

    def test_too_long_names_the_key(self):
        with pytest.raises(ConfigError, match=r"43 tokens.*batch\.buckets=\[16, 32\]"):
            batching.build([simple("a", [1, 0], [40, 2])], config())

    def test_flat_rows_may_be_left_out_without_changing_what_the_others_count(self):
        groups = [simple("a", [1, 0], [4, 5]), simple("b", [0, 0], [4, 5])]
        whole, less = batching.build(groups, config()), batching.build(groups, config(), leave_out_flat=True)
        assert less.metrics["batch/tokens"] == 15 and whole.metrics["batch/tokens"] == 30
        assert less.microbatches[0].denominator == whole.microbatches[0].denominator == 4
        with pytest.raises(ValueError, match="kl_beta"):
            batching.build(groups, config(loss={"kl_beta": 0.1}), leave_out_flat=True)

    def test_nothing_to_train(self):
        packed = batching.build([simple("a", [None, 0], [4, 5])], config())
        assert packed.microbatches == () and not packed.has_gradient and packed.metrics["groups/dropped"] == 1

    def test_corrected_tokens_are_counted(self, corrected):
        metrics = batching.build([corrected], config()).metrics
        assert metrics["corrector/token_share"] == pytest.approx(2 / 6)
        assert metrics["corrector/trajectory_share"] == 1 / 2 and "teacher/token_share" not in metrics
        assert metrics["reweight/mean_copied"] == pytest.approx(1.2)
        assert metrics["reweight/mean_edited"] == pytest.approx(1.1)

    def test_evidence_cannot_reach_a_batch(self, corrected):
        canary = 987654
        note = Intervention("g/0/1", f"evidence {canary}", True, True, f"because {canary}", "y", ())
        attempt = IntervenedRollout(corrected.trajectories[0], (note,))
        packed = batching.build([Group("g", "task", corrected.trajectories, attempts=(attempt,))], config())
        text = json.dumps([[np.asarray(x).tolist() for x in b] for b in packed.microbatches])
        assert str(canary) not in text and packed.metrics["batch/trajectories"] == 2


class TestAggregation:
    """Token losses [4] and [1, 1, 1] of two trajectories."""

    LOSSES = np.array([4.0]), np.array([1.0, 1.0, 1.0])

    @pytest.mark.parametrize(
        ("loss", "expected"),
        [
            ({"variant": "grpo"}, 2.5),  # (4 + 1) / 2
            ({"variant": "gspo"}, 2.5),
            ({"variant": "dapo"}, 1.75),  # 7 / 4; the mean of the two means would be 2.5
            ({"variant": "dr_grpo"}, 0.035),  # 7 / (100 tokens * 2 trajectories)
            ({"variant": "dr_grpo", "constant": 14.0}, 0.5),
            ({"variant": "grpo", "aggregation": "token_mean"}, 1.75),
        ],
    )
    def test_by_hand(self, loss, expected):
        scales, denominator = batching.aggregation([1, 3], LossConfig(**loss), max_tokens=100)
        total = sum((scale * values).sum() for scale, values in zip(scales, self.LOSSES, strict=True))
        assert total / denominator == pytest.approx(expected)

    def test_a_trajectory_over_two_rows_is_one_sequence(self):
        # rows of 2 and 1 trained tokens: each counts 1/3; per row it would be 1/2 and 1, and the denominator 3
        turns = [turn("g/0", 0, [1, 2], [10, 11]), turn("g/0", 1, [1, 11], [12])]
        group = Group(
            "g", "task", (trajectory("g", 0, turns, 1.0), trajectory("g", 1, [turn("g/1", 0, [1], [2])], 0.0))
        )
        (batch,) = batching.build([group], config()).microbatches
        np.testing.assert_allclose(batch.loss_scale[batch.trajectory == 0].sum(), 1.0, rtol=1e-6)
        assert batch.denominator == 2

    def test_means_of_means_are_wrong(self):
        # 2, 50, 3, 40 tokens with advantages +1 -1 +1 -1: the objective's token mean is -85/95 = -0.8947, its sequence
        # mean is 0; averaging micro-batches of one sequence each gives 0 for both
        group = simple("g", [1, 0, 1, 0], [2, 50, 3, 40])
        results = {}
        for aggregation in ("token_mean", "sequence_mean"):
            settings_ = config(batch={"buckets": [64]}, loss={"aggregation": aggregation})
            batches = batching.build([group], settings_).microbatches
            total = 0.0
            for batch in batches:
                logprobs = jnp.zeros(batch.tokens.shape)
                batch = batching.with_behavior(batch, np.zeros(batch.tokens.shape))
                total += losses.policy_loss(
                    logprobs, batch, batch.author == Author.CORRECTOR, clip_low=0.2, clip_high=0.2
                ).loss_sum
            results[aggregation] = float(total / batches[0].denominator)
        assert results["token_mean"] == pytest.approx(85 / 95, rel=1e-5)
        assert results["sequence_mean"] == pytest.approx(0.0, abs=1e-6)


class TestFilling:
    def test_behavior_fills_the_policys_tokens_only(self, corrected):
        (batch,) = batching.build([corrected], config()).microbatches
        filled = batching.with_behavior(batch, np.full(batch.tokens.shape, -3.0))
        assert (filled.behavior_logprobs[batch.author == Author.POLICY] == -3).all()
        corrector = batch.author == Author.CORRECTOR
        np.testing.assert_array_equal(filled.behavior_logprobs[corrector], batch.behavior_logprobs[corrector])
        assert np.isnan(filled.behavior_logprobs[~batch.loss_mask]).all()

    def test_reference_fills_all_trained_tokens(self, corrected):
        (batch,) = batching.build([corrected], config()).microbatches
        filled = batching.with_reference(batch, np.full(batch.tokens.shape, -3.0))
        np.testing.assert_array_equal(np.isfinite(filled.ref_logprobs), batch.loss_mask)

    def test_wrong_shape(self, corrected):
        (batch,) = batching.build([corrected], config()).microbatches
        with pytest.raises(ValueError, match="shape"):
            batching.with_behavior(batch, np.zeros((1, 1)))

    def test_a_teachers_turn_is_trained_without_behaviour_and_sampler(self):
        group = simple("g", [1, 0], [2, 3])
        taught = [dataclasses.replace(t, teacher=True) for t in group.trajectories[0].turns]
        first = dataclasses.replace(group.trajectories[0], turns=tuple(taught))
        packed = batching.build([dataclasses.replace(group, trajectories=(first, group.trajectories[1]))], config())
        (batch,) = packed.microbatches
        teacher = batch.author == Author.TEACHER
        assert teacher.sum() == 2 and batch.loss_mask[teacher].all() and (batch.advantages[teacher] == 1).all()
        filled = batching.with_behavior(batch, np.full(batch.tokens.shape, -3.0))
        assert np.isnan(filled.behavior_logprobs[teacher]).all() and np.isnan(batch.sampler_logprobs[teacher]).all()
        assert packed.metrics["teacher/token_share"] == pytest.approx(2 / 5)
        assert (packed.metrics["corrector/token_share"], packed.metrics["teacher/trajectory_share"]) == (0, 0.5)
        with pytest.raises(ValueError, match="a teacher's token has"):
            batching.check_authors(batch._replace(sampler_logprobs=np.where(teacher, -1.0, batch.sampler_logprobs)))

    def test_checks_see_what_is_wrong(self, corrected):
        (batch,) = batching.build([corrected], config()).microbatches
        batching.check_authors(batch)
        faults = {
            "loss mask": batch._replace(loss_mask=np.ones_like(batch.loss_mask)),
            "nobody sampled": batch._replace(behavior_logprobs=np.zeros_like(batch.behavior_logprobs)),
            "no behaviour": batch._replace(behavior_logprobs=np.full_like(batch.behavior_logprobs, NAN)),
            "sampler's": batch._replace(sampler_logprobs=np.zeros_like(batch.sampler_logprobs)),
            "has a weight": batch._replace(weights=np.full_like(batch.weights, 1.1)),
            "counts nothing": batch._replace(loss_scale=np.zeros_like(batch.loss_scale)),
        }
        for text, bad in faults.items():
            with pytest.raises(ValueError, match=text):
                batching.check_authors(bad)


class TestPacking:
    def test_first_fit_decreasing(self):
        lines = packing.first_fit_decreasing([5, 10, 30, 6, 2], [16, 32], packing=True)
        # longest first: 30 | 10 6 | 5 ; the 2 fits beside the 30
        assert [(line.bucket, line.rows) for line in lines] == [(32, [2, 4]), (16, [1, 3]), (16, [0])]

    def test_a_part_micro_batch_moves_where_there_is_room(self):
        # three lines of 16 would need a micro-batch of four; the one of 32 has two free lines of its four
        plan = packing.plan_microbatches([30, 30, 16, 16, 16], [16, 32], longest_lines=4)
        assert plan == [((4, 32), [[0], [1], [2, 3], [4]])]

    def test_devices_divide_the_lines(self):
        ((shape, _),) = packing.plan_microbatches([5], [16, 32], longest_lines=3, multiple=8)
        assert shape == (8, 16)

    MIXTURES = [(2000, 1.0), (1000, 1.2), (4000, 0.8)]  # median and spread of log-normal lengths

    def mixture(self, median, spread, rows=512, seed=0):
        lengths = np.random.default_rng(seed).lognormal(np.log(median), spread, rows)
        return np.clip(np.round(lengths), 200, 16384).astype(int).tolist()

    @pytest.mark.parametrize("mixture", MIXTURES)
    @pytest.mark.parametrize("devices", [1, 8])
    def test_realistic_mixtures_are_packed_with_less_than_five_percent_padding(self, mixture, devices):
        lengths = self.mixture(*mixture)
        plan = packing.plan_microbatches(lengths, [4096, 16384], 8, devices)
        assert sorted(i for _, lines in plan for line in lines for i in line) == list(range(512))
        # one line a row would be half padding; first-fit with whole micro-batches only has up to 10% in the last ones
        assert 1 - sum(lengths) / sum(count * bucket for (count, bucket), _ in plan) < 0.05
        shapes = {shape for shape, _ in plan}
        assert len(shapes) <= 4 and all(count % devices == 0 for count, _ in shapes)

    @pytest.mark.parametrize("name", ["navigation_qwen3_8b", "tau2_retail_qwen3_8b"])
    def test_batches_of_the_full_size_configs_too(self, name):
        """On average over steps: a step's batch may end just after a micro-batch was opened."""
        own = load_config(CONFIGS / f"{name}.yaml")
        rows, devices = own.rollout.groups_per_step * own.rollout.group_size, own.mesh.data * own.mesh.fsdp
        lines, tokens, cells, shapes = own.batch.rows_per_microbatch, 0, 0, set()
        for seed in range(10):
            lengths = self.mixture(2000, 1.0, rows, seed)
            plan = packing.plan_microbatches(lengths, own.batch.buckets, lines, devices)
            tokens += sum(lengths)
            cells += sum(count * bucket for (count, bucket), _ in plan)
            shapes |= {shape for shape, _ in plan}
        assert 1 - tokens / cells < 0.05  # of the second config 0.08 without its bucket of 4096
        assert len(shapes) <= 2 * len(own.batch.buckets)

    @pytest.mark.parametrize("mixture", MIXTURES)
    def test_devices_get_about_equal_tokens_and_attention(self, mixture):
        """Devices wait for the slowest of each micro-batch: at most 1.2 times the mean in all; tokens within 1.05."""
        lengths, devices = self.mixture(*mixture), 8
        waited, costs, tokens = 0.0, np.zeros(devices), np.zeros(devices)
        for (count, _), lines in packing.plan_microbatches(lengths, [4096, 16384], 16, devices):
            lines = lines + [[]] * (count - len(lines))
            cost = [packing.attention_cost(line, lengths) for line in lines]
            cost = np.reshape(cost, (devices, -1)).sum(1)
            waited += cost.max()
            costs += cost
            tokens += np.reshape([sum(lengths[i] for i in line) for line in lines], (devices, -1)).sum(1)
        assert waited < 1.2 * costs.mean() and costs.max() < 1.2 * costs.mean()  # in order of packing: 1.45
        assert tokens.max() < 1.05 * tokens.mean()

    def test_small_micro_batches_keep_their_plan(self):
        # the quickstart's shapes: its numbers depend on the order of summation, so that its plan has to stay
        plan = packing.plan_microbatches([500] * 6 + [250] * 23, [256, 512], 8)
        assert [(shape, len(lines)) for shape, lines in plan] == [((16, 256), 16), ((16, 256), 7), ((8, 512), 6)]
        large = packing.plan_microbatches([n * 32 for n in [500] * 6 + [250] * 23], [8192, 16384], 8)
        rest = [((2, 8192), 2)] * 3 + [((2, 8192), 1)] + [((1, 16384), 1)] * 6
        assert [(shape, len(lines)) for shape, lines in large] == [((16, 8192), 16), *rest]

    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 64 * 1024), max_size=40),
        lines=st.integers(1, 5),
        multiple=st.sampled_from([1, 2, 8]),
        packed=st.booleans(),
    )
    def test_large_micro_batches_too_hold_every_row_once(self, lengths, lines, multiple, packed):
        plan = packing.plan_microbatches(lengths, [8192, 24576, 65536], lines, multiple, packed)
        rows = [i for _, chosen in plan for line in chosen for i in line]
        assert sorted(rows) == list(range(len(lengths)))
        assert len({shape for shape, _ in plan}) <= 6
        for (count, bucket), chosen in plan:
            assert 0 < len(chosen) <= count and count % multiple == 0 and any(chosen)
            assert all(sum(lengths[i] for i in line) <= bucket for line in chosen)
            assert packed or all(len(line) <= 1 for line in chosen)

    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 64), max_size=40),
        lines=st.integers(1, 5),
        multiple=st.sampled_from([1, 2, 8]),
        packed=st.booleans(),
    )
    def test_every_row_once_within_its_line_and_few_shapes(self, lengths, lines, multiple, packed):
        plan = packing.plan_microbatches(lengths, [8, 24, 64], lines, multiple, packed)
        rows = [i for _, chosen in plan for line in chosen for i in line]
        assert sorted(rows) == list(range(len(lengths)))
        assert len({shape for shape, _ in plan}) <= 3
        for (count, bucket), chosen in plan:
            assert 0 < len(chosen) <= count and count % multiple == 0
            assert all(sum(lengths[i] for i in line) <= bucket for line in chosen)
            assert packed or all(len(line) <= 1 for line in chosen)


class TestAgree:
    """Two hosts: rows of both buckets and a correction on one, a few short rows on the other."""

    @pytest.fixture
    def parts(self, corrected):
        settings_ = config(batch={"buckets": [16, 32], "rows_per_microbatch": 2})
        groups = [simple("a", [1, 0, 0], [20, 25, 27]), corrected], [simple("b", [1, 0], [9, 2])]
        own = [batching.build(g, settings_, hosts=2) for g in groups]
        return own, [batching.agree(p, [q.outline for q in own], settings_) for p in own], settings_

    def test_the_same_shapes_in_the_same_order_padded_by_empty_ones(self, parts):
        own, agreed, _ = parts
        shapes = [[b.tokens.shape for b in p.microbatches] for p in own]
        assert shapes[1] == [(2, 16)] and set(shapes[0]) > {(1, 32)}
        assert len({tuple(b.tokens.shape for b in p.microbatches) for p in agreed}) == 1
        assert agreed[0].corrected == agreed[1].corrected and sum(agreed[0].corrected) == 1
        trained = [sum(int(b.loss_mask.sum()) for b in p.microbatches) for p in agreed]
        assert trained == [sum(p.trained) for p in own]  # nothing is lost

    def test_denominator_and_metrics_are_those_of_all(self, parts, corrected):
        _, agreed, settings_ = parts
        assert {float(b.denominator) for p in agreed for b in p.microbatches} == {7.0}  # trajectories, not 5 and 2
        assert agreed[0].metrics == agreed[1].metrics
        groups = [simple("a", [1, 0, 0], [20, 25, 27]), corrected, simple("b", [1, 0], [9, 2])]
        whole = batching.build(groups, settings_).metrics
        for name in whole.keys() - {"batch/microbatches", "batch/buckets", "batch/padding_fraction"}:
            assert agreed[0].metrics[name] == pytest.approx(whole[name]), name
        cells = 2 * sum(b.tokens.size for b in agreed[0].microbatches)
        assert agreed[0].metrics["batch/padding_fraction"] == pytest.approx(1 - whole["batch/tokens"] / cells)

    def test_extremes_are_those_of_all(self, parts):
        own, _, settings_ = parts
        found = {"reweight/min_edited": 0.8, "reweight/max_edited": 1.0}, {"reweight/min_edited": 0.9}
        found[1]["reweight/max_edited"] = 1.2
        outlines = [p.outline._replace(extremes=e) for p, e in zip(own, found, strict=True)]
        for part in own:
            agreed = batching.agree(part, outlines, settings_)
            assert agreed.extremes == {"reweight/min_edited": 0.8, "reweight/max_edited": 1.2}

    def test_a_host_without_rows_takes_part(self):
        settings_ = config()
        own = [batching.build(g, settings_, hosts=2) for g in ([simple("a", [1, 0], [3, 4])], [])]
        first, second = (batching.agree(p, [q.outline for q in own], settings_) for p in own)
        assert [b.tokens.shape for b in first.microbatches] == [b.tokens.shape for b in second.microbatches]
        assert second.has_gradient and not any(b.loss_mask.any() for b in second.microbatches)

    def test_groups_keep_their_minibatch(self):
        groups = [simple(name, [1, 0], [1, 1]) for name in "abcde"]
        hosts = (
            batching.split_groups(groups[::2], 2, range(0, 5, 2), 5),
            batching.split_groups(groups[1::2], 2, range(1, 5, 2), 5),
        )
        assert [[[g.id for g in part] for part in host] for host in hosts] == [[["a", "c", "e"], []], [[], ["b", "d"]]]


def test_minibatches_hold_whole_groups():
    groups = [simple(name, [1, 0], [1, 1]) for name in "abcde"]
    parts = batching.split_groups(groups, 2)
    assert [[g.id for g in part] for part in parts] == [["a", "c", "e"], ["b", "d"]]
    assert len(batching.split_groups(groups[:1], 4)) == 1
