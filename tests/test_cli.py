"""The `rti` command: what each mistake prints, exit codes, and what is imported when."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from typer.testing import CliRunner

from rti_jax import cli, engine_errors, launcher
from rti_jax.config import Config, ConfigError, load_config, save_resolved

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = (
    "train", "eval", "select", "sft", "score", "export", "compare", "plan", "doctor", "validate", "serve", "report",
    "view", "reproduce",
)  # fmt: skip
TINY = "env: {tools: short, countries: [US], train_tasks: 4, test_tasks: 4}\n"


def rti(*arguments):
    """Runs a command in this process."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(TINY)
    return path


class TestHelp:
    def test_names_all_commands_and_first_steps(self):
        text = rti("--help").output
        assert all(f" {c} " in text for c in COMMANDS) and "rti train configs/quickstart.yaml" in text

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_teaches_by_example(self, command):
        done = rti(command, "--help")
        assert done.exit_code == 0 and "Example" in done.output and f"rti {command} " in done.output

    def test_a_mistyped_command_names_the_nearest(self):
        done = rti("trian")
        assert done.exit_code == 2 and "train" in done.output

    def test_version(self):
        assert rti("--version").output.startswith("rti-jax 0.")

    def test_help_imports_nothing_heavy(self):
        heavy = {"jax", "torch", "vllm", "transformers", "numpy"}
        code = f"import sys, rti_jax.cli; print(sorted({heavy} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["rti.enabeld=false"], "error: unknown key rti.enabeld; did you mean rti.enabled?"),
            (["env.tols=full"], "error: unknown key env.tols; did you mean env.tools?"),
            (["steps=many"], "error: steps: expected an integer, got 'many'"),
            (["sampling.top_p=0.7"], "error: sampling.top_p=0.7 truncates"),
            (["env.name=nowhere.module:Thing"], "error: env.name=nowhere.module:Thing: no module nowhere"),
            (["steps"], "error: override 'steps' is not KEY=VALUE"),
        ],
    )
    @pytest.mark.parametrize("command", ["train", "eval"])
    def test_one_line_and_exit_code_2(self, config, command, arguments, line):
        done = rti(command, config, *arguments)
        assert done.exit_code == 2 and done.stdout == ""
        assert done.stderr.startswith(line) and done.stderr.count("\n") == 1

    def test_missing_config(self, tmp_path):
        done = rti("train", tmp_path / "nope.yaml")
        assert (done.exit_code, done.stderr) == (2, f"error: {tmp_path / 'nope.yaml'}: no such config\n")

    def test_missing_model_folder(self, config, tmp_path):
        done = rti("eval", config, "model.path=/nowhere/Qwen3-8B", f"runs_dir={tmp_path}")
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: model.path=/nowhere/Qwen3-8B: no config.json there")

    def test_wrong_mesh(self):
        done = rti("score", "m", "--input", "a", "--output", "b", "--mesh", "fsdp=4,tenser=2")
        assert (done.exit_code, done.stderr) == (2, "error: --mesh: unknown key tenser; did you mean tensor?\n")

    def test_missing_run_folders(self, tmp_path):
        (tmp_path / "first").mkdir()
        (tmp_path / "first" / "config.yaml").write_text("name: first\n")
        done = rti("export", tmp_path / "frist")
        assert done.exit_code == 2
        assert done.stderr == f"error: {tmp_path}/frist does not exist; runs in {tmp_path}: first\n"
        assert rti("report", tmp_path / "frist").stderr.startswith(f"error: {tmp_path}/frist is not a run folder")

    def test_dry_run_prints_a_config_that_loads(self, config, tmp_path):
        done = rti("train", config, "optimizer.lr=3e-6", "--dry-run")
        (tmp_path / "b.yaml").write_text(done.stdout)
        assert done.exit_code == 0
        assert load_config(tmp_path / "b.yaml") == load_config(config, ["optimizer.lr=3e-6"])


