"""What the learner takes from a checkpoint; whole runs that are resumed are in test_faults and test_overlap."""

import types

import pytest

from rti_jax import checkpoint, resume, runs
from rti_jax.hosts import Hosts
from rti_jax.training_state import Learner


@pytest.mark.parametrize(("extra", "version"), [({}, 5), ({"version": 3}, 3), ({"version": 0}, 0)])
def test_the_version_is_the_one_that_the_weights_had(extra, version, tmp_path, monkeypatch):
    """A checkpoint of earlier code names none; the version was then its step."""
    learner = object.__new__(Learner)
    learner.hosts, learner.config, learner.state, learner.identity = Hosts(), types.SimpleNamespace(steps=9), None, {}
    monkeypatch.setattr(checkpoint, "restore", lambda *_: checkpoint.Restored(5, "state", extra, ()))
    monkeypatch.setattr(resume, "check", lambda *_: [])
    learner._restore(runs.Run(tmp_path))
    assert (learner.step, learner.state, learner.version) == (5, "state", version)
