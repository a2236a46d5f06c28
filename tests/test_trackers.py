"""Weights & Biases and Trackio: what they are called with, one run over resumes, and that they never end a run.

The packages themselves are used where they are installed, without a network.
"""

import errno
import importlib.util
import json
import logging
import os
import pathlib
import sqlite3
import subprocess
import sys
import types

import pytest

from rti_jax import metrics, trackers
from rti_jax.config import Config, ConfigError, LoggingConfig
from rti_jax.disk import DiskFullError

ROOT = pathlib.Path(__file__).parents[1]
SECRET = "literal-secret"


def config(*sinks, **own):
    env = {"name": "mcp", "headers": {"Authorization": f"Bearer {SECRET}"}, "url": f"http://ada:{SECRET}@host/"}
    section = {"sinks": list(sinks), "project": "p", "group": "seeds", "tags": ["a", "b"]} | own
    return Config(name="mine", env=env, steps=4, logging=section)


class Run:
    """A run of either service."""

    def __init__(self, calls, **given):
        self.calls, self.given, self.broken = calls, given, False

    def define_metric(self, *names, **options):
        self.calls.append(("define_metric", names, options))

    def log(self, values, **options):
        if self.broken:
            raise ConnectionError("no route")
        self.calls.append(("log", values, options))

    def finish(self):
        self.calls.append(("finish",))


@pytest.fixture
def services(monkeypatch):
    """Fake packages; `runs` are those that were begun, `calls` what was called."""
    found = types.SimpleNamespace(runs=[], calls=[], error=None)
    own = {"api_key": "k", "identity_token_file": None, "base_url": "http://localhost:9", "mode": "online"}
    found.settings = types.SimpleNamespace(**own)

    def init(**given):
        if found.error:
            raise found.error
        found.runs.append(Run(found.calls, **given))
        return found.runs[-1]

    for name in trackers.KINDS:
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None, origin="here")
        module.init = init
        module.Settings = lambda **options: options
        module.setup = lambda: types.SimpleNamespace(settings=found.settings)
        monkeypatch.setitem(sys.modules, name, module)
    return found


class TestContract:
    def test_wandb_is_begun_with_the_config_and_without_what_may_be_secret(self, services, tmp_path):
        trackers.Trackers(config("wandb", mode="offline", entity="team"), tmp_path)
        given = services.runs[0].given
        wanted = {"project": "p", "entity": "team", "group": "seeds", "tags": ["a", "b"], "name": "mine"}
        wanted |= {"mode": "offline", "resume": "allow", "dir": str(tmp_path)}
        assert {k: given[k] for k in wanted} == wanted
        assert given["config"]["steps"] == 4 and given["config"]["env"]["headers"] == {"Authorization": "***"}
        assert SECRET not in str(given)
        off = {"console": "off", "disable_git": True, "x_disable_meta": True, "save_code": False}
        assert off.items() <= given["settings"].items()

    def test_trackio_is_begun_the_same(self, services, tmp_path):
        trackers.Trackers(config("trackio", space="me/space"), tmp_path)
        trackers.Trackers(config("trackio", space="http://host:7860/?write_token=t"), tmp_path)
        trackers.Trackers(config("trackio", space="me/space", mode="offline"), tmp_path)
        space, server, offline = (run.given for run in services.runs)
        assert space["project"] == "p" and space["group"] == "seeds" and space["resume"] == "allow"
        assert space["config"]["tags"] == ["a", "b"] and SECRET not in str(space)
        assert space["space_id"] == "me/space" and server["server_url"].startswith("http://host")
        assert not {"space_id", "server_url"} & offline.keys()

    def test_steps_and_evaluations_are_logged_under_their_step(self, services, tmp_path):
        recorder = metrics.Recorder.of(config("wandb", "trackio"), tmp_path, 0)
        with recorder:
            recorder.write(1, {"loss/total": 0.5, "rti/nan": float("nan")})
            recorder.roles(1, {"roles/validator_recall": 0.25})
        logged = [call[1:] for call in services.calls if call[0] == "log"]
        assert logged == [
            ({"step": 1, "loss/total": 0.5}, {}),
            ({"loss/total": 0.5}, {"step": 1}),
            ({"step": 1, "roles/validator_recall": 0.25}, {}),
            ({"roles/validator_recall": 0.25}, {"step": 1}),
        ]
        assert ("define_metric", ("*",), {"step_metric": "step"}) in services.calls
        assert services.calls[-2:] == [("finish",)] * 2

    def test_a_run_that_goes_on_is_the_same_run_there(self, services, tmp_path):
        for _ in range(2):
            trackers.Trackers(config("wandb", "trackio"), tmp_path)
        trackers.Trackers(config("wandb", "trackio"), tmp_path / "..")  # another folder
        ids = [run.given.get("id") or run.given["name"] for run in services.runs]
        assert ids[:2] == ids[2:4] and not set(ids[:2]) & set(ids[4:])
        assert json.loads((tmp_path / "trackers.json").read_text())["wandb"] == ids[0]

    def test_its_name_there_outlives_a_full_disk(self, services, tmp_path, monkeypatch):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        trackers.Trackers(config("wandb"), tmp_path)
        before = (tmp_path / "trackers.json").read_bytes()
        with monkeypatch.context() as patch, pytest.raises(DiskFullError, match="trackers.json"):
            patch.setattr(pathlib.Path, "write_text", full)
            trackers.Trackers(config("wandb"), tmp_path)
        assert (tmp_path / "trackers.json").read_bytes() == before

    def test_no_sink_is_nothing(self, tmp_path):
        sinks = trackers.Trackers(config(), tmp_path)
        sinks.log(1, {"a/b": 1.0}), sinks.finish()
        assert not list(tmp_path.iterdir())


