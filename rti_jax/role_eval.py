"""`rti eval CONFIG --roles`: how well a policy plays validator, corrector and verifier, on its own turns.

Every held-out task is played by the policy, at the rollout temperature, and the roles are asked what an intervened
rollout asks them. Truth comes from the environment: a turn is valid if and only if the scripted expert can still
succeed from the state after it, in the turns left. After an invalid turn the expert's is played instead, so that every
state that is judged can still be won.

  validator   on every turn: precision, recall and balanced accuracy of "invalid"
  corrector   on every turn that the validator flagged and that is invalid: the episode can be won after its rewrite,
              and the rewrite reveals nothing; perplexity of those under the rollout prompt
  verifier    at every invalid turn: the corrector's own rewrite, the expert's turn (to be accepted), and one turn of
              each kind of fault (to be rejected); leaking kinds apart. The leak guard's share is counted apart
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from envs.base import AssistantTurn, Environment, Evidence, Task
from rti_jax import intervention, leakage
from rti_jax.chat import ParsedTurn
from rti_jax.config import ConfigError
from rti_jax.limits import run_bounded
from rti_jax.own_turns import expert_turn
from rti_jax.roles import Roles
from rti_jax.rollout import Player, Seat, TurnView
from rti_jax.statistics import Estimate, ratio_interval
from rti_jax.supervised import Supervised
from rti_jax.types import ROLES, Turn

STREAM = "roles"  # random stream of its own
OWN, EXPERT = "own", "expert"  # sources of a rewrite that a verifier reads; the others are kinds of fault


@dataclasses.dataclass(frozen=True)
class Judged:
    """A rewrite before the verifier: what it is, and what was said of it."""

    source: str  # OWN, EXPERT, or a kind of fault
    text: str
    wins: bool  # the episode can be won after it
    reveals: str | None  # what it reveals, None if nothing
    accepted: bool  # by the verifier
    guarded: bool  # rejected by the leak guard
    verdict: str

    @property
    def clean(self) -> bool:
        """Whether it should be accepted."""
        return self.wins and self.reveals is None


@dataclasses.dataclass(frozen=True)
class JudgedTurn:
    """One turn of the policy: the truth about it, and what each role made of it."""

    task_id: str
    kind: str
    turn_id: str
    text: str
    valid: bool
    flagged: bool
    readable: bool
    verdict: str
    correction: Judged | None = None
    malformed: bool = False  # the correction could not be played, or was the same turn
    perplexity: float | None = None  # of the correction under the rollout prompt
    rewrites: tuple[Judged, ...] = ()
    history: tuple[tuple[int, ...], ...] = ()  # ids of the turns that were played before it
    ids: tuple[int, ...] = ()  # of the turn itself


def check(environment: type[Environment]) -> None:
    """Raises ConfigError for an environment that cannot tell whether an episode can still be won."""
    if environment.valid is Environment.valid or environment.expert is Environment.expert:
        raise ConfigError(
            f"the roles cannot be measured on {environment.__name__}: it has no scripted expert, so nothing tells "
            "which turns are right; give it expert() and valid() (envs/base.py)"
        )


class Recorded(Protocol):
    """A turn of an earlier measurement, as `read_turns` or `measure` gives it."""

    task_id: str
    history: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]


def read_turns(path: pathlib.Path) -> list[Recorded]:
    """The turns of a measurement's JSONL file. Raises ConfigError for another file."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            types.SimpleNamespace(
                task_id=line["task_id"], history=tuple(map(tuple, line["history"])), ids=tuple(line["ids"])
            )
            for line in lines
        ]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"--turns {path}: not the .jsonl that `rti eval --roles` writes beside its JSON") from error


