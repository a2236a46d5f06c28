"""Loading, strictness and one-line errors of configs; what may change when a run is resumed."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from rti_jax import config_diff, config_reference, environments, strict_yaml
from rti_jax.config import Config, ConfigError, load_config, resolved_yaml, save_resolved

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def load(tmp_path):
    """Loads a text with overrides."""

    def load(text="", *overrides):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return load_config(path, overrides, check_env=environments.env_config)

    return load


@pytest.fixture
def message(load, tmp_path):
    """The error of a text with overrides, without the temporary folder's name."""

    def message(text="", *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-6", 1e-6),  # a string in YAML 1.1
            ("1.5e3", 1500.0),
            (".5", 0.5),
            ("inf", float("inf")),
            ("-.inf", float("-inf")),
            ("3", 3),
            ("-3", -3),
            ("010", 10),  # 8 in YAML 1.1
            ("on", "on"),  # True in YAML 1.1
            ("no", "no"),
            ("1:30", "1:30"),  # 90 in YAML 1.1
            ("2026-01-01", "2026-01-01"),  # a date in YAML 1.1
            ("1_000", "1_000"),
            ("info", "info"),
            ("e5", "e5"),
            ("true", True),
            ("~", None),
            ("", None),
            ('"1"', "1"),
            ("[1, 2e-3]", [1, 2e-3]),
            ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ],
    )
    def test_scalars_are_what_they_look_like(self, text, value):
        parsed = strict_yaml.parse(text)
        assert parsed == value and type(parsed) is type(value)

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("a: 1\nb: 2\na: 3", "line 3: key 'a' was given before, in line 1"),
            ("x: {a: 1, a: 1}", "line 1: key 'a' was given before"),
            ("1: 2", "key 1 is not a word"),
            ("a: [", "line 1: "),
            ("!!python/object:os.system x", "could not determine a constructor"),
        ],
    )
    def test_errors_name_the_line(self, text, error):
        with pytest.raises(strict_yaml.YamlError, match=".") as caught:
            strict_yaml.parse(text)
        assert error in str(caught.value) and "\n" not in str(caught.value)

    scalars = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
    )
    values = st.recursive(
        scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("abn_", min_size=1), v, max_size=3)
    )

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(values)
    @hypothesis.example({"a": "1e-6", "b": "inf", "n": "null", "on": "yes"})
    @hypothesis.example("\x85")
    def test_what_is_dumped_is_read_back(self, value):
        assert strict_yaml.parse(strict_yaml.dump({"x": value})) == {"x": value}


class TestLoading:
    def test_sparse_file_and_overrides(self, load):
        config = load("optimizer: {lr: 3e-5}\nname: a", "gate.delta=inf", "rollout.group_size=4", "optimizer.b1=0.5")
        assert (config.optimizer.lr, config.optimizer.b1, config.optimizer.b2) == (3e-5, 0.5, 0.98)
        assert config.gate.delta == float("inf") and config.rollout.group_size == 4 and config.name == "a"

    def test_the_last_override_wins_and_a_mapping_is_replaced(self, load):
        config = load("rollout: {mix: {easy: 1, hard: 1}}", "seed=1", "seed=2", "rollout.mix={hard: 1}")
        assert config.seed == 2 and config.rollout.mix == {"hard": 1.0}
        assert load("rollout: {mix: {easy: 1}}", "rollout.mix.hard=0.5").rollout.mix == {"easy": 1.0, "hard": 0.5}

    def test_free_sections_take_any_key(self, load):
        assert load("", "engine.args.max_model_len=512").engine.args == {"max_model_len": 512}

    def test_an_integer_is_a_number_but_not_the_reverse(self, load, message):
        assert load("gate: {delta: 3}").gate.delta == 3.0
        assert message("steps: 3.0") == "a.yaml: steps: expected an integer, got 3.0"

    def test_defaults_are_the_papers(self, load):
        c = load()
        assert (c.optimizer.lr, c.optimizer.weight_decay, c.sampling.temperature) == (1e-6, 0.1, 0.8)
        assert (c.rollout.group_size, c.loss.clip_low, c.loss.clip_high, c.gate.delta) == (8, 0.2, 0.2, 5.0)
        assert (c.env.max_turns, c.reweight.epsilon_cal, c.rti.attempts, c.loss.kl_beta) == (6, 0.2, 1, 0.0)

    def test_resolved_config_reads_back_equal(self, load, tmp_path):
        config = load("env: {places: [2, 3]}", "gate.delta=inf", "loss.mismatch_clip=2.0", "engine.args.x=[1, a]")
        save_resolved(config, tmp_path / "runs" / "x" / "config.yaml")
        again = load_config(tmp_path / "runs" / "x" / "config.yaml")
        assert again == config and again.env.own == {"places": [2, 3]}
        assert [p.name for p in (tmp_path / "runs" / "x").iterdir()] == ["config.yaml"]  # no temporary file is left
        assert "lr: 1.0e-06" in resolved_yaml(config)

    def test_environment_keys_are_checked_by_its_class(self, load, message):
        assert load("env: {places: [2, 3]}").env.own == {"places": [2, 3]}
        assert message("", "env.plases=[2, 3]") == "unknown key env.plases; did you mean env.places?"
        assert message("env: {max_turn: 3}") == "a.yaml: unknown key env.max_turn; did you mean env.max_turns?"
        assert message("", 'env.train_tasks="3"') == "env.train_tasks: expected an integer, got '3'"
        assert message("", "env.kinds={eazy: 1}").endswith("got 'eazy'; did you mean easy?")
        assert "[min, max]" in message("", "env.places=[4, 2]")
        assert "did you mean navigation?" in message("", "env.name=navigatoin")


