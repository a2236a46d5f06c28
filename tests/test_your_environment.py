"""The pages about environments of one's own, run as they are written: extracted, validated, trained on."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page of docs/ in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def rti(folder, *arguments):
    """The command as a user types it in a folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": path, "PATH": programs, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "1"}
    env |= {"COLUMNS": "200"}
    command = [sys.executable, "-P", "-m", "rti_jax.cli", *arguments]  # -P: as `rti`, which does not see the folder
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def courier(tmp_path):
    """A folder with the tutorial's two files, and the shipped policy where the config looks for it."""
    (code,), (config,) = blocks("your_environment.md", "python"), blocks("your_environment.md", "yaml")
    (tmp_path / "courier.py").write_text(code)
    (tmp_path / "my.yaml").write_text(config)
    (tmp_path / "models").symlink_to(ROOT / "models")
    return tmp_path


def test_the_tutorials_environment_has_about_60_lines_and_is_sound(courier):
    lines = [line for line in (courier / "courier.py").read_text().splitlines() if line.strip()]
    assert 50 <= len(lines) <= 65
    said = rti(courier, "validate", "my.yaml")
    assert "in all: 210 tasks, gold play wins 210, doing nothing wins 0" in said
    assert said.count("true") == 2 and said.count("all as alone") == 2 and said.count("none") == 2


@pytest.mark.slow
def test_the_tutorials_environment_trains(courier):
    rti(courier, "train", "my.yaml", "steps=1", "eval.limit=1", "eval.trials=1")
    (line,) = [json.loads(text) for text in (courier / "runs" / "courier" / "metrics.jsonl").read_text().splitlines()]
    assert line["optimizer/updates"] == 1 and line["optimizer/grad_norm"] > 0
    assert 0 < line["rollout/pre_success"] < 1 and line["rollout/environment_error"] == line["rollout/timeout"] == 0
    assert line["rollout/pre_success_plain"] > line["rollout/pre_success_twin"]
    assert line["rti/attempts"] >= 1 and line["rti/proposals"] >= 1  # groups of twins failed, and the roles spoke


@pytest.mark.slow
def test_the_mcp_page_is_sound(tmp_path):
    pytest.importorskip("mcp", reason="the MCP SDK is not installed (extra mcp)")
    server, reward = blocks("mcp.md", "python")
    for name, text in (("notes.py", server), ("notes_reward.py", reward)):
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.jsonl").write_text("".join(blocks("mcp.md", "json")))
    (tmp_path / "my.yaml").write_text("".join(blocks("mcp.md", "yaml")))
    said = rti(tmp_path, "validate", "my.yaml", "eval.split=train")
    assert "1 of 1" in said and "0 of 1" in said and "2, all as alone" in said
