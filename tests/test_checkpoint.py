"""Checkpoints: exact, on other devices, and never an unfinished one."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stand_in import StandIn, forced_devices, init_params, make_config, make_groups, mesh

from rti_jax import batching, checkpoint, learner
from rti_jax.config import ConfigError

HERE = pathlib.Path(__file__).parent
CONFIG = make_config()

SAVE_ON_EIGHT = """
import sys, jax
from stand_in import init_params, make_config, mesh
from rti_jax import checkpoint, learner
on = mesh()
params = init_params(on)
optimizer = learner.make_optimizer(make_config().optimizer, params, 10)
checkpoint.save(sys.argv[1], 5, learner.init_state(params, optimizer, on), {"devices": jax.device_count()})
"""

SAVE_UNTIL_KILLED = """
import sys, jax.numpy as jnp
from rti_jax import checkpoint, learner
checkpoints = checkpoint.Checkpoints(sys.argv[1], keep=2)
for step in range(1, 1000):
    state = learner.TrainState({"w": jnp.full((3000, 500), float(step))}, (), jnp.int32(step))
    checkpoints.save(step, state, {"step": step})
    print(step, flush=True)
"""


def fresh(name="adamw", on=None):
    on = on or mesh(1)
    params = init_params(on)
    optimizer = learner.make_optimizer(make_config(optimizer={"name": name}).optimizer, params, CONFIG.steps)
    return learner.init_state(params, optimizer, on), optimizer


def like(state, value):
    """A state of another content, so that what is compared was read."""
    return jax.tree.map(lambda x: jax.device_put(jnp.full(x.shape, value, x.dtype), x.sharding), state)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def small(value):
    return learner.TrainState({"w": jnp.full((8, 4), float(value))}, (), jnp.int32(value))


def in_subprocess(code, *arguments, devices=1):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    env["XLA_FLAGS"] = forced_devices(devices)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_everything_comes_back(tmp_path, name, background):
    state, _ = fresh(name)
    extra = {"position": {"train": 17}, "rng": [3, 2**63], "config": {"name": "run"}}
    with checkpoint.Checkpoints(tmp_path, background=background) as checkpoints:
        checkpoints.save(3, state, extra)
    restored = checkpoint.restore(tmp_path, like(state, 9))
    assert (restored.step, restored.extra, restored.skipped) == (3, extra, ())
    same(restored.state, state)
    step, params = checkpoint.restore_params(tmp_path, like(state.params, 9))
    assert step == 3
    same(params, state.params)


def test_six_updates_are_three_and_resume_and_three(tmp_path):
    on = mesh(1)
    state, optimizer = fresh()
    update = learner.make_update_step(StandIn(), CONFIG, on, optimizer, on_policy=True)
    batches = [batching.build(make_groups(seed=i), CONFIG).microbatches for i in range(6)]
    for batch in batches[:3]:
        state, _ = update(state, batch)
    checkpoint.save(tmp_path, 3, state, {})
    for batch in batches[3:]:
        state, _ = update(state, batch)
    blank, optimizer = fresh()
    resumed = checkpoint.restore(tmp_path, blank).state
    update = learner.make_update_step(StandIn(), CONFIG, on, optimizer, on_policy=True)
    for batch in batches[3:]:
        resumed, _ = update(resumed, batch)
    assert resumed.step == 6
    same(resumed, state)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    """The next update may overwrite the arrays while a save in the background still writes."""
    state = learner.TrainState({"w": jnp.ones((2000, 1000))}, (), jnp.int32(1))
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    with checkpoint.Checkpoints(tmp_path, background=True) as checkpoints:
        checkpoints.save(1, state, {})
        after = jax.block_until_ready(overwrite(state))
    assert (np.asarray(checkpoint.restore(tmp_path, after).state.params["w"]) == 1).all()


@pytest.mark.slow
def test_saved_on_eight_devices_restored_on_one(tmp_path):
    process = in_subprocess(SAVE_ON_EIGHT, tmp_path, devices=8)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    state, _ = fresh()
    restored = checkpoint.restore(tmp_path, like(state, 9))
    assert restored.extra == {"devices": 8}
    same(restored.state, state)
    assert (
        restored.state.params["embed_tokens"]["embedding"].sharding
        == state.params["embed_tokens"]["embedding"].sharding
    )


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    process = in_subprocess(SAVE_UNTIL_KILLED, tmp_path)
    saved = 0
    while saved < 3:
        saved = int(process.stdout.readline() or pytest.fail(process.stderr.read()[-2000:]))
    time.sleep(0.03)  # somewhere in the next save
    process.send_signal(signal.SIGKILL)
    lines = process.communicate()[0].split()
    saved = max([saved, *map(int, lines)])
    target = learner.TrainState({"w": jnp.zeros((3000, 500))}, (), jnp.int32(0))
    restored = checkpoint.restore(tmp_path, target)
    assert restored.step in (saved, saved + 1)  # the last one may be committed and not yet announced
    assert (np.asarray(restored.state.params["w"]) == restored.step).all() and restored.extra == {"step": restored.step}


class TestUnfinished:
    @pytest.fixture
    def saved(self, tmp_path):
        with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
            for step in (2, 4):
                checkpoints.save(step, small(step), {"step": step})
        return tmp_path

    def damaged(self, saved, caplog):
        restored = checkpoint.restore(saved, small(0))
        assert restored.step == 2 and restored.extra == {"step": 2}
        same(restored.state, small(2))
        assert len(restored.skipped) == 1 and restored.skipped[0] in caplog.text
        return restored.skipped[0]

    def test_without_a_marker(self, saved, caplog):
        (saved / "4" / checkpoint.MARKER).unlink()
        assert "4 skipped: the save was interrupted" in self.damaged(saved, caplog)

    def test_truncated_array(self, saved, caplog):
        data = max((saved / "4" / "state" / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        data.write_bytes(data.read_bytes()[:-7])
        assert "bytes" in self.damaged(saved, caplog)

    def test_missing_file_and_damaged_marker(self, saved, caplog):
        (saved / "4" / checkpoint.EXTRA).unlink()
        assert "extra.json has 0 of" in self.damaged(saved, caplog)
        caplog.clear()
        (saved / "4" / checkpoint.MARKER).write_text('{"state')
        assert "is damaged" in self.damaged(saved, caplog)

    def test_right_sizes_and_wrong_bytes(self, saved, caplog):
        for data in (saved / "4" / "state").rglob("manifest.ocdbt"):
            data.write_bytes(b"\0" * data.stat().st_size)
        assert "manifest.ocdbt is damaged" in self.damaged(saved, caplog)

    def test_one_flipped_bit_of_an_array_and_the_export_falls_back(self, saved, caplog):
        data = max((saved / "4" / "state" / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        flipped = bytearray(data.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        data.write_bytes(flipped)
        assert "is damaged" in self.damaged(saved, caplog)
        step, params = checkpoint.restore_params(saved, small(0).params)
        assert step == 2
        np.testing.assert_array_equal(params["w"], small(2).params["w"])
        with pytest.raises(ConfigError, match=r"is damaged \(there are 2\)"):
            checkpoint.restore_params(saved, small(0).params, step=4)

    def test_the_next_save_clears_it_away(self, saved):
        (saved / "4" / checkpoint.MARKER).unlink()
        checkpoint.save(saved, 3, small(3), {})
        assert checkpoint.steps(saved) == [3, 2]

    def test_nothing_readable_is_one_line(self, saved):
        for step in (2, 4):
            (saved / str(step) / checkpoint.EXTRA).unlink()
        with pytest.raises(ConfigError, match="no readable checkpoint") as error:
            checkpoint.restore(saved, small(0))
        assert "\n" not in str(error.value)

    def test_only_an_interrupted_first_save_means_a_fresh_start(self, tmp_path):
        checkpoint.save(tmp_path, 1, small(1), {})
        (tmp_path / "1" / checkpoint.MARKER).unlink()
        assert checkpoint.restore(tmp_path, small(0)) is None
        assert checkpoint.restore(tmp_path / "none", small(0)) is None

    def test_an_asked_for_step(self, saved):
        assert checkpoint.restore(saved, small(0), step=2).step == 2
        assert checkpoint.restore_params(saved, small(0).params, step=2)[1]["w"][0, 0] == 2
        with pytest.raises(ConfigError, match="there are 4, 2"):
            checkpoint.restore_params(saved, small(0).params, step=3)
        with pytest.raises(ConfigError, match="no such checkpoint"):
            checkpoint.restore(saved, small(0), step=3)

    def test_another_model_is_refused(self, saved):
        other = small(0)._replace(params={"v": jnp.zeros((8, 4))})
        with pytest.raises(ConfigError, match="cannot be read"):
            checkpoint.restore(saved, other)
        with pytest.raises(ConfigError, match="cannot be read"):
            checkpoint.restore(saved, small(0)._replace(params={"w": jnp.zeros((4, 4))}))


class TestKeeping:
    def test_the_newest_stay(self, tmp_path):
        with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
            for step in (1, 9, 10):
                checkpoints.save(step, small(step), {})
        assert checkpoint.steps(tmp_path) == [10, 9]  # as text 9 would be newer than 10

    def test_a_committed_step_is_not_written_again(self, tmp_path):
        checkpoint.save(tmp_path, 1, small(1), {"first": True})
        checkpoint.save(tmp_path, 1, small(2), {"first": False})
        assert checkpoint.restore(tmp_path, small(0)).extra == {"first": True}

    def test_what_is_no_json_writes_nothing(self, tmp_path):
        with pytest.raises(TypeError):
            checkpoint.save(tmp_path / "c", 1, small(1), {"array": np.zeros(3)})
        assert checkpoint.steps(tmp_path / "c") == []

    def test_an_error_in_the_background_is_raised(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint, "_write", full)
        checkpoints = checkpoint.Checkpoints(tmp_path, background=True)
        checkpoints.save(1, small(1), {})
        with pytest.raises(OSError, match="disk full"):
            checkpoints.wait()
        checkpoints.wait()  # raised once

    def test_the_marker_covers_every_file(self, tmp_path):
        checkpoint.save(tmp_path, 1, small(1), {})
        files = {str(p.relative_to(tmp_path / "1")) for p in (tmp_path / "1").rglob("*") if p.is_file()}
        assert set(json.loads((tmp_path / "1" / checkpoint.MARKER).read_text())) == files - {checkpoint.MARKER}
