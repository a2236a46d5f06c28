"""LUFFY's guidance: which groups, whose rollouts, how stored ones are encoded, and what a mixed group trains."""

import asyncio
import json
import math

import numpy as np
import pytest
from test_train import CONFIG, rti

from envs.navigation import Navigation
from rti_jax import batching, luffy, metric_names, runs
from rti_jax.config import ConfigError, load_config
from rti_jax.environments import env_config
from rti_jax.rollout import Player
from rti_jax.types import Author, Group, Status
from tests.fakes import FakeEngine, call, lookup_source, lookup_task, small_config, tiny_chat

WRONG, LOOK, RIGHT = call("answer", code="1"), call("look", name="Ada"), call("answer", code="X4711")


def shown(chat, request):
    return '"code": "X4711"' in chat.decode(request.prompt_ids)


def config_of(**teacher):
    teacher = teacher or {"urls": ["http://unused"]}
    return small_config(loss={"baseline": "luffy", "teacher": teacher}, rollout={"group_size": 4})


class Setup:
    """One group of a policy that never succeeds, and a teacher that looks first."""

    def __init__(self, thinking=False, **teacher):
        self.chat, self.config, self.task = tiny_chat(thinking), config_of(**teacher), lookup_task("train/0")
        think = "<think>\nHm.\n</think>\n\n" if thinking else ""
        engine = FakeEngine(self.chat, lambda r: think + WRONG)
        self.player = Player(lookup_source(), self.chat, engine, self.config)
        self.teacher_engine = FakeEngine(self.chat, lambda r: think + (RIGHT if shown(self.chat, r) else LOOK))
        self.teacher_player = Player(lookup_source(), self.chat, self.teacher_engine, self.config)

    def groups(self):
        return asyncio.run(self.player.collect([self.task], step=3))

    def guided(self, teacher, groups=None):
        return asyncio.run(luffy.guide(groups or self.groups(), [self.task], teacher, self.config, step=3))

    def stored(self, path):
        """A file as `rti eval` writes it, with a failure in it too, and the teacher's successful episode."""
        good, bad = asyncio.run(self.teacher_player.collect([self.task], step=0)), self.groups()
        runs.write_groups(path, [*bad, *good], {})
        return good[0].trajectories[0]


class TestGuide:
    def test_a_failed_group_gets_the_teachers_success(self):
        setup = Setup()
        (group,), metrics = setup.guided(luffy.Played(setup.teacher_player, setup.config))
        (new,) = [t for t in group.trajectories if t.success]
        assert len(group.trajectories) == 4 and group.replaced and not group.replaced.success
        assert {t.author for t in new.turns} == {Author.TEACHER} and new.id == "train/3/0/-1"
        assert all(math.isnan(x) for t in new.turns for x in t.sampler_logprobs)
        tokens = sum(len(t.response_ids) for t in new.turns)
        expected = {"groups_triggered": 1, "replaced": 1, "missing": 0, "sampled_tokens": tokens}
        assert metrics == {f"teacher/{k}": v for k, v in expected.items()}

    def test_a_group_with_a_success_is_left_alone(self):
        setup = Setup()
        group = asyncio.run(setup.teacher_player.collect([setup.task], step=3))
        (after,), metrics = setup.guided(luffy.Played(setup.teacher_player, setup.config), group)
        assert after is group[0] and metrics["teacher/groups_triggered"] == 0

    def test_a_teacher_that_fails_changes_nothing_and_is_counted(self):
        setup = Setup(urls=["http://unused"], attempts=3)
        setup.teacher_engine.answer = lambda r: WRONG
        (group,), metrics = setup.guided(luffy.Played(setup.teacher_player, setup.config))
        assert group.all_failed and group.replaced is None and metrics["teacher/missing"] == 1
        assert len(setup.teacher_engine.requests) == 3 * 1  # each attempt is one wrong answer
        assert len({r.seed for r in setup.teacher_engine.requests}) == 3

    def test_its_temperature_is_its_own(self):
        setup = Setup(urls=["http://unused"], temperature=0.3)
        setup.guided(luffy.Played(setup.teacher_player, setup.config))
        assert {r.temperature for r in setup.teacher_engine.requests} == {0.3}

    def test_advantages_are_centred_on_the_mixed_group_and_not_divided(self):
        setup = Setup()
        groups, _ = setup.guided(luffy.Played(setup.teacher_player, setup.config))
        packed = batching.build(groups, setup.config)
        (batch,) = packed.microbatches
        teacher, policy = batch.author == Author.TEACHER, batch.author == Author.POLICY
        assert set(batch.advantages[teacher]) == {0.75} and set(batch.advantages[policy]) == {-0.25}
        # with the std: 1.732 and -0.577; on the policy's members alone: 1 and 0
        assert np.isnan(batch.behavior_logprobs[teacher]).all() and np.isnan(batch.sampler_logprobs[teacher]).all()
        assert set(batch.loss_scale[teacher | policy]) == {1.0}  # a sum over tokens,
        assert batch.denominator == 4 * setup.config.sampling.max_tokens  # over the response width
        shares = teacher.sum() / (teacher | policy).sum(), 1 / 4
        found = packed.metrics["teacher/token_share"], packed.metrics["teacher/trajectory_share"]
        assert found == pytest.approx(shares)


