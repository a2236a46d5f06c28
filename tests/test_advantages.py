"""Group-relative advantages by hand."""

import numpy as np
import pytest

from rti_jax.advantages import assign_advantages, distillation_advantages, group_advantages, ungrouped, with_gradient
from rti_jax.types import Group, Status, Trajectory, Turn


def member(group, index, reward, status=None):
    status = status or (Status.SUCCESS if reward == 1 else Status.FAILURE)
    turn = Turn(f"{group}/{index}/0", (1, 2), (3,), (-0.5,), "stop", 0)
    return Trajectory(f"{group}/{index}", group, index, "same task", (turn,), status, reward)


def group(name, rewards):
    members = (member(name, i, r, None if r is not None else Status.TIMEOUT) for i, r in enumerate(rewards))
    return Group(name, "same task", tuple(members))


class TestGroupAdvantages:
    def test_one_success_of_eight(self):
        # with the sample std: 2.4749 and -0.3536; over 0.125 instead of the std: 7 and -1
        expected = [2.6457513] + [-0.3779645] * 7
        np.testing.assert_allclose(group_advantages([1] + [0] * 7), expected, rtol=1e-6)

    @pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.0, 1.0, -2.7])
    def test_equal_rewards_are_exactly_zero(self, reward):
        # the float std of 0.1 eight times is 1.4e-17: a guard of std > 0 would give -1 eight times
        assert (group_advantages([reward] * 8) == 0).all()

    def test_float_residue_is_no_signal(self):
        assert (group_advantages([0.3, 0.1 + 0.2, 0.3, 0.3]) == 0).all()

    def test_graded_rewards(self):
        np.testing.assert_allclose(group_advantages([0.0, 0.5, 1.0]), [-1.2247449, 0.0, 1.2247449], atol=1e-6)

    def test_dr_grpo_keeps_the_scale_of_the_rewards(self):
        np.testing.assert_allclose(group_advantages([1] + [0] * 7, normalize=False), [0.875] + [-0.125] * 7)

    @pytest.mark.parametrize("bad", [[], [0.0, float("nan")], [float("inf"), 0.0]])
    def test_bad_rewards(self, bad):
        with pytest.raises(ValueError, match="finite"):
            group_advantages(bad)


class TestAssignAdvantages:
    def test_errors_are_out_of_the_mean(self):
        result = assign_advantages([group("a", [1, 0, 0, 0, 0, 0, 0, None])])
        # the mean is over 7: with the error as reward 0 the success would have 2.6458
        assert result.advantages["a/0"] == pytest.approx(2.4494897)
        assert "a/7" not in result.advantages

    def test_groups_go_by_their_id(self):
        # both groups have the same task; one group of both would give +1 and -1
        result = assign_advantages([group("a", [1, 1, 1]), group("b", [0, 0, 0])])
        assert set(result.advantages.values()) == {0.0}
        assert len(result.advantages) == 6 and result.flat == 2 and not result.has_gradient

    def test_groups_without_a_baseline_are_dropped_and_counted(self):
        result = assign_advantages([group("a", [1, None, None]), group("b", [None, None]), group("c", [1, 0])])
        assert [g.id for g in result.groups] == ["c"] and result.dropped == 2 and result.has_gradient

    def test_dapo_leaves_out_flat_groups(self):
        groups = [group("a", [0, 0]), group("b", [1, 0])]
        assert assign_advantages(groups, "dapo").filtered == 1
        assert [g.id for g in assign_advantages(groups, "dapo").groups] == ["b"]
        assert [g.id for g in assign_advantages(groups, "grpo").groups] == ["a", "b"]

    def test_two_records_with_one_id(self):
        with pytest.raises(ValueError, match="'a'"):
            assign_advantages([group("a", [1, 0]), group("a", [1, 0])])


class TestDistillationAdvantages:
    STUDENT = np.log(np.array([[0.5, 0.2, 0.9], [0.1, 0.4, 0.3]], np.float32))
    TEACHER = np.log(np.array([[0.25, 0.4, 0.9], [0.9, 0.1, 0.6]], np.float32))
    MASK = np.array([[True, True, True], [False, True, True]])

    def test_minus_the_log_ratio_to_the_teacher(self):
        got = distillation_advantages(self.STUDENT, self.TEACHER, self.MASK)
        # the other sign would push away from the teacher: 0.693, -0.693
        np.testing.assert_allclose(got, [[-np.log(2), np.log(2), 0], [0, -np.log(4), np.log(2)]], atol=1e-6)

    def test_a_teacher_that_is_the_student_gives_exactly_zero(self):
        assert not distillation_advantages(self.STUDENT, self.STUDENT.copy(), self.MASK).any()

    @pytest.mark.parametrize("poison", [np.nan, -np.inf, 1e4])
    def test_masked_positions_are_harmless(self, poison):
        dirty = np.where(self.MASK, self.STUDENT, poison), np.where(self.MASK, self.TEACHER, -poison)
        clean = distillation_advantages(self.STUDENT, self.TEACHER, self.MASK)
        np.testing.assert_array_equal(distillation_advantages(*dirty, self.MASK), clean)

    def test_what_was_not_scored_is_refused(self):
        with pytest.raises(ValueError, match="not finite"):
            distillation_advantages(self.STUDENT, np.full_like(self.TEACHER, np.nan), self.MASK)
        with pytest.raises(ValueError, match="shapes"):
            distillation_advantages(self.STUDENT, self.TEACHER[:, :2], self.MASK)

    def test_every_valid_member_is_trained_whatever_its_reward(self):
        groups = [group("a", [0, 0]), group("b", [1, None]), group("c", [None, None])]
        found = ungrouped(groups)
        assert [g.id for g in found.groups] == ["a", "b"] and found.dropped == 1 and found.has_gradient
        assert list(found.advantages) == ["a/0", "a/1", "b/0"] and np.isnan(list(found.advantages.values())).all()


def test_groups_with_a_gradient():
    groups = [group("a", [0, 0]), group("b", [1, 0]), group("c", [1, None]), group("d", [1, 1]), group("e", [1, 0])]
    assert [g.id for g in with_gradient(groups)] == ["b", "e"]
