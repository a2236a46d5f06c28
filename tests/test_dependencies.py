"""The import graph, lazy imports included: data flows one way, and heavy packages stay where they belong."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

from rti_jax import types
from rti_jax.config_sections import RolesConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("rti_jax", "models", "envs")
NUMPY_ONLY = ("gate", "advantages", "batching", "packing", "reweight", "leakage")

# A factory that loads the implementation its config asks for: the one import that goes back.
FACTORY = {("rti_jax.engine", "rti_jax.server_engine")}


def modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file of every module of the three packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too; `from a import b` is a.b if that is a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports by full names, no relative ones"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inside}
    return names


def roots(path: pathlib.Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def third_party(path: pathlib.Path) -> set[str]:
    return {r for r in roots(path) if r not in sys.stdlib_module_names and r not in PACKAGES}


GRAPH = {
    name: {i for i in imported(path) if i in MODULES and i != name and (name, i) not in FACTORY}
    for name, path in MODULES.items()
}


def reachable(name: str) -> set[str]:
    seen: set[str] = set()
    stack = [name]
    while stack:
        for other in GRAPH[stack.pop()] - seen:
            seen.add(other)
            stack.append(other)
    return seen


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_this_checkouts(package):
    assert pathlib.Path(importlib.import_module(package).__file__).parent == ROOT / package


def test_environments_know_neither_models_nor_the_trainer():
    for name, path in MODULES.items():
        if name.split(".")[0] == "envs":
            assert not roots(path) & {"jax", "flax", "torch", "vllm", "models", "rti_jax"}, name


def test_models_know_neither_environments_nor_the_trainer():
    for name, path in MODULES.items():
        if name.split(".")[0] == "models":
            assert not roots(path) & {"envs", "rti_jax", "torch", "vllm"}, name


def test_losses_import_jax_and_chex():
    assert third_party(MODULES["rti_jax.losses"]) == {"jax", "chex"} and not GRAPH["rti_jax.losses"]


@pytest.mark.parametrize("name", NUMPY_ONLY)
def test_host_side_stages_are_numpy(name):
    if (module := f"rti_jax.{name}") in MODULES:
        assert third_party(MODULES[module]) <= {"numpy"}


def test_host_side_stages_load_neither_jax_nor_torch():
    loaded = ", ".join(f"rti_jax.{n}" for n in NUMPY_ONLY if f"rti_jax.{n}" in MODULES)
    code = f"import sys, {loaded}; sys.exit(', '.join(sys.modules.keys() & {{'jax', 'torch', 'vllm'}}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_engine_imports_vllm():
    assert {n for n, path in MODULES.items() if "vllm" in roots(path)} <= {
        "rti_jax.engine",
        "rti_jax.vllm_plugin",
        "rti_jax.device_transfer",
    }


def test_the_learner_never_imports_a_model():
    assert not {n for n in reachable("rti_jax.learner") if n.split(".")[0] in ("models", "envs")}


def test_no_import_cycles():
    cycles = sorted(name for name in MODULES if name in reachable(name))
    assert not cycles, f"in import cycles (lazy imports count): {', '.join(cycles)}"


def test_the_roles_are_named_in_one_place():
    """As the keys of rti.roles; whoever else needs all three takes types.ROLES."""
    assert tuple(RolesConfig.model_fields) == types.ROLES
    listed = set()
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if all(role in text for role in types.ROLES) else ():
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                inside = {item.value for item in node.elts if isinstance(item, ast.Constant)}
                listed |= {name} if inside >= set(types.ROLES) else set()
    assert listed == {"rti_jax.types"}


def test_no_module_without_a_subject():
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not {name for name in MODULES if vague & set(name.split("."))}