class TestPolicies:
    """What `rti eval` and `rti select` make of their options, before anything is played."""

    @pytest.fixture
    def called(self, monkeypatch):
        """Calls of the commands' `main`: (config, step)."""
        import rti_jax.evaluate
        import rti_jax.select

        calls = []
        for module in (rti_jax.evaluate, rti_jax.select):
            monkeypatch.setattr(module, "main", lambda config, *_, step, **__: calls.append((config, step)))
        return calls

    @pytest.fixture
    def run(self, tmp_path):
        folder = tmp_path / "first"
        folder.mkdir()
        text = f"{TINY}model: {{path: {ROOT}/models/navigation-mini}}\nname: old\nseed: 3\n"
        (folder / "config.yaml").write_text(text)
        return folder

    @pytest.mark.parametrize(
        ("given", "split", "splits"),
        [("ood", "ood", []), ("test, ood", "test", ["test", "ood"]), ("20", "20", [])],
    )
    def test_splits(self, run, called, given, split, splits):
        assert rti("eval", run / "config.yaml", "--split", given).exit_code == 0
        ((config, step),) = called
        assert (config.eval.split, config.eval.splits, step) == (split, splits, None)

    @pytest.mark.parametrize("given", ["", " ", ","])
    @pytest.mark.parametrize("command", [["eval"], ["select", "-o", "a.txt"]])
    def test_a_split_without_a_name_is_a_mistake(self, run, called, command, given):
        done = rti(*command, run / "config.yaml", "--split", given)
        assert (done.exit_code, done.stderr) == (2, f"error: --split {given!r} names no split\n") and not called

    @pytest.mark.parametrize(
        ("place", "words"),
        [("file.txt/a", "Not a directory"), ("folder", "Is a directory"), ("full/new/a", "Read-only file system")],
    )
    @pytest.mark.parametrize("command", ["eval", "eval --roles", "select"])
    def test_an_output_that_cannot_be_written_is_said_first(self, run, command, place, words, monkeypatch):
        (run / "file.txt").write_text("")
        (run / "full").mkdir()
        output = run / f"{place}{'.txt' if command == 'select' else '.json'}"
        if place == "folder":
            output.mkdir()
        make = tempfile.TemporaryFile

        def temporary(dir):
            if dir == run / "full":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)
            return make(dir=dir)

        monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
        done = rti(*command.split(), run / "config.yaml", "--output", output)
        assert (done.exit_code, done.stderr) == (2, f"error: --output {output}: {words}\n")
        assert not any((run / "full").iterdir())

    def test_an_endpoint_needs_no_model(self, config, called):
        url = "http://127.0.0.1:1/v1"
        assert rti("eval", config, "--endpoint", url, "--endpoint-model", "x").exit_code == 0
        assert rti("select", config, "--endpoint", url, "-o", "a.txt", "--split", "test").exit_code == 0
        (first, _), (second, _) = called
        assert (first.eval.endpoint.url, first.eval.endpoint.model) == (url, "x")
        assert (second.eval.endpoint.model, second.eval.splits) == ("", ["test"])
        done = rti("eval", config, "--endpoint-model", "x")
        assert (done.exit_code, done.stderr) == (2, "error: --endpoint-model goes with --endpoint\n")

    def test_a_run_folder_is_its_config_and_its_newest_checkpoint(self, run, called):
        assert rti("eval", run, "eval.trials=2").exit_code == rti("eval", run, "--step", 4).exit_code == 0
        (first, newest), (_, fourth) = called
        assert (first.run_dir, first.seed, first.eval.trials) == (run, 3, 2)
        assert (newest, fourth) == ("newest", 4)

    def test_a_run_folder_as_a_model_is_told_apart(self, run):
        done = rti("eval", run / "config.yaml", f"model.path={run}")
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: model.path={run} is a run folder: give model.path={run}/export, or")

    def test_a_run_without_a_checkpoint(self, run):
        done = rti("eval", run)
        assert done.exit_code == 2
        assert done.stderr == f"error: {run} has no checkpoint yet; give a model: rti eval CONFIG model.path=...\n"


class TestBoundary:
    """What a command may raise, and what a user sees of it."""

    def run(self, config, monkeypatch, error):
        def main(resolved):
            assert isinstance(resolved, Config)
            raise error

        import rti_jax

        module = type(sys)("rti_jax.train")
        module.main = main
        monkeypatch.setitem(sys.modules, "rti_jax.train", module)
        monkeypatch.setattr(rti_jax, "train", module, raising=False)
        return rti("train", config, "model.path=models/navigation-mini")

    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (ConfigError("one\n  two"), 2, "error: one\n  two\n"),
            (engine_errors.EngineDiedError("the engine is gone"), 1, "error: the engine is gone\n"),
            (ModuleNotFoundError("No module named 'vllm.v1'", name="vllm.v1"), 1, "error: vLLM is not installed"),
            (FileNotFoundError(2, "No such file or directory", "/x/y"), 1, "error: /x/y: No such file or directory\n"),
            (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
            (OSError(28, "No space left on device"), 1, "error: no space left on the disk"),
            (KeyboardInterrupt(), 130, "\ninterrupted; the same command goes on from the last checkpoint\n"),
        ],
    )
    def test_a_line_and_an_exit_code(self, config, monkeypatch, error, code, text):
        done = self.run(config, monkeypatch, error)
        assert done.exit_code == code and done.stderr.startswith(text) and "Traceback" not in done.output

    @pytest.mark.parametrize("error", [ValueError("a bug"), ModuleNotFoundError("No module named 'x'", name="x")])
    def test_a_bug_keeps_its_traceback(self, config, monkeypatch, error):
        done = self.run(config, monkeypatch, error)
        assert done.exception is error and done.exit_code == 1

    def test_debugging_shows_the_traceback_of_a_mistake(self, config, monkeypatch):
        monkeypatch.setenv("RTI_DEBUG", "1")
        done = self.run(config, monkeypatch, ConfigError("one"))
        assert "Traceback" in done.stderr and done.stderr.endswith("error: one\n")


