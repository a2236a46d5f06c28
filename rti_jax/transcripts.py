"""Transcripts for warm starts: a scripted expert's turns and the three roles' answers, as token rows.

A transcript is made the way a rollout is (rti_jax.chat, rti_jax.roles), so its ids are the ids that the engine will
see. Four kinds:

  agent      an episode of a task whose places have unique names, played by the expert; every turn is trained
  validator  h_t, evidence and a proposed turn -> which lines of the evidence its arguments are (`check`), the expected
             call, then the verdict: "invalid" if and only if the expert can no longer succeed after the proposed turn
  corrector  ... and the validator's reason -> the expert's turn; a share of them leaks or fabricates on purpose, so
             that the post-check has something to catch
  verifier   ... and a replacement, clean, wrong or leaking -> the verdict

The turns that the roles judge are scripted (the expert's, the agent's habit, mistakes of known kinds), or the policy's
own (rti_jax/own_turns.py).

The agent is not taught the hard tasks, unless `hard_share` asks for it: it searches by name, whether or not the
request names the region, but for a few searches in a hundred (`RARE_HABIT`), as a real policy's rare good habits are.
Without it reinforcement would first raise the region everywhere, also where the request names none.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from envs.base import AssistantTurn, Task, ToolCall
from envs.navigation.environment import Navigation
from envs.navigation.mistakes import Mistakes, search_turn
from rti_jax.chat import Chat
from rti_jax.own_turns import OwnTurn
from rti_jax.roles import RolePrompts
from rti_jax.supervised import Supervised

SECONDS = 60.0  # of a set-up or a turn
RARE_HABIT = 0.03  # of the agent's searches name the region if the request does
EXPERT_SHARE = 0.45  # of the scripted turns that a validator sees
HABIT_SHARE = 0.2  # ... the agent's habit, no region; the rest are mistakes
WRONG_SHARE, LEAK_SHARE = 0.35, 0.3  # of the rewrites that a verifier sees; the rest is clean
FOREIGN_SHARE = 0.12  # of the contexts whose evidence is another task's, so that the roles go by it and by nothing else


class Row(NamedTuple):
    """One transcript: ids and the loss weight of each (that of the first is never used)."""

    kind: str
    ids: np.ndarray
    weights: np.ndarray


class Context(NamedTuple):
    """The state that a role judges: h_t with its weights, the environment in that state, and y."""

    env: Navigation
    prompt_ids: tuple[int, ...]
    weights: list[float]
    gold: AssistantTurn
    proposed: AssistantTurn
    text: str  # of the proposed turn, as the roles read it
    valid: bool
    right: AssistantTurn | None = None  # the expert's turn, where the evidence is another task's and so is `gold`


def describe(turn: AssistantTurn) -> str:
    """A call in few tokens: the values of its arguments."""
    values: list[str] = []
    for call in turn.tool_calls:
        for value in (call.arguments or {}).values():
            values += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return " | ".join(values)


def check(turn: AssistantTurn, env: Navigation) -> str:
    """For each name, region, latitude and longitude of a turn the number of its place in the evidence, 0 if of none.

    Said before the verdict, it makes a comparison of texts a matter of looking up one number after another.
    """
    places, expected = env.places, env.gold_coordinates
    call = turn.tool_calls[0] if len(turn.tool_calls) == 1 else None
    if call is None or call.error or not _is_filled(call):
        return "0"
    if call.name == "search_places":
        named, region = call.arguments["keyword"], call.arguments.get("region")
        at = _line(named, [p.name for p in places], 0)
        return f"{at} {'-' if region is None else _line(region, [p.region for p in places], max(0, at - 1))}"
    a = call.arguments
    route = [a["origin"], *a.get("waypoints", []), a["destination"]]
    columns = list(zip(*(c.split(",") for c in expected), strict=True))
    lines = [
        [_line(x, list(column), i) for x, column in zip(c.split(","), columns, strict=True)]
        for i, c in enumerate(route)
    ]
    return " | ".join(" ".join(map(str, numbers)) for numbers in lines)


def _is_filled(call: ToolCall) -> bool:
    """Whether a call of either tool has its arguments as texts; a policy's own may lack or garble them."""
    a = call.arguments
    if call.name == "search_places":
        return isinstance(a.get("keyword"), str) and isinstance(a.get("region", ""), str)
    stops = a.get("waypoints", [])
    route = [a.get("origin"), *(stops if isinstance(stops, list) else [None]), a.get("destination")]
    return call.name == "direction" and all(isinstance(c, str) and c.count(",") == 1 for c in route)


