"""The report: what it shows, of whole, broken and hostile run folders, with nothing from the network."""

import html.parser
import json
import re

import pytest

from rti_jax import charts, report
from rti_jax.config import ConfigError

EVIL = "<script>alert('x')</script>&amp;\""


def estimate(mean):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "tasks": 9}


def make_run(folder, values=(0.1, 0.2, 0.3), evaluations=((0, 0.05), (3, 0.4)), rti=True, config="name: x\n"):
    (folder / "evals").mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as out:
        for step, value in enumerate(values, 1):
            line = {"step": step, "rollout/pre_success": value, "rollout/groups": 4, "rollout/groups_all_failed": 2}
            line |= {"rti/attempts": 2.0, "rti/replaced": 1.0, "rti/rejected_leak": 0.0} if rti else {}
            out.write(json.dumps(line) + "\n")
    for step, mean in evaluations:
        kinds = {k: {"tasks": 9, "excluded": 0, "pass@1": estimate(mean)} for k in ("all", "easy", "hard")}
        (folder / "evals" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "kinds": kinds}))
    (folder / "config.yaml").write_text(config)
    return folder


class Tags(html.parser.HTMLParser):
    """Checks that elements are closed in order; collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_shows_scores_curves_ledger_and_config(tmp_path):
    path = report.main([make_run(tmp_path / "quick")])
    assert path == tmp_path / "quick" / "report.html"
    text = path.read_text()
    page = Tags(text)
    assert "5.0 [-5.0, 15.0]" in text and "40.0 [30.0, 50.0]" in text  # before and after, percent with interval
    assert {"quick, step 0", "quick, step 3"} <= set(page.texts)
    assert "held-out Pass@1, hard" in page.texts and "rollout/pre_success" in page.texts
    rows = re.findall(r"<td>([^<]*)</td><td>([^<]*)</td>", text)
    assert ("intervened episodes that were played", "6") in rows
    assert ("failed members that an admitted episode took the place of", "3") in rows
    assert "name: x\n" in page.texts


def test_several_runs_are_compared(tmp_path):
    runs = [make_run(tmp_path / "a" / "rti"), make_run(tmp_path / "b" / "grpo", rti=False)]
    page = Tags(report.main(runs, tmp_path / "out" / "both.html").read_text())
    assert {"rti, step 3", "grpo, step 3"} <= set(page.texts)
    assert page.texts.count("-") >= 1  # the run without intervention has no counters
    same = [runs[0], make_run(tmp_path / "c" / "rti")]
    assert str(tmp_path / "c" / "rti") in report.main(same).read_text()


def test_offline_and_escaped(tmp_path):
    run = make_run(tmp_path / "<b>bold", config=f"name: {EVIL}\n")
    with open(run / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"step": 4, f"rti/{EVIL}": 1.0}) + "\n")
    page = Tags(report.main([run]).read_text())
    assert "script" not in page.tags and "b" not in page.tags and "link" not in page.tags
    outside = [(name, value) for name, value in page.attributes if name in ("src", "href", "onload")]
    assert outside == [] and f"name: {EVIL}\n" in page.texts and f"rti/{EVIL}" in page.texts


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert "no step has been recorded yet" in report.main([tmp_path]).read_text()


def test_partial_and_broken_files(tmp_path):
    run = make_run(tmp_path / "r", evaluations=[(0, 0.1)])
    (run / "evals" / "step_000003.json").write_text('{"step": 3, "kin')
    (run / "evals" / "step_000004.json").write_text("[]")
    with open(run / "metrics.jsonl", "a") as out:
        out.write('{"step": 9, "rollout/pre_')
    (run / "config.yaml").unlink()
    page = Tags(report.main([run]).read_text())
    said = " ".join(page.texts)
    assert "evals/step_000003.json cannot be read" in said and "evals/step_000004.json cannot be read" in said
    assert "config.yaml is missing" in said and "r, step 0" in page.texts


def test_null_metrics_are_gaps(tmp_path):
    run = make_run(tmp_path / "r", values=(0.1, None, 0.3))
    text = report.metric_chart([report.read_run(run)], "rollout/pre_success")
    assert text.count("<circle") == 2


def test_only_a_page_is_overwritten(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for output in (run / "metrics.jsonl", run, tmp_path / "page"):
        with pytest.raises(ConfigError, match=r"--output .* ends in \.html"):
            report.main([run], output)
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n' and not (tmp_path / "page").exists()


def test_folders_that_are_no_run(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        report.main([tmp_path / "nope"])
    with pytest.raises(ConfigError, match="no config.yaml, metrics.jsonl or evals"):
        report.main([tmp_path])


class TestCharts:
    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            (0, 10, [0, 2, 4, 6, 8, 10]),
            (0.1, 0.52, [0.1, 0.2, 0.3, 0.4, 0.5]),
            (-1, 1, [-1, -0.5, 0, 0.5, 1]),
            (0, 3e-7, [0, 1e-7, 2e-7, 3e-7]),
        ],
    )
    def test_ticks_are_round(self, low, high, expected):
        assert charts.ticks(low, high) == pytest.approx(expected, abs=1e-15)

    def test_constant_and_single_points_have_an_axis(self):
        for points in ([(1, 0.0)], [(1, 5.0), (2, 5.0)], [(0, 1e30), (1, 1e30)], [(0, -1e-30), (1, 1e-30)]):
            svg = charts.line_chart({"a": points}, "t")
            assert "nan" not in svg and "inf" not in svg
            Tags(svg)

    def test_higher_is_above(self):
        svg = charts.line_chart({"a": [(0, 0.0), (1, 1.0)]}, "t")
        (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in re.search('points="(.*?)"', svg)[1].split())
        assert x0 < x1 and y0 > y1  # SVG's y grows downwards

    def test_a_legend_of_any_size_stays_above_the_lines(self):
        labels = [f"a rather long label {i}" for i in range(6)]
        svg = charts.line_chart({label: [(0, 0.0), (1, 1.0)] for label in labels}, "a title " * 12)
        legend = [float(re.search(f'y="([0-9.]+)"[^>]*>{label}<', svg)[1]) for label in labels]
        highest = min(float(p.split(",")[1]) for line in re.findall('points="(.*?)"', svg) for p in line.split())
        assert max(legend) < highest and len(set(legend)) > 1
        assert max(float(x) for x in re.findall(r'<text x="([0-9.]+)"[^>]*>a rather', svg)) < charts.WIDTH - 100
        Tags(svg)