async def measure(
    player: Player,
    roles: Roles,
    score: intervention.Score,
    tasks: Sequence[Task],
    *,
    step: int = 0,
    numbers: Sequence[int] | None = None,
    recorded: Sequence[Recorded] = (),
    on_episode: Callable[..., None] | None = None,
) -> tuple[dict[str, Any], list[JudgedTurn]]:
    """Plays each task once and asks the roles; returns (what `summarize` returns, every judged turn).

    Args:
      score: the learner's scorer, for perplexities.
      step: names the random stream. numbers: of the tasks among all hosts'; None counts from 0.
      recorded: judge these turns of an earlier measurement instead of playing: what has changed then are the roles,
        not what they see.

    Raises:
      ConfigError: the environment cannot tell whether an episode can still be won.
    """
    check(player.source.cls)
    rows: list[tuple[JudgedTurn, tuple[int, ...], tuple[int, ...]]] = []
    by_id = {t.id: t for t in tasks}
    if unknown := [r.task_id for r in recorded if r.task_id not in by_id]:
        raise ConfigError(
            f"--turns: task {unknown[0]} is none of the tasks here; give the env keys of that measurement"
        )

    async def replay(index: int, turn: Recorded) -> list:
        seat = Seat(player.config.seed, step, f"{STREAM}/{index}", 0)
        examined = await _examine_again(player, roles, turn, by_id[turn.task_id], seat)
        if on_episode:
            on_episode()
        return examined

    async def play(index: int, task: Task) -> list:
        seat = Seat(player.config.seed, step, f"{STREAM}/{step}/{index}", 0)
        examiners: list[Examiner] = []

        def reviser(environment: Environment) -> Examiner:
            examiners.append(Examiner(environment, task, seat, roles))
            return examiners[-1]

        trajectory = await player.play(task, seat, reviser=reviser)
        if on_episode:
            on_episode(trajectory)
        return examiners[-1].rows if examiners else []

    jobs = [
        lambda i=i, t=t: (replay if recorded else play)(i, t)
        for i, t in zip(numbers or itertools.count(), recorded or tasks, strict=False)
    ]
    for episode in await run_bounded(jobs, player.concurrency):
        rows += episode
    scored = [i for i, (_, _, ids) in enumerate(rows) if ids]
    values = await score([rows[i][1:] for i in scored]) if scored else ()
    turns = [row for row, _, _ in rows]
    for i, logprobs in zip(scored, values, strict=True):
        turns[i] = dataclasses.replace(turns[i], perplexity=float(np.exp(-np.mean(logprobs))))
    return summarize(turns, player.config.seed), turns


async def _examine_again(player: Player, roles: Roles, turn: Recorded, task: Task, seat: Seat) -> list:
    """Brings an episode to the state of a recorded turn, and asks the roles about it; rows of an `Examiner`."""
    environment, chat = player.source.make(), player.chat
    supervised = Supervised(environment, player.config.rollout.step_timeout)
    start = await supervised.reset(task)
    prompt, tools = chat.start(start.messages, start.tools), tuple(start.tools)
    messages, written = list(start.messages), list(start.messages)
    for ids in turn.history:
        parsed = chat.parse(prompt, ids, tools)
        result = await supervised.step(parsed.turn)
        written.append(parsed.as_written())
        prompt = chat.extend(prompt, ids, result.messages, tools, written)
        messages += [parsed.as_message(), *result.messages]
        written += result.messages
    view = TurnView(f"{seat.id}/{len(turn.history)}", len(turn.history), prompt, tuple(messages), tools)
    played = Turn(view.turn_id, prompt, turn.ids, (0.0,) * len(turn.ids), "stop", 0)
    examiner = Examiner(environment, task, seat, roles, turn.history)
    await examiner(view, played, chat.parse(prompt, turn.ids, tools))
    await environment.close()
    return examiner.rows