def _line(value: str, column: Sequence[str], preferred: int) -> int:
    """1-based place of `value` in the column, the preferred one if several hold it, 0 if none does."""
    if preferred < len(column) and column[preferred] == value:
        return preferred + 1
    return column.index(value) + 1 if value in column else 0


class Transcripts:
    """An endless, seeded stream of rows.

    Args:
      tasks: easy and hard tasks of Navigation.
      shares: relative numbers of each kind of transcript. leak_share: of correctors that are told to conceal.
      text_weight: loss weight of text that the assistant did not write.
      hard_share: of the agent's transcripts that are hard tasks, played as the expert plays them (a teacher, or a
        baseline of supervised fine-tuning).
      own: turns of the policy itself. own_share: of the turns that the roles judge that are drawn from them.
    """

    def __init__(
        self,
        env: Navigation,
        tasks: Sequence[Task],
        chat: Chat,
        *,
        style: str,
        shares: dict[str, float],
        leak_share: float,
        text_weight: float,
        seed: int,
        hard_share: float = 0.0,
        own: Sequence[OwnTurn] = (),
        own_share: float = 0.0,
    ):
        self._env, self._chat, self._style = env, chat, style
        self._played = Supervised(env, SECONDS)  # as a rollout drives it
        self._easy = [t for t in tasks if t.kind == "easy"]
        self._hard = [t for t in tasks if t.kind == "hard"]
        self._kinds, self._shares = list(shares), list(shares.values())
        self._leak_share, self._text_weight, self._hard_share = leak_share, text_weight, hard_share
        self._own, self._own_share = own, own_share if own else 0.0
        self._rng = random.Random(f"transcripts/{seed}")

    def __iter__(self) -> Iterator[Row]:
        makers = {k: getattr(self, f"_{k}") for k in self._kinds}
        with asyncio.Runner() as runner:
            while True:
                kind = self._rng.choices(self._kinds, self._shares)[0]
                ids, weights = runner.run(makers[kind]())
                yield Row(kind, np.asarray(ids, np.int32), np.asarray(weights, np.float32))

    async def _agent(self) -> tuple[list[int], list[float]]:
        hard = bool(self._hard_share) and self._rng.random() < self._hard_share
        start = await self._played.reset(self._rng.choice(self._hard if hard else self._easy))
        prompt = self._chat.start(start.messages, start.tools)
        weights = [self._text_weight] * len(prompt)
        while (turn := self._env.expert()) is not None:
            played = turn if hard else self._habit(turn)
            prompt, weights, done = await self._extend(prompt, weights, played, start.tools, 1.0)
            if done:
                break
        return list(prompt), weights

    def _habit(self, turn: AssistantTurn) -> AssistantTurn:
        """The expert's turn; rarely with the region that the request names."""
        arguments = turn.tool_calls[0].arguments
        place = next((p for p in self._env.places if p.name == arguments.get("keyword")), None)
        if place and place.region in self._env.request and self._rng.random() < RARE_HABIT:
            return search_turn(place.name, place.region)
        return turn

    async def _extend(self, prompt, weights, turn: AssistantTurn, tools, weight: float):
        """Plays a turn; the prompt that follows it (or the end of the episode), its weights, and whether it ended."""
        ids = self._chat.encode_turn(turn)
        result = await self._played.step(turn)
        weights = [*weights, *[weight] * len(ids)]
        if result.done:
            return (*prompt, *ids), weights, True
        longer = self._chat.extend(prompt, ids, result.messages, tools)
        return longer, [*weights, *[self._text_weight] * (len(longer) - len(weights))], False

    async def _context(self) -> Context:
        """A state and a proposed turn."""
        own = self._rng.random() < self._own_share
        context = await (self._own_context() if own else self._scripted_context())
        return await self._misled(context) if self._rng.random() < FOREIGN_SHARE else context

    async def _misled(self, context: Context) -> Context:
        """The same with the evidence of another task, which nothing in the conversation agrees with."""
        other = type(self._env)(self._env.config, self._env.max_turns)
        played = Supervised(other, SECONDS)
        await played.reset(self._task())
        while other.request == context.env.request:
            await played.reset(self._task())
        return context._replace(env=other, gold=other.expert(), right=context.gold, valid=False)

    async def _own_context(self) -> Context:
        """A state that the policy came to, and what it did there."""
        own, env = self._rng.choice(self._own), self._env
        start = await self._played.reset(own.task)
        prompt = self._chat.start(start.messages, start.tools)
        weights = [self._text_weight] * len(prompt)
        for ids in own.history:
            result = await self._played.step(self._chat.parse(prompt, ids, start.tools).turn)
            longer = self._chat.extend(prompt, ids, result.messages, start.tools)
            weights += [0.0] * len(ids)
            prompt, weights = longer, weights + [self._text_weight] * (len(longer) - len(weights))
        parsed = self._chat.parse(prompt, own.ids, start.tools)
        return Context(env, prompt, weights, env.expert(), parsed.turn, parsed.text, env.valid(parsed.turn))

    async def _scripted_context(self) -> Context:
        """A state on the expert's path, and the expert's turn, the habit's or a mistake."""
        rng, env = self._rng, self._env
        start = await self._played.reset(self._task())
        prompt = self._chat.start(start.messages, start.tools)
        weights = [self._text_weight] * len(prompt)
        gold = env.expert()
        for _ in range(rng.randint(0, len(env.places))):
            if gold.tool_calls[0].name == "direction":
                break  # the last turn
            prompt, weights, _ = await self._extend(prompt, weights, gold, start.tools, 0.0)
            gold = env.expert()
        proposed = self._propose(gold)
        return Context(env, prompt, weights, gold, proposed, self._text(proposed), env.valid(proposed))

    def _task(self) -> Task:
        return self._rng.choice(self._hard if self._rng.random() < 0.6 else self._easy)

    def _propose(self, gold: AssistantTurn) -> AssistantTurn:
        draw = self._rng.random()
        if draw < EXPERT_SHARE:
            return gold
        arguments = gold.tool_calls[0].arguments
        if "region" in arguments and draw < EXPERT_SHARE + HABIT_SHARE:
            return search_turn(arguments["keyword"])
        return Mistakes(self._env, self._rng).wrong(gold)[1]

    async def _invalid_context(self) -> Context:
        while True:
            context = await self._context()
            if not context.valid:
                return context

    async def _validator(self):
        c = await self._context()
        answer = {
            "check": check(c.proposed, c.env),
            "expected": describe(c.gold),
            "verdict": "valid" if c.valid else "invalid",
        }
        return self._role(c, self._prompts().validator(*self._evidence(c), c.env.role_rules()), _json(answer))

    async def _corrector(self):
        c = await self._invalid_context()
        conceal = self._rng.random() < 0.85
        leak_share = self._leak_share if conceal else min(1.0, 3 * self._leak_share)
        leaks = self._rng.random() < leak_share and c.right is None
        leak = Mistakes(c.env, self._rng).leak(c.gold) if leaks else None
        prompts = self._prompts(conceal=conceal)
        text = prompts.corrector(*self._evidence(c), describe(c.gold), c.env.role_rules())
        return self._role(c, text, leak[1] if leak else c.gold)

    async def _verifier(self):
        c = await self._invalid_context()
        verify_leaks = self._rng.random() < 0.85
        draw, mistakes = self._rng.random(), Mistakes(c.env, self._rng)
        replacement, verdict = c.gold, {"verdict": "accept"}
        if c.right is not None:
            if draw < 0.5:
                replacement, verdict = c.right, {"verdict": "reject", "reason": "inconsistent"}
        elif draw < WRONG_SHARE:
            wrong = mistakes.wrong(c.gold)[1]
            if not c.env.valid(wrong):
                replacement, verdict = wrong, {"verdict": "reject", "reason": "inconsistent"}
        elif draw < WRONG_SHARE + LEAK_SHARE:
            replacement = mistakes.leak(c.gold)[1]
            if verify_leaks:
                verdict = {"verdict": "reject", "reason": "leak"}
        evidence, proposed = self._evidence(c)
        prompts = self._prompts(verify_leaks=verify_leaks)
        text = prompts.verifier(evidence, proposed, self._text(replacement), c.env.role_rules())
        return self._role(c, text, _json({"check": check(replacement, c.env), "expected": describe(c.gold)} | verdict))

    def _prompts(self, **switches: bool) -> RolePrompts:
        key = tuple(sorted(switches.items()))
        cache = self.__dict__.setdefault("_prompts_by_switch", {})
        if key not in cache:
            cache[key] = RolePrompts(self._style, **switches)
        return cache[key]

    def _evidence(self, context: Context) -> tuple[str, str]:
        return context.env.evidence().text, context.text

    def _text(self, turn: AssistantTurn) -> str:
        """A turn as the roles read it: without its end token."""
        return self._chat.decode(self._chat.encode_turn(turn)[:-1])

    def _role(self, context: Context, message: str, answer: AssistantTurn | str) -> tuple[list[int], list[float]]:
        prompt = self._chat.ask(context.prompt_ids, message)
        ids = self._chat.encode_text(answer) if isinstance(answer, str) else self._chat.encode_turn(answer)
        kept = len(context.prompt_ids) - len(self._chat.generation_prompt)
        weights = [*context.weights[:kept], *[self._text_weight] * (len(prompt) - kept), *[1.0] * len(ids)]
        return [*prompt, *ids], weights


def _json(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False)