class TestErrors:
    @pytest.mark.parametrize(
        ("overrides", "error"),
        [
            (["rti.enabeld=false"], "unknown key rti.enabeld; did you mean rti.enabled?"),
            (["rti.roles.validator.temprature=1"], "did you mean rti.roles.validator.temperature?"),
            (["optimiser.lr=1"], "unknown key optimiser; did you mean optimizer?"),
            (["groups_per_step=3"], "did you mean rollout.groups_per_step?"),
            (["learning_rate=3"], "did you mean optimizer.lr?"),
            (["trainer.learning_rate=3"], "unknown key trainer"),
            (["zzzz=3"], "unknown key zzzz; valid here: name, runs_dir, seed, steps"),
            (["steps=abc"], "steps: expected an integer, got 'abc'"),
            (["seed=true"], "seed: expected an integer, got true"),
            (["rti.enabled=yes"], "rti.enabled: expected true or false, got 'yes'"),
            (["name=123"], "name: expected a string, got 123 (quote it)"),
            (["rti=false"], "rti: expected a section of keys, got false"),
            (["seed.x=1"], "seed: expected an integer, got {'x': 1}"),
            (["batch.buckets=[1, a]"], "batch.buckets.1: expected an integer, got 'a'"),
            (["rollout.mix={a: b}"], "rollout.mix.a: expected a number, got 'b'"),
            (["model.dtype=bfloat32"], "expected 'float32' or 'bfloat16', got 'bfloat32'; did you mean float32?"),
            (["rollout.group_size=1"], "rollout.group_size: expected a value greater than or equal to 2, got 1"),
            (["gate.delta=nan"], "gate.delta: expected a value"),
            (["stop.hours=inf"], "stop.hours: expected a finite number, got inf"),
            (["sampling.top_p=0.7"], "sampling.top_p=0.7 truncates the sampling distribution"),
            (["loss.variant=gspo"], "loss.variant=gspo has one ratio per sequence"),
            (["engine.kind=server"], "engine.kind=server needs engine.urls"),
            (["foo"], "override 'foo' is not KEY=VALUE"),
            (["a..b=1"], "override 'a..b=1' is not KEY=VALUE"),
            (["optimizer.lr=["], "override 'optimizer.lr=['"),
        ],
    )
    def test_one_line_that_names_key_got_and_expected(self, message, overrides, error):
        text = message("", *overrides)
        assert error in text and "\n" not in text

    def test_where_a_key_was_given(self, message):
        assert message("rti: {enabeld: true}").startswith("a.yaml: unknown key")
        assert message("rti: {enabled: true}", "rti.enabeld=true").startswith("unknown key")

    def test_every_mistake_has_its_line_unknown_keys_first(self, message):
        assert message("steps: x\nrti: {enabeld: true}").splitlines() == [
            "a.yaml: unknown key rti.enabeld; did you mean rti.enabled?",
            "a.yaml: steps: expected an integer, got 'x'",
        ]

    def test_a_dotted_key_in_the_file(self, message):
        assert "write it nested, rti: {enabled: ...}" in message("rti.enabled: false")

    def test_files_that_are_no_config(self, message, tmp_path):
        assert message("- a") == "a.yaml: holds ['a'], not keys with values"
        assert "line 2: key 'a' was given before" in message("a: 1\na: 2")
        with pytest.raises(ConfigError, match="b.yaml: no such config; did you mean .*a.yaml?"):
            load_config(tmp_path / "b.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path)

    def test_configs_cannot_be_changed_after_loading(self, load):
        with pytest.raises(Exception, match="frozen"):
            load().steps = 3


class TestResume:
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.path = tmp_path / "a.yaml"
        self.path.write_text("steps: 24\noptimizer: {lr: 5e-4}\nenv: {decimals: 2}\n")

    def changed(self, *overrides):
        return load_config(self.path, overrides)

    @pytest.mark.parametrize(
        "override",
        ["steps=99", "name=b", "eval.limit=3", "checkpoint.every=1", "engine.args={a: 1}", "mesh.fsdp=2"],
    )
    def test_harmless_keys(self, override):
        config_diff.check_resume(self.changed(), self.changed(override))
        assert all(d.harmless for d in config_diff.differences(self.changed(), self.changed(override)))

    @pytest.mark.parametrize(
        ("override", "line"),
        [
            ("optimizer.lr=1e-3", "  optimizer.lr: 0.0005 -> 0.001"),
            ("rti.enabled=false", "  rti.enabled: true -> false"),
            ("gate.delta=inf", "  gate.delta: 5.0 -> inf"),
            ("env.decimals=3", "  env.decimals: 2 -> 3"),
            ("rti.roles.validator.temperature=1.0", "  rti.roles.validator.temperature: 0.0 -> 1.0"),
        ],
    )
    def test_keys_that_change_the_algorithm_are_refused_with_the_diff(self, override, line):
        with pytest.raises(ConfigError) as caught:
            config_diff.check_resume(self.changed(), self.changed(override, "steps=99"))
        assert str(caught.value).splitlines()[1:] == [line]  # the harmless difference is no reason

    def test_steps_matter_to_a_schedule(self):
        with pytest.raises(ConfigError, match="steps: 24 -> 99"):
            config_diff.check_resume(
                self.changed("optimizer.schedule=cosine"), self.changed("optimizer.schedule=cosine", "steps=99")
            )


def test_reference_is_written_from_the_schema():
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == config_reference.reference(), "run: python -m rti_jax.config_reference > docs/config.md"
    assert "| `gate.delta` | number | `5.0` | paper: perplexity threshold 5" in text
    assert "| `logging.sinks` | list of `wandb` or `trackio` | `[]` |" in text
    assert "| `batch.buckets` | list of integers | `[1024, 4096, 16384]` | row lengths that are compiled" in text
    for name in Config.model_fields:
        assert f"## {name}\n" in text or f"| `{name}` |" in text


@pytest.mark.parametrize(
    "override",
    [
        "loss.constant=-5",
        "loss.mismatch_clip=0",
        "env.max_turns=0",
        "batch.buckets=[]",
        "batch.buckets=[-5]",
        "mesh.fsdp=0",
        "optimizer.lr=inf",
        "sampling.temperature=inf",
        "name=../x",
    ],
)
def test_values_that_cannot_be_right_are_refused(override):
    with pytest.raises(ConfigError, match=override.split("=")[0].split(".")[-1]):
        load_config("configs/quickstart.yaml", [override])


class TestInherits:
    def test_keys_are_set_over_the_other_files_section_by_section(self, load, tmp_path):
        (tmp_path / "base.yaml").write_text("seed: 3\noptimizer: {lr: 1e-4, b1: 0.5}\nbatch: {buckets: [8, 16]}\n")
        config = load("inherits: base.yaml\noptimizer: {lr: 2e-4}\nbatch: {buckets: [32]}", "optimizer.b2=0.9")
        assert (config.seed, config.optimizer.lr, config.optimizer.b1, config.optimizer.b2) == (3, 2e-4, 0.5, 0.9)
        assert config.batch.buckets == [32]

    def test_may_be_chained_and_is_relative_to_its_file(self, load, tmp_path):
        (tmp_path / "sub").mkdir()
        (tmp_path / "root.yaml").write_text("seed: 3\nsteps: 7\n")
        (tmp_path / "sub" / "middle.yaml").write_text("inherits: ../root.yaml\nsteps: 8\n")
        config = load("inherits: sub/middle.yaml")
        assert (config.seed, config.steps) == (3, 8)

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("inherits: a.yaml", "a.yaml: inherits from itself"),
            ("inherits: bsae.yaml", "bsae.yaml: no such config; did you mean base.yaml?"),
            ("inherits: [base.yaml]", "a.yaml: inherits: expected the name of a config beside it, got ['base.yaml']"),
        ],
    )
    def test_mistakes_are_one_line(self, message, tmp_path, text, error):
        (tmp_path / "base.yaml").write_text("seed: 3\n")
        assert message(text) == error


