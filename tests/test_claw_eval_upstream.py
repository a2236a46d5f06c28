"""Claw-Eval's own tasks (commit 9365e1a) through our adapter; needs a checkout, which CLAW_EVAL_ROOT names."""

import asyncio
import collections
import contextlib
import os
import socket

import pytest

from envs.base import AssistantTurn, ToolCall

if not os.environ.get("CLAW_EVAL_ROOT"):
    pytest.skip("CLAW_EVAL_ROOT names no checkout of Claw-Eval", allow_module_level=True)
pytest.importorskip("fastapi", reason="mock services need fastapi (extra claw-eval)")

from envs.claw_eval import ClawEval, ClawEvalConfig, judge, services
from envs.claw_eval import checkout as checkouts
from envs.claw_eval import evidence as evidence_lib

ROOT = os.environ["CLAW_EVAL_ROOT"]
READING = {"list", "get", "search", "find", "read", "extract", "fetch"}
WRONG_FIXTURES = {"T012", "T014", "T016", "T018", "T020", "T022", "T024", "T028"}
WRONG_KEYS = {"T031zh", "T032", "T039zh", "T040", "T041zh", "T042"}
TICKETS = [f"TK-10{i:02}" for i in range(1, 11)]
TRIAGE = [  # reads all tickets, updates three
    [("helpdesk_list_tickets", {})],
    [("helpdesk_get_ticket", {"ticket_id": i}) for i in TICKETS],
    [("helpdesk_update_ticket", {"ticket_id": i, "priority": "urgent", "tags": ["crm"]}) for i in TICKETS[:3]],
]


def config(**keys):
    return ClawEvalConfig(root=ROOT, clock="2026-03-02T09:00:00+00:00", **keys)


def tasks(split="all", **keys):
    return ClawEval.tasks(config(**keys), split)


def task(start):
    return next(t for t in tasks() if t.id.startswith(f"{start}_"))


@contextlib.asynccontextmanager
async def started(of, score, **keys):
    env = ClawEval(config(**keys), 50, judge.ConstantAnswers(score))
    try:
        await env.reset(of)
        yield env
    finally:
        await env.close()


async def play(of, score, turns, **keys):
    """Plays lists of calls, then says ok; returns (outcome, dispatches)."""
    async with started(of, score, **keys) as env:
        for n, turn in enumerate(turns(env) if callable(turns) else turns):
            if not env.done:
                made = (ToolCall(name, arguments, f"c{n}_{i}") for i, (name, arguments) in enumerate(turn))
                await env.step(AssistantTurn("", tuple(made)))
        if not env.done:
            await env.step(AssistantTurn("ok"))
        return await env.score(), env.dispatches