class TestLauncher:
    def test_tcmalloc_is_preferred_and_glibc_tuned_without_it(self):
        assert launcher.additions({}, "/lib/tc.so")["LD_PRELOAD"] == "/lib/tc.so"
        assert launcher.additions({}, None) == launcher.GLIBC

    @pytest.mark.parametrize("name", ["LD_PRELOAD", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
    def test_a_variable_that_is_set_wins(self, name):
        assert launcher.additions({name: "x"}, "/lib/tc.so") == {}

    def test_platform_is_told_without_importing_jax(self):
        assert launcher.runs_on_cpu({"JAX_PLATFORMS": "cpu"}) and not launcher.runs_on_cpu({"JAX_PLATFORMS": "cuda"})

    def test_jax_gets_what_vllm_beside_it_leaves_of_a_gpu(self):
        name = "XLA_PYTHON_CLIENT_MEM_FRACTION"

        def share(environment, **engine):
            return launcher.gpu_additions(environment, Config.model_validate({"engine": engine}))

        assert share({}, memory_fraction=0.4) == {name: "0.57"}
        assert share({}, args={"gpu_memory_utilization": 0.9}) == {name: "0.07"}
        assert share({}, sleep=True) == {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        assert share({}, kind="server", start=1) == {}
        frozen = [f"rti.roles.{role}.model=strong" for role in ("validator", "corrector")]  # one engine
        overrides = [*frozen, "engine.frozen_fraction=0.3", "engine.memory_fraction=0.2"]
        with_roles = load_config(ROOT / "configs/quickstart.yaml", overrides)
        assert launcher.gpu_additions({}, with_roles) == {name: "0.47"}
        assert share({name: ".5"}, memory_fraction=0.4) == {} == share({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        with pytest.raises(ConfigError, match=f"{name}=0.7 and the 0.4 of vLLM .* are more than a GPU has"):
            share({name: ".7"}, memory_fraction=0.4)

    def start(self, tmp_path, **environment):
        """Variables that the process has after `relaunch`, and what it said."""
        code = "import json, os; from rti_jax import launcher; launcher.relaunch(); print(json.dumps(dict(os.environ)))"
        clean = {k: v for k, v in os.environ.items() if k not in (launcher.MARK, "LD_PRELOAD", *launcher.GLIBC)}
        env = {**clean, "JAX_PLATFORMS": "cpu", "RTI_NO_LAUNCHER": "0", **environment}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
        )
        return json.loads(done.stdout), done.stderr

    @pytest.mark.skipif(sys.platform != "linux", reason="the allocator is chosen on Linux")
    def test_the_process_starts_once_more_visibly_and_keeps_the_rest(self, tmp_path):
        flags = "--xla_force_host_platform_device_count=8"
        variables, said = self.start(tmp_path, XLA_FLAGS=flags)
        assert variables[launcher.MARK] == "1" and variables["XLA_FLAGS"] == flags
        assert "LD_PRELOAD" in variables or variables["MALLOC_ARENA_MAX"] == "1"
        assert said.count("\n") == 1 and "RTI_NO_LAUNCHER=1" in said

    @pytest.mark.parametrize("environment", [{"RTI_NO_LAUNCHER": "1"}, {"JAX_PLATFORMS": "cuda"}, {"LD_PRELOAD": ""}])
    def test_not_where_it_has_no_place(self, tmp_path, environment):
        variables, said = self.start(tmp_path, **environment)
        assert launcher.MARK not in variables and said == ""


def test_the_installed_command_reports_a_mistake_without_the_launchers_line(config):
    command = [sys.executable, "-m", "rti_jax.cli", "train", str(config), "rti.enabeld=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown key rti.enabeld; did you mean rti.enabled?\n"


class TestSecrets:
    """What a config holds of them is neither printed nor kept; a run folder's policy asks for them again."""

    GIVEN = ["env.name=mcp", "env.url=http://h/", "env.tasks={train: t, test: t}", "env.reward=m:r"]

    def test_a_dry_run_shows_none(self, config):
        config.write_text("")
        done = rti("train", config, *self.GIVEN, "env.headers={Authorization: Bearer secret-4711}", "--dry-run")
        assert done.exit_code == 0 and "secret-4711" not in done.output and "Authorization: '***'" in done.output

    def test_a_run_folder_without_its_secret_says_which_one_it_needs(self, tmp_path):
        keys = {"name": "mcp", "url": "http://h/", "tasks": {"train": "t"}, "reward": "m:r"}
        hidden = Config(env=keys | {"headers": {"Authorization": "***"}})
        save_resolved(hidden, tmp_path / "run" / "config.yaml")
        done = rti("eval", tmp_path / "run")
        assert done.exit_code == 2 and "give env.headers.Authorization=... again" in done.output
