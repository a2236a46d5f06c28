"""Every config that is checked in is valid, and the full-size ones say what the paper says."""

import pathlib

import pytest

from rti_jax import environments, evaluate, strict_yaml
from rti_jax.config import Config, ConfigError, load_config
from rti_jax.sft import SFTConfig

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TAU2 = [f"tau2_{domain}_{model}" for domain in ("airline", "retail", "telecom") for model in ("qwen3_8b", "qwen3_5_9b")]
CLAW = ["claw_eval_hard20_qwen3_8b", "claw_eval_hard20_qwen3_5_9b"]
SUPERVISED = {"warmstart.yaml", "teacher.yaml", "quickstart_sft.yaml"}  # configs of `rti sft`
ALL = sorted(p for p in CONFIGS.rglob("*.yaml") if not p.name.startswith("_"))  # others are parts of configs


def load(path):
    schema = SFTConfig if path.parent == CONFIGS and path.name in SUPERVISED else Config
    return load_config(path, schema=schema, check_env=environments.env_config)


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_every_config_is_valid(path):
    config = load(path)
    assert config.name == path.stem, "a run folder has the name of its config"


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_configs_are_explained(path):
    assert path.read_text().startswith("# "), "says in its first line what it is"


@pytest.mark.parametrize("name", [f"navigation_{m}{s}" for m in ("qwen3_8b", "qwen3_5_9b") for s in ("", "_grpo")])
def test_full_size_navigation_is_the_papers(name):
    config = load(CONFIGS / f"{name}.yaml")
    env = environments.env_config(config.env)
    assert config.optimizer.lr == 1e-6 and config.optimizer.weight_decay == 0.1
    assert config.sampling.temperature == 0.8 and config.rollout.group_size == 8 and config.env.max_turns == 6
    assert (config.loss.clip_low, config.loss.clip_high, config.gate.delta) == (0.2, 0.2, 5.0)
    assert env.places == (3, 9) and (env.train_tasks, env.test_tasks) == (600, 150) and env.tools == "full"
    assert config.mesh.fsdp == 8 and max(config.batch.buckets) >= config.sampling.max_context


@pytest.mark.parametrize(("name", "decimals"), [("navigation_amap_qwen3_8b", 6), ("navigation_osm_qwen3_8b", 7)])
def test_full_size_navigation_on_real_maps(name, decimals):
    config, embedded = load(CONFIGS / f"{name}.yaml"), load(CONFIGS / "navigation_qwen3_8b.yaml")
    env = environments.env_config(config.env)
    assert env.map == name.split("_")[1] and env.tasks_file and env.decimals == decimals and env.tools == "full"
    assert not env.amap.offline and not env.osm.offline and config.env.max_turns == 6
    for section in ("model", "sampling", "rti", "gate", "reweight", "loss", "optimizer", "mesh", "batch"):
        assert getattr(config, section) == getattr(embedded, section), section


@pytest.mark.parametrize("name", ["navigation_qwen3_8b", *TAU2, *CLAW])
def test_the_baseline_differs_in_the_intervention_alone(name):
    rti, grpo = (strict_yaml.parse((CONFIGS / f"{name}{s}.yaml").read_text()) for s in ("", "_grpo"))
    intervention = ("name", "rti", "gate", "reweight")
    assert {k: v for k, v in rti.items() if k not in intervention} == {
        k: v for k, v in grpo.items() if k not in intervention
    }
    assert rti["rti"]["enabled"] and not grpo["rti"]["enabled"]


@pytest.mark.parametrize("name", [n + suffix for n in TAU2 for suffix in ("", "_grpo")])
def test_full_size_tau2_is_the_papers(name):
    config = load(CONFIGS / f"{name}.yaml")
    env = environments.env_config(config.env)
    assert config.optimizer.lr == 1e-6 and config.optimizer.weight_decay == 0.1
    assert config.sampling.temperature == 0.8 and config.rollout.group_size == 8 and config.env.max_turns == 30
    assert (config.loss.clip_low, config.loss.clip_high, config.gate.delta) == (0.2, 0.2, 5.0)
    assert env.domain in name and env.user.model.endswith("Qwen3.5-397B-A17B") and config.mesh.fsdp == 8
    assert (
        config.model.path.replace("-", "_")
        .replace(".", "_")
        .lower()
        .endswith(name.split("_", 2)[2].removesuffix("_grpo"))
    )
    split = ("full-base", "base") if env.domain == "telecom" else ("train", "test")
    assert (config.env.split, config.eval.split) == split
    assert max(config.batch.buckets) >= config.sampling.max_context and config.rti.enabled != name.endswith("_grpo")


