"""What docs/security.md promises: data is never run, no name leads out of its folder, nothing is open to others."""

import ast
import inspect
import json
import os
import pathlib
import stat
import typing

import numpy as np
import pydantic
import pytest
import yaml

from envs.base import Task
from rti_jax import cli, config, evaluate, server_process, strict_yaml, task_sets, weight_sync
from tests.fakes import tiny_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("rti_jax", "envs", "models", "scripts", "benchmarks")
# What a rule would find and what is right nevertheless, each with its reason.
EXCEPTIONS = {
    ("envs/tau2/copy_on_write.py", "pickle"),  # copies of τ²'s records within the process: the fastest there are
    ("envs/tau2/domain.py", "pickle"),  # the same; no byte of it was read from anywhere
    ("envs/claw_eval/services.py", "eval"),  # services of the user's own checkout of the benchmark are code
    ("envs/claw_eval/services.py", "exec"),
    ("rti_jax/weight_sync.py", "time.time"),  # against a file's time, which is wall time
    ("envs/navigation/services/client.py", "time.time"),  # against a date that a server gave
    ("rti_jax/board.py", "time.time"),  # what TensorBoard shows
}
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
SHELLS += ("asyncio.create_subprocess_shell",)
UNPACK = ("extractall", "unpack_archive")
SAFE_LOADERS = ("_Loader", "_LOADER", "yaml.SafeLoader", "yaml.CSafeLoader")


def dotted(node):
    """`a.b.c` of a node that is such a name, else ""."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def findings(tree):
    """(rule, line) of everything in a module that a rule forbids."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (("pickle", node.lineno) for n in names if n.partition(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), {k.arg: k.value for k in node.keywords}
        last = name.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        true = {k for k, v in keywords.items() if isinstance(v, ast.Constant) and v.value is True}
        false = {k for k, v in keywords.items() if isinstance(v, ast.Constant) and v.value is False}
        if name in ("eval", "exec", "__import__"):
            yield name, node.lineno
        if name in SHELLS or "shell" in keywords and "shell" not in false:
            yield "shell", node.lineno
        if "trust_remote_code" in keywords and "trust_remote_code" not in false:
            yield "trust_remote_code", node.lineno
        if "allow_pickle" in true or name in ("torch.load", "torch.save") and "weights_only" not in true:
            yield "pickle", node.lineno
        if name.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load"):
            loader = keywords.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
            if last != "load" or dotted(loader) not in SAFE_LOADERS:
                yield "yaml", node.lineno
        if last in UNPACK:
            yield "archive", node.lineno
        if name == "tempfile.mktemp":
            yield "mktemp", node.lineno
        if name == "time.time":  # a duration by it is wrong when the clock is set
            yield "time.time", node.lineno