class TestStored:
    @pytest.mark.parametrize("thinking", [False, True])
    def test_an_episode_is_encoded_to_the_ids_that_were_sampled(self, tmp_path, thinking):
        setup = Setup(thinking)
        played = setup.stored(tmp_path / "teacher.jsonl")
        teacher = luffy.Stored(str(tmp_path / "teacher.jsonl"), setup.chat, lookup_source(), [setup.task], setup.config)
        (group,), metrics = setup.guided(teacher)
        (new,) = [t for t in group.trajectories if t.success]
        assert [t.prompt_ids for t in new.turns] == [t.prompt_ids for t in played.turns]
        assert [t.response_ids for t in new.turns] == [t.response_ids for t in played.turns]
        assert {t.author for t in new.turns} == {Author.TEACHER} and new.status is Status.SUCCESS
        assert metrics["teacher/sampled_tokens"] == 0

    def test_calls_may_have_their_arguments_as_text(self, tmp_path):
        setup = Setup()
        played = setup.stored(tmp_path / "ours.jsonl")
        line = {"task_id": "train/0", "messages": json.loads(json.dumps(played.messages))}
        for message in line["messages"]:
            for item in message.get("tool_calls", []):
                item["function"]["arguments"] = json.dumps(item["function"]["arguments"])
        (tmp_path / "openai.jsonl").write_text(json.dumps(line) + "\n")
        (conversation,) = luffy.read_episodes(str(tmp_path / "openai.jsonl"))["train/0"]
        turns = luffy.encode(setup.chat, conversation, (), "t")
        assert [t.response_ids for t in turns] == [t.response_ids for t in played.turns]

    def test_failures_and_what_follows_the_last_turn_are_left_out(self, tmp_path):
        setup = Setup()
        setup.stored(tmp_path / "teacher.jsonl")
        ((conversation, *rest),) = luffy.read_episodes(str(tmp_path / "teacher.jsonl")).values()
        assert conversation[-1]["role"] == "assistant" and len(rest) == 3  # four successes, four failures

    def test_another_task_has_none(self, tmp_path):
        setup = Setup()
        setup.stored(tmp_path / "teacher.jsonl")
        tasks = [setup.task, lookup_task("train/1")]
        teacher = luffy.Stored(str(tmp_path / "teacher.jsonl"), setup.chat, lookup_source(), tasks, setup.config)
        setup.task = tasks[1]
        (group,), metrics = setup.guided(teacher)
        assert group.replaced is None and metrics["teacher/missing"] == 1
        with pytest.raises(ConfigError, match="no success on a task of env.split.*train/0.*train/1"):
            luffy.Stored(str(tmp_path / "teacher.jsonl"), setup.chat, lookup_source(), tasks[1:], setup.config)

    def test_one_whose_environment_does_not_start_is_missing(self, tmp_path, caplog):
        setup = Setup()
        setup.stored(tmp_path / "teacher.jsonl")
        setup.task = lookup_task("train/0", fault="reset")
        teacher = luffy.Stored(str(tmp_path / "teacher.jsonl"), setup.chat, lookup_source(), [setup.task], setup.config)
        group = Group("train/0/0", "train/0", ())
        assert asyncio.run(teacher.rollout(setup.task, group, 0)) is None and "no such machine" in caplog.text

    @pytest.mark.parametrize("text", ["{", '{"task_id": "a"}', '{"task_id": "a", "messages": []}', "[]"])
    def test_a_line_that_is_no_episode_is_named(self, tmp_path, text):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"task_id": "a", "messages": [{"role": "assistant", "content": "x"}]}\n' + text + "\n")
        with pytest.raises(ConfigError, match=r"bad.jsonl, line 2: no episode"):
            luffy.read_episodes(str(path))
        with pytest.raises(ConfigError, match="No such file"):
            luffy.read_episodes(str(tmp_path / "none.jsonl"))

    def test_one_that_does_not_fit_the_context_is_missing(self, tmp_path):
        setup = Setup()
        setup.stored(tmp_path / "teacher.jsonl")
        sampling = setup.config.sampling.model_copy(update={"max_context": 300})
        small = setup.config.model_copy(update={"sampling": sampling})
        teacher = luffy.Stored(str(tmp_path / "teacher.jsonl"), setup.chat, lookup_source(), [setup.task], small)
        assert setup.guided(teacher)[1]["teacher/missing"] == 1