@pytest.mark.parametrize("name", [n for n in TAU2 if "qwen3_8b" in n])
def test_tau2_configs_share_no_task(name):
    pytest.importorskip("tau2", reason="τ²-bench is not installed (extra tau2)")
    config = load(CONFIGS / f"{name}.yaml")
    source = environments.environment_source(config.env)
    trained, held_out = source.tasks(config.env.split), source.tasks(config.eval.split)
    evaluate.check_disjoint(trained, held_out)
    if "telecom" in name:
        assert (len(trained), len(held_out)) == (2171, 114)
        with pytest.raises(ConfigError, match="114 tasks are both trained"):
            evaluate.check_disjoint(source.tasks("full"), held_out)


@pytest.mark.parametrize("name", [n + suffix for n in CLAW for suffix in ("", "_grpo")])
def test_full_size_claw_eval_is_the_papers(name):
    config = load(CONFIGS / f"{name}.yaml")
    assert config.optimizer.lr == 1e-6 and config.optimizer.weight_decay == 0.1 and config.mesh.fsdp == 8
    assert config.sampling.temperature == 0.8 and config.rollout.group_size == 8
    assert (config.loss.clip_low, config.loss.clip_high, config.gate.delta) == (0.2, 0.2, 5.0)
    assert (config.env.split, config.eval.split, config.eval.trials) == ("train", "hard20_id", 4)
    assert max(config.batch.buckets) >= config.sampling.max_context and config.rti.enabled != name.endswith("_grpo")
    own = environments.env_config(config.env)
    assert not own.web and not own.repair and (own.root, own.subset, own.variants, own.judge.url) == ("", "", "", "")


@pytest.mark.parametrize(
    "name", ["navigation_qwen3_8b", "navigation_amap_qwen3_8b", "navigation_osm_qwen3_8b", *TAU2, *CLAW]
)
def test_hyperparameters_have_their_source(name):
    sections, text = ("sampling", "rti", "gate", "reweight", "loss", "optimizer"), ""
    for line in (CONFIGS / f"{name}.yaml").read_text().splitlines():
        text = line.rstrip(":") if line[:1].isalpha() else text
        if text in sections and line.startswith("  ") and "enabled: true" not in line:
            assert "# paper" in line or "# ours" in line, line


BACKBONES = ("qwen3_8b", "qwen3_5_9b")
BENCHMARKS = ("navigation", "tau2_airline", "tau2_retail", "tau2_telecom", "claw_eval_hard20")
METHODS = {"": "rti", "_grpo": "none", "_opd": "opd", "_luffy": "luffy"}


@pytest.mark.parametrize("bench", BENCHMARKS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_method_of_the_papers_tables_has_its_config(bench, backbone):
    for suffix, method in METHODS.items():
        config = load(CONFIGS / f"{bench}_{backbone}{suffix}.yaml")
        assert (config.rti.enabled, config.loss.baseline) == (method == "rti", "none" if method == "rti" else method)
        assert config.env.name == bench.partition("_")[0].replace("claw", "claw_eval")
        assert config.model.path == {"qwen3_8b": "models/Qwen3-8B", "qwen3_5_9b": "models/Qwen3.5-9B"}[backbone]


@pytest.mark.parametrize("name", [f"{bench}_{backbone}" for bench in BENCHMARKS for backbone in BACKBONES])
def test_the_baselines_with_a_teacher_differ_from_grpo_in_the_loss_alone(name):
    grpo, opd, luffy = (load(CONFIGS / f"{name}_{m}.yaml") for m in ("grpo", "opd", "luffy"))
    for other in (opd, luffy):
        different = {k for k in type(grpo).model_fields if getattr(grpo, k) != getattr(other, k)}
        assert different == {"name", "loss"}
    assert opd.loss.teacher.path and opd.loss.variant == "grpo" and opd.loss.aggregation == "token_mean"
    recipe = luffy.loss
    assert recipe.variant == "dr_grpo" and (recipe.clip_low, recipe.clip_high) == (1.0, float("inf"))
    assert (recipe.shaping, recipe.entropy_coef, recipe.kl_beta) == (0.1, 0.001, 0.0) and recipe.teacher.rollouts