class Examiner:
    """Asks the roles about each turn of one episode; plays the policy's turn if it is valid, else the expert's."""

    def __init__(
        self,
        environment: Environment,
        task: Task,
        seat: Seat,
        roles: Roles,
        history: tuple[tuple[int, ...], ...] = (),
    ):
        self._history = history
        self.rows: list[tuple[JudgedTurn, tuple[int, ...], tuple[int, ...]]] = []  # with the row to be scored
        self._env, self._task, self._seat, self._roles = environment, task, seat, roles

    async def __call__(self, view: TurnView, turn: Turn, parsed: ParsedTurn) -> tuple[Turn, ParsedTurn]:
        env, roles = self._env, self._roles
        await env.foresee(parsed.turn)
        gold, valid = env.expert(), env.valid(parsed.turn)
        evidence, rules = env.evidence(), env.role_rules()
        seed = self._seat.seed_of(view.index, "validator")
        verdict = await roles.validate(view, evidence, rules, parsed.text, seed)
        row = JudgedTurn(
            self._task.id,
            self._task.kind,
            view.turn_id,
            parsed.text,
            valid,
            verdict.flagged,
            verdict.readable,
            verdict.text,
            history=self._history,
            ids=turn.response_ids,
        )
        scored: tuple[int, ...] = ()
        if not valid:
            row, scored = await self._correct(row, view, parsed, verdict.reason, evidence, rules)
            row = dataclasses.replace(row, rewrites=await self._faults(view, parsed, gold, evidence, rules))
            turn, parsed = expert_turn(gold, view, turn, roles.chat)
        self.rows.append((row, view.prompt_ids, scored))
        self._history = (*self._history, turn.response_ids)
        return turn, parsed

    async def _correct(self, row: JudgedTurn, view, parsed, reason: str, evidence, rules):
        """The corrector and, on its rewrite, the verifier, as in an intervened rollout."""
        if not row.flagged:
            return row, ()
        seed = self._seat.seed_of(view.index, "corrector/0")
        new = await self._roles.correct(view, evidence, rules, parsed.text, reason, seed)
        if new.parsed.malformed or new.parsed.text == parsed.text:
            return dataclasses.replace(row, malformed=True), ()
        judged = await self._judge(OWN, view, parsed, new.parsed.text, new.parsed.turn, evidence, rules)
        return dataclasses.replace(row, correction=judged), new.response_ids if judged.clean else ()

    async def _faults(self, view, parsed, gold: AssistantTurn, evidence, rules) -> tuple[Judged, ...]:
        """The verifier on the expert's turn and on a turn of each kind of fault."""
        rng = random.Random(self._seat.seed_of(view.index, "faults"))
        rewrites = {EXPERT: gold} | dict(self._env.faults(rng))
        judged = []
        for source, rewrite in rewrites.items():
            text = self._roles.chat.decode(self._roles.chat.encode_turn(rewrite)[:-1])
            if text != parsed.text:
                judged.append(await self._judge(source, view, parsed, text, rewrite, evidence, rules))
        return tuple(judged)

    async def _judge(
        self, source: str, view, parsed: ParsedTurn, text: str, rewrite: AssistantTurn, evidence: Evidence, rules: str
    ) -> Judged:
        seed = self._seat.seed_of(view.index, f"verifier/{source}")
        await self._env.foresee(rewrite)
        rejected, verdict = await self._roles.verify(view, evidence, rules, parsed.text, text, seed)
        visible = intervention.visible_text(self._roles.chat, view, parsed, self._env)
        return Judged(
            source=source,
            text=text,
            wins=bool(self._env.valid(rewrite)),
            reveals=self._env.reveals(rewrite),
            accepted=rejected is None,
            guarded=bool(leakage.leaks(text, evidence.values, visible, evidence.text)),
            verdict=verdict,
        )


