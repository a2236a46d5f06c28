"""The score command: agreement with transformers, order, malformed rows, and life without PyTorch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tiny_models import ReferenceModel, byte_tokenizer, make_qwen3

from rti_jax import score as command
from rti_jax.config import ConfigError, MeshConfig

LENGTHS = (1, 850, 2, 33, 120, 1, 300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_qwen3(root / "tied", tied=True)
    make_qwen3(root / "untied", tied=False)
    make_qwen3(root / "sharded", tied=False, seed=1, max_shard_size="100KB")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 1
    return root


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [
        {
            "prompt_ids": rng.integers(0, 272, rng.integers(1, 30)).tolist(),
            "response_ids": rng.integers(0, 272, n).tolist(),
        }
        for n in LENGTHS
    ]


def run(folder, rows, tmp_path, **options):
    """Writes rows (dicts, or lines as they are), scores them, and returns the exit code and the parsed output."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    code = command.score(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", **options)
    return code, [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


class TestAgreement:
    @pytest.mark.parametrize(("name", "temperature"), [("tied", 1.0), ("untied", 0.6), ("sharded", 0.6)])
    def test_with_transformers(self, folders, rows, tmp_path, name, temperature):
        code, results = run(folders / name, rows, tmp_path, temperature=temperature)
        assert code == 0 and len(results) == len(rows)
        reference = ReferenceModel(folders / name)
        for row, result in zip(rows, results, strict=True):
            expected = reference.logprobs(row["prompt_ids"], row["response_ids"], temperature)
            np.testing.assert_allclose(result["logprobs"], expected, atol=1e-4)
            assert result["perplexity"] == pytest.approx(np.exp(-expected.mean()), rel=1e-3)
            assert result["tokens"] == len(row["response_ids"])

    def test_text_rows_are_tokenized_apart(self, folders, tmp_path):
        tokenizer = byte_tokenizer()
        text = {"prompt": "<|im_start|>user\nhé<|im_end|>\n", "response": "ok <|im_end|>"}
        ids = {f"{k}_ids": tokenizer.encode(v, add_special_tokens=False) for k, v in text.items()}
        code, (by_text, by_ids) = run(folders / "tied", [text, ids], tmp_path)
        assert code == 0 and by_text == by_ids and by_text["tokens"] == 4


class TestMalformedRows:
    BAD = {
        '{"prompt_ids": [1]': "not valid JSON",
        "[1, 2]": "a row is an object, not list",
        '{"prompt_ids": [1]}': "response_ids must be a list of token ids",
        '{"prompt_ids": [1], "response_ids": ["a"]}': "response_ids must be a list of token ids",
        '{"prompt_ids": [true], "response_ids": [1]}': "prompt_ids must be a list of token ids",
        '{"prompt_ids": [1], "response_ids": [272]}': "response_ids holds 272, outside the vocabulary of 272",
        '{"prompt_ids": [-1], "response_ids": [2]}': "prompt_ids holds -1, outside",
        '{"prompt_ids": [], "response_ids": [2]}': "the prompt is empty",
        '{"prompt_ids": [1], "response_ids": []}': "the response is empty",
        '{"prompt": "a"}': "response is missing or no text",
        '{"text": "a"}': "needs prompt_ids and response_ids, or prompt and response as text",
        "": "not valid JSON",
    }

    def test_each_is_reported_by_line_and_the_others_are_scored(self, folders, tmp_path, capsys):
        good = {"prompt_ids": [1, 2], "response_ids": [3]}
        lines = [good, *self.BAD, good, "", ""]  # blank lines at the end are none
        code, results = run(folders / "tied", lines, tmp_path)
        assert code == 1 and len(results) == len(self.BAD) + 2
        assert results[0] == results[-1] and results[0]["tokens"] == 1
        errors = capsys.readouterr().err.splitlines()
        for number, (result, message) in enumerate(zip(results[1:-1], self.BAD.values(), strict=True), 2):
            assert message in result["error"] and result["line"] == number
            assert f"line {number}: {result['error']}" in errors
        assert errors[-1] == f"{len(self.BAD)} malformed row(s); the others were scored"

    def test_windows_keep_order_and_line_numbers(self, folders, tmp_path, monkeypatch):
        monkeypatch.setattr(command, "WINDOW", 2)
        rows = [{"prompt_ids": [1], "response_ids": [2] * n} for n in (1, 2, 3)]
        code, results = run(folders / "tied", [*rows, "x", rows[0]], tmp_path)
        assert code == 1 and [r.get("tokens", r.get("line")) for r in results] == [1, 2, 3, 4, 1]


class TestMistakes:
    def test_each_is_one_clear_line(self, folders, tmp_path):
        def score(folder=folders / "tied", rows='{"prompt": "a", "response": "b"}', **options):
            (tmp_path / "rows.jsonl").write_text(rows)
            command.score(folder, options.pop("input", tmp_path / "rows.jsonl"), tmp_path / "out.jsonl", **options)

        for options, message in (
            ({"folder": tmp_path / "nowhere"}, "nowhere does not exist"),
            ({"input": tmp_path / "none.jsonl"}, "none.jsonl does not exist"),
            ({"temperature": 0.0}, "temperature is 0"),
            ({"mesh": {"fsdp": 3}}, "does not multiply to the 1 device"),
        ):
            with pytest.raises(ConfigError, match=message) as error:
                score(**options)
            assert "\n" not in str(error.value)
        assert not (tmp_path / "out.jsonl").exists()

    def test_text_without_a_tokenizer(self, folders, tmp_path):
        make_qwen3(tmp_path / "bare", tokenizer=False)
        with pytest.raises(ConfigError, match="has no tokenizer files, which text rows need"):
            run(tmp_path / "bare", [{"prompt": "a", "response": "b"}], tmp_path)
        assert run(tmp_path / "bare", [{"prompt_ids": [1], "response_ids": [2]}], tmp_path, mesh=MeshConfig())[0] == 0


def test_without_torch_and_model_code(folders, tmp_path):
    """Neither PyTorch nor vLLM nor transformers' modelling code can be imported here, and nothing misses them."""
    rows = [{"prompt_ids": [1, 2], "response_ids": [3, 4]}, {"prompt": "a", "response": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm") or name.startswith("transformers.models.qwen3"):
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
from rti_jax.score import score
sys.exit(score({str(folders / "tied")!r}, {str(tmp_path / "rows.jsonl")!r}, {str(tmp_path / "out.jsonl")!r}))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = ReferenceModel(folders / "tied").logprobs([1, 2], [3, 4])
    np.testing.assert_allclose(results[0]["logprobs"], expected, atol=1e-4)
    assert results[1]["tokens"] == 1