def reading(env):
    """One call of each tool that reads, its required arguments filled in."""
    values = {"string": "2026-03-01", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    turns = []
    for tool in env._entry.definition.tools:
        if READING & set(tool.name.split("_")):
            properties, needed = tool.input_schema.get("properties", {}), tool.input_schema.get("required") or []
            turns.append([(tool.name, {k: values.get(properties.get(k, {}).get("type"), "x") for k in needed})])
    return turns


def all_at_once(score, turns, at_once=16, **keys):
    async def run():
        slots = asyncio.Semaphore(at_once)

        async def one(of):
            async with slots:
                return of.id, *await play(of, score, turns, **keys)

        return await asyncio.gather(*(one(t) for t in tasks()))

    return asyncio.run(run())


class TestTasks:
    def test_126_can_be_played_without_docker_and_web(self):
        found = tasks()
        assert len(found) == 126 and collections.Counter(t.kind for t in found) == {
            "easy": 40,
            "medium": 46,
            "hard": 40,
        }
        assert len({t.data["family"] for t in found}) == 74
        assert [t.id[:3] for t in tasks("multi_turn")] == ["C01", "C16"]
        assert checkouts.load(ROOT).commit[:7] == "9365e1a"

    def test_twins_share_a_family_and_a_grader_comes_from_one(self):
        families = collections.defaultdict(set)
        for t in tasks():
            families[t.data["family"]].add(t.id)
        assert collections.Counter(map(len, families.values())) == {2: 52, 1: 22}

    def test_splits_part_families(self, tmp_path):
        subset = tmp_path / "hard.txt"
        subset.write_text("\n".join(t.id for t in tasks()[::6][:20]))
        ids = {s: ClawEval.tasks(config(subset=str(subset)), s) for s in ("hard20_id", "rest_ood", "full")}
        hard, rest = ({t.data["family"] for t in ids[s]} for s in ("hard20_id", "rest_ood"))
        assert len(ids["hard20_id"]) == 20 and not hard & rest and len(hard | rest) == 74
        assert ids["full"] == [*ids["hard20_id"], *ids["rest_ood"]]

    def test_evidence_stays_within_its_budget(self):
        checkout = checkouts.load(ROOT)
        for t in tasks():
            entry = checkout.tasks()[t.id]
            whole, short = (evidence_lib.evidence(checkout, entry, n) for n in (20000, 1500))
            assert entry.definition.reference_solution.strip().splitlines()[0] in whole.text and len(short.text) <= 1500
            assert all(v in whole.text for v in whole.values)


class TestT018:
    """The scores of the official path under a constant judge, measured with its own services and loop."""

    @pytest.mark.parametrize(
        ("score", "turns", "wanted"), [(0.9, TRIAGE, 0.768), (0.2, TRIAGE, 0.544), (0.9, [], 0.488)]
    )
    @pytest.mark.parametrize("repair", [False, True])
    def test_scores(self, score, turns, wanted, repair):
        outcome, _ = asyncio.run(play(task("T018"), score, turns, repair=repair))
        assert outcome.info["task_score"] == wanted and outcome.reward == float(wanted >= 0.75)

    def test_closing_a_ticket_is_worth_nothing(self):
        close = [[("helpdesk_close_ticket", {"ticket_id": "TK-1010", "resolution": "asked for"})]]
        outcome, _ = asyncio.run(play(task("T018"), 1.0, [*TRIAGE, *close]))
        assert outcome.info["task_score"] == 0.0

    def test_repaired_it_speaks_english(self):
        for repair, english in ((False, False), (True, True)):
            _, dispatches = asyncio.run(play(task("T018"), 0.0, TRIAGE, repair=repair))
            assert ("Unable to log into CRM" in str(dispatches[0].response_body)) == english


class TestAll:
    @pytest.mark.slow
    def test_16_at_once_are_played_and_graded(self):
        outcomes = all_at_once(0.0, reading)
        assert len(outcomes) == 126 and not sum(o.reward for _, o, _ in outcomes)
        assert all(0.0 <= o.info["task_score"] <= 0.75 for _, o, _ in outcomes)
        faults = {"fixtures": set(), "audit keys": set()}
        for i, outcome, _ in outcomes:
            if fault := outcome.info.get("upstream_faults"):
                faults[fault].add(i.split("_")[0])
        assert faults == {"fixtures": WRONG_FIXTURES, "audit keys": WRONG_KEYS}
        pool = services.pool(checkouts.load(ROOT), config().instances)
        assert not any(lent for _, lent in pool.counts().values()) and sum(i for i, _ in pool.counts().values()) < 160

    @pytest.mark.slow
    def test_16_at_once_see_and_score_what_they_do_alone(self):
        async def alone():
            return [(t.id, *await play(t, 1.0, reading)) for t in tasks()]

        def seen(outcomes):
            return {i: (o, [(d.tool_name, d.response_status, d.response_body) for d in ds]) for i, o, ds in outcomes}

        first, together = seen(asyncio.run(alone())), seen(all_at_once(1.0, reading))
        assert first == together
        assert sum(o.reward for o, _ in first.values()) == 32  # read much, say ok, and have a kind judge

    def test_a_used_instance_answers_as_a_fresh_one(self):
        checkout = checkouts.load(ROOT)

        async def answers(entry, fresh):
            wanted, found = [], []
            for service in entry.definition.services:
                server = services.server(checkout, checkout.script(service))
                assert server.pointable, server.path
                variables = checkout.environment(entry, service)
                clock = services.clock(config().clock)
                made = services.Wanted(server, variables, server.settings(variables), service.reset_endpoint, clock)
                wanted.append(made)
            pool = services.Pool(9) if fresh else services.pool(checkout, config().instances)
            taken = await pool.take(wanted, 10.0)
            for service, instance in zip(entry.definition.services, taken, strict=True):
                for tool in entry.definition.tool_endpoints:
                    if f":{service.port}/" in tool.url and READING & set(tool.tool_name.split("_")):
                        found.append((await instance.request("POST", tool.url, {}, 10.0)).text)
                audit = service.reset_endpoint.replace("/reset", "/audit")
                found.append(len((await instance.request("GET", audit, None, 10.0)).json()["calls"]))
            await pool.give_back(wanted, taken, 10.0)
            return found

        async def compare():
            for t in tasks()[::9]:
                entry = checkout.tasks()[t.id]
                assert await answers(entry, fresh=False) == await answers(entry, fresh=True), t.id

        asyncio.run(compare())


class Provider:
    """In place of the benchmark's model: plays a script."""

    model_id = "script"

    def __init__(self, models, turns):
        self.models, self.turns = models, [*turns, None]

    def chat(self, messages, tools=None):
        turn = self.turns.pop(0)
        text = [self.models.TextBlock(text="ok")] if turn is None else []
        used = [self.models.ToolUseBlock(id=f"u{i}", name=n, input=a) for i, (n, a) in enumerate(turn or [])]
        return self.models.Message(role="assistant", content=[*text, *used]), self.models.TokenUsage()


class Constant:
    def __init__(self, checkout, score):
        result = checkout.module("graders.llm_judge").JudgeResult
        self.evaluate = self.evaluate_actions = lambda *_, **__: result(score=score, reasoning="constant")


def free(ports):
    for port in ports:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def official(checkout, entry, turns, score, folder):
    """The score of the benchmark's own loop with services in processes of their own."""
    definition = checkout.module("models.task").TaskDefinition.from_yaml(entry.folder / "task.yaml")
    ports = [s.port for s in definition.services]
    definition.apply_port_offset(next(o for o in range(11000, 40000, 50) if free(p + o for p in ports)))
    with checkout.module("runner.services").ServiceManager(definition.services, cwd=checkout.root):
        prompt, script = checkout.module("config").PromptConfig(), Provider(checkout.module("models"), turns)
        trace = checkout.module("runner.loop").run_task(definition, script, folder, prompt_cfg=prompt)
    _, messages, dispatches, _, _, audit = checkout.module("trace.reader").load_trace(trace)
    grader = checkout.module("graders.registry").get_grader(entry.id, checkout.root / "tasks", entry.folder)
    scores = grader.grade(messages, dispatches, definition, audit_data=audit, judge=Constant(checkout, score))
    return checkout.module("models").compute_task_score(scores)


@pytest.mark.slow
class TestOfficialPath:
    @pytest.mark.parametrize(("score", "turns"), [(0.9, TRIAGE), (0.2, TRIAGE), (0.9, [])])
    def test_t018(self, score, turns, tmp_path):
        checkout = checkouts.load(ROOT)
        theirs = official(checkout, checkout.tasks()[task("T018").id], turns, score, tmp_path)
        ours, _ = asyncio.run(play(task("T018"), score, turns))
        assert ours.info["task_score"] == theirs

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("start", ["T003zh", "T032", "T042", "T075", "T086", "T106", "T144"])
    @pytest.mark.parametrize("score", [0.3, 0.9])
    def test_reading_play(self, start, score, tmp_path):
        checkout, of = checkouts.load(ROOT), task(start)

        async def turns():
            async with started(of, score) as env:
                return reading(env)

        script = asyncio.run(turns())
        ours, _ = asyncio.run(play(of, score, script))
        assert ours.info["task_score"] == official(checkout, checkout.tasks()[of.id], script, score, tmp_path)