class TestSource:
    def test_nothing_that_runs_what_it_reads(self):
        files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*.py")]
        found = {}
        for path in files:
            for rule, line in findings(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault((str(path.relative_to(ROOT)), rule), line)
        assert len(files) > 100 and {k: v for k, v in found.items() if k not in EXCEPTIONS} == {}
        assert not EXCEPTIONS - found.keys(), "an exception that is none any more"

    @pytest.mark.parametrize(
        ("code", "rule"),
        [
            ("import pickle", "pickle"),
            ("from dill import loads", "pickle"),
            ("np.load(path, allow_pickle=True)", "pickle"),
            ("torch.load(path)", "pickle"),
            ("torch.load(path, weights_only=False)", "pickle"),
            ("eval(text)", "eval"),
            ("exec(text)", "exec"),
            ("os.system(text)", "shell"),
            ("subprocess.run(text, shell=True)", "shell"),
            ("subprocess.run(text, shell=wanted)", "shell"),
            ("yaml.load(text)", "yaml"),
            ("yaml.load(text, Loader=yaml.Loader)", "yaml"),
            ("yaml.unsafe_load(text)", "yaml"),
            ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
            ("tarfile.open(path).extractall(folder)", "archive"),
            ("tempfile.mktemp()", "mktemp"),
            ("started = time.time()", "time.time"),
        ],
    )
    def test_the_rules_find_what_they_forbid(self, code, rule):
        assert [r for r, _ in findings(ast.parse(code))] == [rule]

    @pytest.mark.parametrize(
        "code",
        [
            "model.eval()",
            "np.load(path)",
            "torch.load(path, weights_only=True)",
            "yaml.safe_load(text)",
            "yaml.load(text, Loader=yaml.SafeLoader)",
            "subprocess.run(words)",
            "time.monotonic()",
            "AutoTokenizer.from_pretrained(path, trust_remote_code=False)",
        ],
    )
    def test_and_nothing_else(self, code):
        assert list(findings(ast.parse(code))) == []

    def test_yaml_makes_no_objects(self):
        assert issubclass(strict_yaml._Loader, yaml.SafeLoader)
        with pytest.raises(strict_yaml.YamlError):
            strict_yaml.parse("!!python/object/apply:os.system ['true']")


def test_code_in_a_model_folder_is_not_run(tmp_path):
    """A tokenizer and a model that bring their own classes: read as data, or refused."""
    from rti_jax.chat import Chat
    from rti_jax.config import ConfigError

    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for name, auto in (("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}), ("config.json", None)):
        data = json.loads((folder / name).read_text())
        data["auto_map"] = auto or {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
        (folder / name).write_text(json.dumps(data))
    try:
        Chat.from_folder(folder, thinking=False)
    except ConfigError:
        pass
    assert not (tmp_path / "ran").exists()


class TestNames:
    @pytest.mark.parametrize("name", ["..", ".", "", "/etc", "a/b", "../a", "a/..", "a\n", "a\0b", "\x1b[2J"])
    def test_a_run_stays_in_its_folder(self, name):
        with pytest.raises(pydantic.ValidationError, match="must be one folder name"):
            config.Config(name=name)

    def test_files_named_after_splits_and_models_stay_in_evals(self):
        given = config.Config(eval={"endpoint": {"url": "http://x/v1", "model": "../../a b"}})
        path = evaluate.default_output(given, task_sets.TaskSet({"../../b": [Task("t")], "/c": [Task("u")]}), None)
        assert path.parent == given.run_dir / "evals" and ".." not in path.parts

    def test_templates_of_roles_are_sandboxed(self, tmp_path):
        from rti_jax.roles import RolePrompts

        for role in ("validator", "corrector", "verifier"):
            (tmp_path / f"{role}.j2").write_text("{{ evidence.__class__.__mro__[1].__subclasses__() }}")
        with pytest.raises(config.ConfigError, match="unsafe"):
            RolePrompts(str(tmp_path)).validator("E", "Y")


class TestOthersOnTheMachine:
    def test_servers_listen_on_this_host_alone(self):
        assert inspect.signature(cli.serve).parameters["host"].default == "127.0.0.1"
        assert server_process.HOST == "127.0.0.1"

    def test_weights_in_shared_memory_are_the_users_own(self, tmp_path):
        shapes = {"w": (2, 2)}
        with weight_sync.payload([("w", np.ones((2, 2), np.float32))], shapes, "float32", str(tmp_path)) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []

    def test_what_others_leave_there_neither_stops_us_nor_is_followed(self, tmp_path):
        target = tmp_path / "precious"
        target.write_text("x")
        pipe, link = (tmp_path / f"{weight_sync.PREFIX}{n}.safetensors" for n in ("pipe", "link"))
        os.mkfifo(pipe)
        link.symlink_to(target)
        for path in (pipe, target):
            os.utime(path, (0, 0))
        weight_sync._remove_abandoned(tmp_path)  # opening a pipe that nobody writes to would wait for ever
        assert target.read_text() == "x" and link.is_symlink()


def test_no_key_is_part_of_a_config():
    """Keys are in the environment; a config, which is saved and shown, names the variable at most."""

    def fields(schema):
        for name, field in schema.model_fields.items():
            yield name
            for kind in (field.annotation, *typing.get_args(field.annotation)):
                if inspect.isclass(kind) and issubclass(kind, pydantic.BaseModel):
                    yield from fields(kind)

    names = set(fields(config.Config))
    assert {n for n in names if any(word in n for word in ("key", "token", "secret", "password"))} == {
        "key_variable",
        "max_tokens",
        "step_tokens",
        "tokens",  # stop.tokens, a budget
    } & names