class TestFaults:
    @pytest.fixture(params=list(trackers.KINDS))
    def name(self, request):
        return request.param

    def test_a_missing_package_is_one_line(self, name, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
        with pytest.raises(ConfigError, match=f"logging.sinks: {name} is not installed: pip install {name}"):
            trackers.check(LoggingConfig(sinks=[name]))

    def test_a_folder_of_that_name_is_no_package(self, name, monkeypatch, tmp_path):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        with pytest.raises(ConfigError, match="is not installed"):
            trackers.check(LoggingConfig(sinks=[name]))

    def test_what_is_wrong_at_the_beginning_is_an_error(self, services, name, tmp_path):
        services.error = ValueError("bad\nproject")
        with pytest.raises(
            ConfigError, match=rf"logging.sinks: {name} did not start \(bad project\); logging.mode=off"
        ):
            trackers.Trackers(config(name), tmp_path)

    def test_nothing_is_left_open_by_a_run_that_does_not_begin(self, services, tmp_path, monkeypatch):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "tensorboard").write_text("a file where a folder is due")
        with pytest.raises(FileExistsError):
            metrics.Recorder.of(config("wandb", "trackio"), tmp_path / "run", 0)
        assert services.calls[-2:] == [("finish",)] * 2
        services.calls.clear()
        monkeypatch.setitem(trackers.KINDS, "trackio", lambda *_: 1 / 0)
        with pytest.raises(ConfigError, match="trackio did not start"):
            trackers.Trackers(config("wandb", "trackio"), tmp_path / "another")
        assert services.calls[-1] == ("finish",)

    def test_a_missing_login_is_not_asked_for(self, services, tmp_path, monkeypatch):
        netrc = tmp_path / "netrc"
        monkeypatch.setenv("NETRC", str(netrc))
        services.settings.api_key = None
        with pytest.raises(ConfigError, match=r"wandb did not start \(it has no API key: `wandb login`"):
            trackers.Trackers(config("wandb"), tmp_path)
        trackers.Trackers(config("wandb", mode="offline"), tmp_path)
        services.settings.mode = "offline"  # WANDB_MODE
        trackers.Trackers(config("wandb"), tmp_path)
        services.settings.mode = "online"
        netrc.write_text("machine localhost login user password k\n")
        trackers.Trackers(config("wandb"), tmp_path)
        assert [run.given["mode"] for run in services.runs] == ["offline", "offline", "online"]

    def test_a_run_goes_on_without_a_service_that_is_down(self, services, name, tmp_path, caplog):
        trackers.Trackers(config(name), tmp_path)
        services.error = ConnectionError("no route")
        with caplog.at_level(logging.WARNING):
            sinks = trackers.Trackers(config(name), tmp_path)
        sinks.log(1, {"a/b": 1.0})
        assert [f"{name} did not start (no route)" in r.message for r in caplog.records] == [True]

    def test_what_fails_on_the_way_is_warned_of_once_until_it_works_again(self, services, name, tmp_path, caplog):
        sinks, (run,) = trackers.Trackers(config(name), tmp_path), services.runs
        with caplog.at_level(logging.WARNING):
            for step, broken in enumerate([False, True, True, False, True]):
                run.broken = broken
                sinks.log(step, {"a/b": 1.0})
        assert [f"{name} failed (ConnectionError: no route)" in r.message for r in caplog.records] == [True, True]
        assert len([c for c in services.calls if c[0] == "log"]) == 2

    def test_a_sink_that_is_none_is_named(self):
        with pytest.raises(ValueError, match="sinks"):
            LoggingConfig(sinks=["tensorboard"])


REAL = """
import sys
from rti_jax import metrics
from tests.test_trackers import config
name, folder, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
import pathlib
with metrics.Recorder.of(config(name, mode="offline"), pathlib.Path(folder), step) as recorder:
    for n in (step + 1, step + 2):
        recorder.write(n, {"loss/total": n / 4, "rti/nan": float("nan")})
"""


@pytest.fixture
def real(tmp_path):
    """Two processes that each record two steps of one run; the command line has a secret."""

    def record(name):
        try:
            trackers.check(LoggingConfig(sinks=[name]))
        except ConfigError as error:
            pytest.skip(str(error))
        settings = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
        for step in ("0", "2"):
            command = [sys.executable, "-c", REAL, name, str(tmp_path / "run"), step, f"env.token={SECRET}"]
            environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            assert SECRET not in done.stdout + done.stderr and "did not start" not in done.stderr
        for path in filter(pathlib.Path.is_file, tmp_path.rglob("*")):
            assert SECRET.encode() not in path.read_bytes(), path
        return tmp_path

    return record


@pytest.mark.slow
def test_wandb_itself_offline(real):
    folder = real("wandb")
    (run_id,) = json.loads((folder / "run" / "trackers.json").read_text()).values()
    files = list((folder / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2  # of the two processes, one run
    for file, step in zip(sorted(files), (0, 2), strict=True):
        data = file.read_bytes()
        assert b"loss/total" in data and b"rti/nan" not in data and str((step + 1) / 4).encode() in data
        assert b"seeds" in data and b"mine" in data


@pytest.mark.slow
def test_trackio_itself(real):
    folder = real("trackio")
    run_id = json.loads((folder / "run" / "trackers.json").read_text())["trackio"]
    (database,) = (folder / "trackio").glob("p*.db")
    with sqlite3.connect(database) as data:
        rows = data.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [row[:2] for row in rows] == [(f"mine-{run_id}", step) for step in (1, 2, 3, 4)]
    assert [json.loads(row[2])["loss/total"] for row in rows] == [0.25, 0.5, 0.75, 1.0]