@pytest.mark.exhaustive
def test_the_main_job_with_stored_rollouts_of_an_expert(tmp_path):
    """One step through the command line, with vLLM: failed groups hold the expert's episodes, and are learned from."""
    config = load_config(CONFIG)
    env = env_config(config.env)
    tasks = Navigation.tasks(env, "train")

    async def lines():
        for task in tasks:
            environment = Navigation(env, config.env.max_turns)
            messages, done = list((await environment.reset(task)).messages), False
            while not done:
                turn = environment.expert()
                result = await environment.step(turn)
                messages += [turn.as_message(), *result.messages]
                done = result.done
            yield json.dumps({"task_id": task.id, "messages": messages}) + "\n"

    async def write():
        (tmp_path / "expert.jsonl").write_text("".join([line async for line in lines()]))

    asyncio.run(write())
    small = ["steps=1", "rollout.groups_per_step=4", "rollout.group_size=4", "eval.limit=1", "eval.trials=1"]
    luffy_keys = ["loss.baseline=luffy", f"loss.teacher.rollouts={tmp_path / 'expert.jsonl'}"]
    done = rti("train", CONFIG, f"runs_dir={tmp_path}", "name=luffy", *small, *luffy_keys)
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(x) for x in (tmp_path / "luffy" / "metrics.jsonl").read_text().splitlines()]
    assert line["teacher/replaced"] == line["teacher/groups_triggered"] > 0 and line["teacher/missing"] == 0
    assert line["teacher/tokens"] > 0 and line["teacher/grad_norm"] > 0 and line["optimizer/updates"] == 1
    assert line["mismatch/max"] < 1e-4 and line["policy/clip_fraction"] == 0 and "loss/entropy" in line
    assert metric_names.undocumented(line) == [] and "rti/attempts" not in line
    written = [
        json.loads(x) for x in (tmp_path / "luffy" / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    ]
    taught = [x for x in written if any(t["teacher"] for t in x["turns"])]
    assert len(taught) == line["teacher/replaced"] and all(x["advantage"] == 0.75 for x in taught)
