"""On-policy distillation: teacher and student on the same ids at the same places, and nothing to learn from oneself."""

import jax
import numpy as np
import pytest
from fake_server import FakeServer
from tiny_models import byte_tokenizer, make_qwen3, reference_logprobs

from rti_jax import batching, distillation
from rti_jax.config import Config, ConfigError
from rti_jax.runs import Run
from rti_jax.runtime import load_policy
from rti_jax.training_state import Learner
from rti_jax.types import Group, Status, Trajectory, Turn
from tests.fakes import tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The student; another model of its vocabulary, deeper; one with another tokenizer."""
    base = tmp_path_factory.mktemp("models")
    student, teacher = make_qwen3(base / "student"), make_qwen3(base / "teacher", seed=1, num_hidden_layers=3)
    foreign = make_qwen3(base / "foreign", tokenizer=False)
    tiny_tokenizer().save_pretrained(foreign)
    return student, teacher, foreign


def config_of(student, **loss):
    return Config.model_validate(
        {
            "model": {"path": str(student), "dtype": "float32", "remat": "none"},
            "batch": {"buckets": [32], "rows_per_microbatch": 2},
            "sampling": {"temperature": 0.8},
            "optimizer": {"lr": 1e-2},
            "loss": {"baseline": "opd", **loss},
        }
    )


PROMPTS = ((5, 6), (7, 8, 9, 10, 11, 12, 13), (14,))
RESPONSES = ((20,), (21, 22, 23, 24), (25,))  # answers of one token, prompts of unequal length


def groups():
    """Three members of one group, one of which succeeds; rewards play no part."""
    members = []
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        turn = Turn(f"g/{i}/0", prompt, response, (-3.0,) * len(response), "stop", 0)
        status = Status.SUCCESS if i == 1 else Status.FAILURE
        members.append(Trajectory(f"g/{i}", "g", i, "t", (turn,), status, float(i == 1)))
    return [Group("g", "t", tuple(members))]


def by_member(batch, values):
    """Values [B, T] at the trained tokens of each trajectory, in order."""
    return [values[(batch.trajectory == i) & batch.loss_mask] for i in range(len(PROMPTS))]


class TestFolder:
    def test_advantages_stand_at_the_answers_whatever_the_prompts_lengths(self, folders):
        student, teacher, _ = folders
        config = config_of(student, teacher={"path": str(teacher)})
        (batch,) = batching.build(groups(), config).microbatches
        assert np.isnan(batch.advantages[batch.loss_mask]).all()  # not known yet: a forgotten teacher is loud
        policy = load_policy(config)
        taught = distillation.make_teacher(config, policy)(batch)
        own = distillation.make_teacher(config_of(student, teacher={"path": str(student)}), policy)(batch)
        filled = batching.with_distillation(batch, own, taught)
        found = by_member(filled, filled.advantages)
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ours, theirs = (reference_logprobs(f, prompt, response, 0.8) for f in (student, teacher))
            np.testing.assert_allclose(found[i], theirs - ours, atol=2e-5)  # the other sign is 2 |A| away
            assert np.abs(theirs - ours).max() > 0.1
        assert not filled.advantages[~batch.loss_mask].any()
        said = distillation.statistics([filled], [taught])
        flat = np.concatenate(found)
        assert said["teacher/reverse_kl"] == pytest.approx(-flat.mean(), rel=1e-5)
        assert said["teacher/logprob"] == pytest.approx(np.concatenate(by_member(batch, taught)).mean(), rel=1e-5)

    def test_its_temperature_is_the_rollouts_unless_given(self, folders):
        student, teacher, _ = folders
        (batch,) = batching.build(groups(), config_of(student, teacher={"path": str(teacher)})).microbatches
        config = config_of(student, teacher={"path": str(teacher), "temperature": 1.5})
        found = by_member(batch, distillation.make_teacher(config, load_policy(config))(batch))
        np.testing.assert_allclose(found[1], reference_logprobs(teacher, PROMPTS[1], RESPONSES[1], 1.5), atol=2e-5)

    def test_another_vocabulary_is_refused(self, folders):
        student, _, foreign = folders
        config = config_of(student, teacher={"path": str(foreign)})
        with pytest.raises(ConfigError, match="loss.teacher.path=.*another vocabulary than the policy"):
            distillation.make_teacher(config, load_policy(config))

    def test_no_model_there(self, folders):
        config = config_of(folders[0], teacher={"path": "/nowhere"})
        with pytest.raises(ConfigError, match="loss.teacher.path=/nowhere is not a Hugging Face folder"):
            distillation.make_teacher(config, load_policy(config))


class TestUpdate:
    def learner(self, config, tmp_path):
        return Learner(config, load_policy(config), Run(tmp_path), None)

    def test_a_teacher_that_is_the_student_changes_nothing(self, folders, tmp_path):
        config = config_of(folders[0], teacher={"path": str(folders[0])})
        learner = self.learner(config, tmp_path)
        before = jax.tree.map(np.array, learner.state)
        metrics = learner.update(learner.pack(groups()))
        assert metrics["teacher/reverse_kl"] == 0.0 and metrics["optimizer/updates"] == 0
        jax.tree.map(np.testing.assert_array_equal, learner.state, before)  # not even weight decay

    @pytest.mark.parametrize("minibatches", [1, 2])
    def test_another_teacher_is_approached(self, folders, tmp_path, minibatches):
        config = config_of(folders[0], teacher={"path": str(folders[1])})
        optimizer = config.optimizer.model_copy(update={"minibatches": minibatches})
        learner = self.learner(config.model_copy(update={"optimizer": optimizer}), tmp_path)
        more = [
            Group(f"{g.id}{n}", g.task_id, tuple(rename(t, n) for t in g.trajectories)) for n in "ab" for g in groups()
        ]
        packed = learner.pack(more)
        assert len(packed) == minibatches
        gaps = [learner.update(packed)["teacher/reverse_kl"] for _ in range(4)]
        assert abs(gaps[-1]) < abs(gaps[0]) / 2  # on fixed tokens; the other sign moves away

    def test_the_loss_is_its_policy_gradient(self, folders, tmp_path):
        config = config_of(folders[0], teacher={"path": str(folders[1])})
        learner = self.learner(config, tmp_path)
        metrics = learner.update(learner.pack(groups()))
        # ratio 1: minus the token mean of the advantages, which is the reverse KL's estimate
        assert metrics["loss/total"] == pytest.approx(metrics["teacher/reverse_kl"], rel=1e-5)
        assert metrics["policy/ratio"] == 1.0 and metrics["policy/tokens"] == 6


def rename(trajectory, suffix):
    return Trajectory(
        trajectory.id + suffix,
        trajectory.group_id + suffix,
        trajectory.member,
        trajectory.task_id,
        trajectory.turns,
        trajectory.status,
        trajectory.reward,
    )


class TestServers:
    @pytest.fixture
    def server(self):
        server = FakeServer()
        tokenizer = byte_tokenizer()

        def tokenize(body):
            return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)}

        def complete(body):
            ids = body["prompt"]
            scored = [{str(t): {"logprob": -t / 10 - at, "rank": 1}} for at, t in enumerate(ids)]
            return {"choices": [{"prompt_logprobs": [None, *scored[1:]]}]}

        server.answers = {"/tokenize": tokenize, "/v1/completions": complete}
        yield server
        server.close()

    def config(self, folders, server, **teacher):
        return config_of(folders[0], teacher={"urls": [server.url], "temperature": 1.0, **teacher})

    def test_scores_of_the_prompt_stand_at_their_tokens(self, folders, server):
        config = self.config(folders, server)
        (batch,) = batching.build(groups(), config).microbatches
        found = by_member(batch, distillation.make_teacher(config, load_policy(config))(batch))
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            expected = [-t / 10 - (len(prompt) + n) for n, t in enumerate(response)]
            np.testing.assert_allclose(found[i], expected, rtol=1e-6)
        sent = [body["prompt"] for path, body in server.calls if path == "/v1/completions"]
        assert sorted(sent) == sorted([*p, *r] for p, r in zip(PROMPTS, RESPONSES, strict=True))

    def test_a_server_has_temperature_one(self, folders, server):
        config = self.config(folders, server, temperature=None)
        with pytest.raises(ConfigError, match="scores prompts at temperature 1, not 0.8; set loss.teacher.temperature"):
            distillation.make_teacher(config, load_policy(config))

    def test_another_tokenizer_is_refused(self, folders, server):
        server.answers["/tokenize"] = lambda body: {"tokens": [1, 2, 3]}
        config = self.config(folders, server)
        with pytest.raises(ConfigError, match="another tokenizer than the policy"):
            distillation.make_teacher(config, load_policy(config))

    def test_a_row_that_does_not_fit_is_named(self, folders, server):
        config = self.config(folders, server)
        (batch,) = batching.build(groups(), config).microbatches
        server.answers["/v1/models"] = lambda body: {"data": [{"id": "teacher", "max_model_len": 11}]}
        teacher = distillation.make_teacher(config, load_policy(config))
        with pytest.raises(ConfigError, match="11 tokens does not fit.*--max-model-len 12"):
            teacher(batch)