class TestBaselines:
    OPD, LUFFY = ("loss.baseline=opd", "loss.teacher.path=m"), ("loss.baseline=luffy", "loss.teacher.rollouts=t.jsonl")

    def test_the_method_is_off_beside_them(self, load):
        assert load().rti.enabled
        assert not load("", *self.OPD).rti.enabled and not load("rti: {prompts: compact}", *self.LUFFY).rti.enabled

    def test_both_are_an_error(self, message):
        line = "loss.baseline=opd and rti.enabled=true are two methods; set rti.enabled=false or loss.baseline=none"
        assert message("", *self.OPD, "rti.enabled=true") == line

    def test_luffy_is_its_released_recipe_unless_given(self, load):
        loss = load("", *self.LUFFY).loss
        assert (loss.variant, loss.clip_low, loss.clip_high) == ("dr_grpo", 1.0, float("inf"))
        assert (loss.entropy_coef, loss.shaping, loss.kl_beta) == (0.001, 0.1, 0.0)
        own = load("loss: {clip_high: 0.3, entropy_coef: 0}", *self.LUFFY, "loss.variant=grpo").loss
        assert (own.variant, own.clip_low, own.clip_high, own.entropy_coef) == ("grpo", 1.0, 0.3, 0.0)

    def test_dapo_has_its_own_upper_clip_unless_given(self, load):
        assert load("", "loss.variant=dapo").loss.clip_high == 0.28 and load().loss.clip_high == 0.2
        assert load("", "loss.variant=dapo", "loss.clip_high=0.2").loss.clip_high == 0.2

    def test_resolved_configs_read_back_equal(self, load, tmp_path):
        for given in (self.OPD, self.LUFFY, ("loss.variant=dapo", "rollout.max_rounds=3")):
            config = load("", *given)
            assert load(resolved_yaml(config)) == config

    @pytest.mark.parametrize(
        ("overrides", "error"),
        [
            (["loss.baseline=opd"], "baseline=opd needs one of loss.teacher.path or loss.teacher.urls, got none"),
            (["loss.baseline=luffy", "loss.teacher.path=m", "loss.teacher.urls=[u]"], "needs one of .* got path, urls"),
            ([*OPD[:1], "loss.teacher.rollouts=t"], "baseline=opd needs one of .* got rollouts"),
            (["loss.teacher.path=m"], "teacher.path is given, but loss.baseline=none has no teacher"),
            ([*OPD, "loss.variant=gspo"], "variant=gspo has one ratio per sequence; opd needs one per token"),
            (["loss.teacher=m"], "loss.teacher: expected a section of keys, got 'm'"),
            (["rollout.max_rounds=2"], "rollout.max_rounds=2 replaces groups .* set loss.variant=dapo"),
            (["loss.baseline=odp"], "did you mean opd?"),
        ],
    )
    def test_mistakes_are_one_line(self, message, overrides, error):
        import re

        said = message("", *overrides)
        assert re.search(error.replace("?", r"\?"), said) and "\n" not in said, said