def summarize(turns: Sequence[JudgedTurn], seed: int = 0) -> dict[str, Any]:
    """Rates of each role with 95% bootstrap intervals over tasks, and `n`, what they are rates of.

    An estimate is {"mean", "low", "high", "n"}; nulls where there is nothing to count.
    """

    def rate(*parts: tuple[Callable[[Any], bool], Sequence[tuple[str, Any]]]) -> dict[str, Any]:
        """Mean over parts of the share of its items that satisfy its condition."""
        tasks = {task: i for i, task in enumerate(dict.fromkeys(task for _, items in parts for task, _ in items))}
        counts = np.zeros((2, len(parts), len(tasks)))
        for j, (condition, items) in enumerate(parts):
            for task, item in items:
                counts[:, j, tasks[task]] += condition(item), 1
        return _plain(ratio_interval(*counts, seed=seed), int(counts[1].sum()))

    named = [(t.task_id, t) for t in turns]
    valid, invalid = ([(k, t) for k, t in named if t.valid == truth] for truth in (True, False))
    flagged, passed = (lambda t: t.flagged), (lambda t: not t.flagged)
    caught = [(k, t) for k, t in invalid if t.flagged]
    attempted = [(k, t.correction) for k, t in caught]
    own = [(k, c) for k, c in attempted if c]
    rewrites = [(k, j) for k, t in invalid for j in t.rewrites] + own
    clean, bad = ([(k, j) for k, j in rewrites if j.clean == truth] for truth in (True, False))
    leaking = [(k, j) for k, j in bad if j.reveals]
    accepted, stands = (lambda j: j.accepted), (lambda j: j.accepted and not j.guarded)
    kinds = collections.defaultdict(list)
    for k, j in rewrites:
        kinds[_kind(j)].append((k, j))
    perplexities = [t.perplexity for t in turns if t.perplexity is not None]
    return {
        "turns": len(turns),
        "validator": {
            "balanced_accuracy": rate((flagged, invalid), (passed, valid)),
            "recall": rate((flagged, invalid)),
            "specificity": rate((passed, valid)),
            "precision": rate((lambda t: not t.valid, [(k, t) for k, t in named if t.flagged])),
            "readable": rate((lambda t: t.readable, named)),
        },
        "corrector": {
            "success": rate((lambda c: c is not None and c.clean, attempted)),
            "reveals": rate((lambda c: c is not None and c.reveals is not None, attempted)),
            "perplexity": {
                "median": float(np.median(perplexities)) if perplexities else None,
                "mean": float(np.mean(perplexities)) if perplexities else None,
                "n": len(perplexities),
            },
        },
        "verifier": {
            "true_accept": rate((accepted, clean)),
            "false_accept": rate((accepted, bad)),
            "false_accept_leaking": rate((accepted, leaking)),
            "false_accept_leaking_after_guard": rate((stands, leaking)),
            "true_accept_own": rate((accepted, [(k, c) for k, c in own if c.clean])),
            "accept_by_kind": {kind: rate((accepted, items)) for kind, items in sorted(kinds.items())},
        },
    }


def _kind(judged: Judged) -> str:
    """Kinds of fault by their names; the corrector's own by what is wrong with them."""
    if judged.source != OWN:
        return judged.source
    return f"{OWN}: {'clean' if judged.clean else judged.reveals or 'does not win'}"


def _plain(estimate: Estimate, n: int) -> dict[str, Any]:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "n": n}


def metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The main rates as metrics `roles/...`; a rate of nothing is absent."""
    picked = {
        f"roles/{role}_{name}": summary[role][name]["mean"]
        for role, names in (
            ("validator", ("balanced_accuracy", "recall", "specificity")),
            ("corrector", ("success", "reveals")),
            ("verifier", ("true_accept", "false_accept", "false_accept_leaking")),
        )
        for name in names
    } | {"roles/corrector_perplexity": summary["corrector"]["perplexity"]["median"]}
    return {name: value for name, value in picked.items() if value is not None}


def table(summary: Mapping[str, Any]) -> Table:
    """The rates in percent, with intervals and counts."""
    out = Table("role", "measure", "percent", "of")
    for role in ROLES:
        flat = {k: v for k, v in summary[role].items() if "mean" in v and "low" in v}
        flat |= {f"accepts {k}": v for k, v in summary[role].get("accept_by_kind", {}).items()}
        for i, (name, value) in enumerate(flat.items()):
            text = (
                "-"
                if value["mean"] is None
                else "{mean:.1f}  [{low:.1f}, {high:.1f}]".format(
                    **{k: 100 * value[k] for k in ("mean", "low", "high")}
                )
            )
            out.add_row("" if i else role, name.replace("_", " "), text, str(value["n"]))
    return out
