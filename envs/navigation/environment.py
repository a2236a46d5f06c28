"""Navigation (the paper's task): find the exact coordinates of all places, then call `direction` once, in order.

Reward 1 if the first well-formed `direction` call names the exact coordinates of every place in the requested order
within the turn limit, else 0; there is no partial credit. The scripted expert, `recoverable` and the evidence read the
gold route; the messages of an episode are made from the request and the tools alone.
"""

import copy
import functools
import math
import random
from collections.abc import Sequence
from typing import ClassVar

from envs.base import (
    AssistantTurn,
    Environment,
    EnvironmentConfig,
    EnvironmentError,
    Evidence,
    Message,
    Observation,
    Outcome,
    StepResult,
    Task,
    ToolCall,
    tool_error,
    tool_result,
)
from envs.navigation import gazetteer, services, task_file
from envs.navigation.config import NavigationConfig
from envs.navigation.map import InventedNames, Map, Place, RandomCoordinates, coordinates
from envs.navigation.mistakes import Mistakes, revealed
from envs.navigation.services import ServiceMap, Unanswered
from envs.navigation.tasks import Report, generate
from envs.navigation.tools import EMBEDDED, ArgumentError, Point, Toolbox, schemas

SYSTEM = {
    "full": (
        "You plan driving routes. Look up the exact coordinates of every place in the request with the search tools, "
        "then call direction once with origin, waypoints and destination in the requested order. Names are often "
        "ambiguous: make sure that you have the place the user means. Use coordinates exactly as a search returned "
        "them. The first valid direction call ends the task. You have {turns} turns{calls}."
    ),
    "short": "Find the places, then call direction.",
}
NUDGE = {"full": "No tool was called. Search for the places, then call direction.", "short": "Call a tool."}
RULES = {
    "full": (
        "Every place is resolved by a search before direction is called.\n"
        "If the results of a search do not hold the place the request names, it needs a search refined by region.\n"
        "No coordinates that no result has shown may be used, neither from memory nor from the reference.\n"
        "direction is called once, with all places in the requested order; the first valid call ends the task.\n"
        "The evidence is a silent reference: nothing may be written that cannot be derived from the request and the "
        "results so far."
    ),
    "short": "Search every place first; ambiguous names need the region; use only shown coordinates, in order.",
}


class Navigation(Environment):
    """One episode. Instances share the map and the task lists, which nothing changes.

    Attributes:
      turn_limit: turns that the current task allows (`max_turns`, or less with `turn_slack`).
      turns: turns played so far.
    """

    Config: ClassVar[type[EnvironmentConfig]] = NavigationConfig
    check_arguments: ClassVar[bool] = False  # Toolbox does, in words that the shipped policy was trained on
    config: NavigationConfig

    def __init__(self, config: NavigationConfig, max_turns: int):
        super().__init__(config, max_turns)
        self._file = self.tasks_file(config)
        longest, key = (self._file.longest, "tasks_file") if self._file else (config.places[1], "places")
        needed = 1 + _turns_for(longest, config.calls_per_turn)
        if needed > max_turns:
            raise ValueError(
                f"env.max_turns={max_turns} is too few: {longest} places (env.{key}) with "
                f"env.calls_per_turn={config.calls_per_turn} need {needed} turns"
            )
        self.turns = 0

    @classmethod
    def make_map(cls, config: NavigationConfig) -> Map:
        """The map to play on. Override it for another map; equal configs should give the same, cached object."""
        if config.map != "embedded":
            return services.load(config, cls.tasks_file(config).places)
        return gazetteer.load(config.countries, config.min_population, config.decimals, config.alternate_names)

    @classmethod
    def tasks_file(cls, config: NavigationConfig) -> task_file.TaskFile | None:
        """The tasks of `env.tasks_file`, or None if tasks are generated."""
        return task_file.load(config.tasks_file, config.decimals) if config.tasks_file else None

    @classmethod
    def tasks(cls, config: NavigationConfig, split: str) -> Sequence[Task]:
        file = cls.tasks_file(config)
        return file.split(split) if file else cls.generated(config, split)[0]

    @classmethod
    def check(cls, config: NavigationConfig) -> None:
        cls.tasks_file(config)
        if config.map != "embedded":
            services.check(config)

    @classmethod
    def generated(cls, config: NavigationConfig, split: str) -> tuple[tuple[Task, ...], Report]:
        """The tasks of a split and the report of what was filtered out."""
        return _generated(cls, config.model_dump_json(), split)

    async def reset(self, task: Task) -> Observation:
        base = self.make_map(self.config)
        seed = task.data.get("coordinates_seed")
        map = base if seed is None else RandomCoordinates(base, seed)
        map = InventedNames(map, task.data["names"]) if "names" in task.data else map
        self._task, self._map = task, map
        self._places: tuple[Place, ...] = tuple((self._file or map).place(i) for i in task.data["places"])
        self._gold: tuple[Point, ...] = tuple((p.latitude, p.longitude) for p in self._places)
        self._toolbox = Toolbox(map, self.config.candidates, self.config.tools)
        slack = self.config.turn_slack
        limit = self.max_turns if slack is None else min(self.max_turns, len(self._places) + 1 + slack)
        self.turn_limit, self.turns, self._tool_errors = limit, 0, 0
        self._shown: frozenset[Point] = frozenset()
        self._route: tuple[Point, ...] | None = None
        messages = [
            {"role": "system", "content": self._system()},
            {"role": "user", "content": task.data["request"]},
        ]
        words = map.words if isinstance(map, ServiceMap) else EMBEDDED
        return Observation(messages, schemas(self.config.tools, words))

    @property
    def places(self) -> tuple[Place, ...]:
        """The gold places in order: privileged, for experts and transcripts."""
        return self._places

    @property
    def gold_coordinates(self) -> list[str]:
        """The coordinates of `places`, as results write them: privileged as well."""
        return [coordinates(p, self._map.decimals) for p in self._places]

    @property
    def request(self) -> str:
        """What the user asked for."""
        return self._task.data["request"]

    @property
    def map(self) -> Map:
        """The map of this episode."""
        return self._map

    @property
    def shown(self) -> list[str]:
        """Coordinates that results have shown so far, as they were written."""
        return [f"{lat:.{self._map.decimals}f},{lon:.{self._map.decimals}f}" for lat, lon in sorted(self._shown)]

    @property
    def done(self) -> bool:
        """True after the first well-formed direction call and at the turn limit."""
        return self._route is not None or self.turns >= self.turn_limit

    @property
    def success(self) -> bool:
        """True if `direction` was called with the gold route."""
        return self._route == self._gold

    async def step(self, turn: AssistantTurn) -> StepResult:
        if self.done:
            raise EnvironmentError("a turn was played after the end of the episode")
        await self.foresee(turn)
        return StepResult(self._play(turn), self.done)

    async def foresee(self, turn: AssistantTurn) -> None:
        if isinstance(self._map, ServiceMap) and not self.done:
            await self._map.complete(lambda: self.fork()._play(turn))

    async def score(self) -> Outcome:
        info = {"turns": self.turns, "places": len(self._places), "tool_errors": self._tool_errors}
        if self.success:
            return Outcome("success", 1.0, info)
        reason = "no direction call" if self._route is None else "wrong route"
        return Outcome("failure", 0.0, {**info, "reason": reason})

    def evidence(self) -> Evidence:
        decimals = self._map.decimals
        where = [coordinates(p, decimals) for p in self._places]
        rows = [
            f"{i}. {p.name} | {p.region} | {c} | {'ambiguous' if self._ambiguous(p) else 'unique'}"
            for i, (p, c) in enumerate(zip(self._places, where, strict=True), 1)
        ]
        if self.config.tools == "full":
            rows.insert(0, "Gold route, in order (name | region | lat,lon | is the name alone ambiguous):")
        numbers = [number for pair in where for number in (pair, *pair.split(","))]
        values = [*numbers, *(p.region for p in self._places), *(p.name for p in self._places)]
        return Evidence("\n".join(rows), tuple(dict.fromkeys(v for v in values if v)))

    def check_evidence(self) -> list[str]:
        """Looks every row up with the policy's own tools: its place, its coordinates, and whether it is unique."""
        problems, rows = [], [r for r in self.evidence().text.splitlines() if " | " in r and r[0].isdigit()]
        if len(rows) != len(self._places):
            problems.append(f"it has {len(rows)} places, the task {len(self._places)}")
        if self._file:
            return problems + [p for place in self._places if (p := self._not_shown(place))]
        for row in rows:
            name, region, where, kind = row.partition(". ")[2].split(" | ")
            found = self._toolbox.run("search_places", {"keyword": name, "region": region}).text
            alone = self._map.search(name, None, 2)
            if where not in found.replace(", ", ","):
                problems.append(f"a search finds no {name} at {where} in {region}")
            if (len(alone) > 1) != (kind == "ambiguous"):
                problems.append(f"a search finds {len(alone)} places named {name}, but it is said to be {kind}")
        return problems

    def _not_shown(self, place: Place) -> str | None:
        """What is wrong with a place of a task file: the expert's own search must show its coordinates."""
        search, where = self._search(place), coordinates(place, self._map.decimals)
        try:
            shown = self._toolbox.run("search_places", search).shown
        except ArgumentError as error:
            return f"the search {search} is refused: {error}"
        except Unanswered:
            return f"the search {search} has not been answered"
        if not any(coordinates(p, self._map.decimals) == where for p in shown):
            return f"the search {search} does not show {where}"
        return None

    def role_rules(self) -> str:
        return RULES[self.config.tools]

    def expert(self) -> AssistantTurn | None:
        """Searches for what no result has shown yet, by region where the name is ambiguous; then `direction`.

        None if the episode is over or the searches that are still needed and the direction call do not fit in.
        """
        if self.done or not self.recoverable():
            return None
        missing = self._missing()
        if not missing:
            return self._turn([("direction", self._direction())])
        return self._turn([("search_places", self._search(p)) for p in missing[: self.config.calls_per_turn]])

    def recoverable(self) -> bool:
        """True if the episode has succeeded, or a player who copies coordinates from results can still succeed.

        No call shows more than one missing place (the generator sees to it), and what a turn shows can be used from
        the next turn on; so the turns left must hold the missing searches and one direction call.
        """
        if self.done:
            return self.success
        return _turns_for(len(self._missing()), self.config.calls_per_turn) + 1 <= self.turn_limit - self.turns

    def valid(self, turn: AssistantTurn) -> bool | None:
        if self.done:
            raise EnvironmentError("the episode is over")
        other = self.fork()
        try:
            other._play(turn)
        except Unanswered:
            return None
        return other.recoverable()

    def faults(self, rng: random.Random) -> dict[str, AssistantTurn]:
        gold = self.expert()
        return {} if gold is None else Mistakes(self, rng).all(gold)

    def reveals(self, turn: AssistantTurn) -> str | None:
        return revealed(self, turn)

    def fork(self) -> "Navigation":
        """An independent episode in the same state."""
        return copy.copy(self)  # all of the state is immutable values

    def _play(self, turn: AssistantTurn) -> list[Message]:
        self.turns += 1
        if not turn.tool_calls:
            return [{"role": "user", "content": NUDGE[self.config.tools]}]
        messages = []
        for i, call in enumerate(turn.tool_calls):
            if self._route is not None:
                break
            messages.append(self._call(call, i))
        return messages

    def _call(self, call: ToolCall, index: int) -> Message:
        """Runs one call and returns its tool message."""
        try:
            if call.error is not None:
                raise ArgumentError(call.error)
            if self.config.calls_per_turn is not None and index >= self.config.calls_per_turn:
                raise ArgumentError(f"only {self.config.calls_per_turn} call(s) per turn")
            result = self._toolbox.run(call.name, call.arguments)
        except ArgumentError as error:
            self._tool_errors += 1
            return tool_error(call, str(error))
        self._shown |= {(p.latitude, p.longitude) for p in result.shown}
        self._route = result.route
        return tool_result(call, result.text)

    def _system(self) -> str:
        calls = self.config.calls_per_turn
        limit = "" if calls is None else f" with at most {calls} tool call{'s' if calls > 1 else ''} each"
        return SYSTEM[self.config.tools].format(turns=self.turn_limit, calls=limit)

    def _ambiguous(self, place: Place) -> bool:
        if self._file:
            return place.id in self._file.ambiguous
        return len(self._map.named(place.name)) > 1

    def _missing(self) -> list[Place]:
        """Places whose coordinates no result has shown, in order of the route."""
        return [p for p, point in zip(self._places, self._gold, strict=True) if point not in self._shown]

    def _search(self, place: Place) -> dict[str, str]:
        return {"keyword": place.name} | ({"region": place.region} if self._ambiguous(place) else {})

    def _direction(self) -> dict[str, object]:
        origin, *stops, destination = [coordinates(p, self._map.decimals) for p in self._places]
        return {"origin": origin} | ({"waypoints": stops} if stops else {}) | {"destination": destination}

    def _turn(self, calls: Sequence[tuple[str, dict]]) -> AssistantTurn:
        return AssistantTurn(
            "", tuple(ToolCall(name, arguments, f"call_{self.turns}_{i}") for i, (name, arguments) in enumerate(calls))
        )


def _turns_for(searches: int, calls_per_turn: int | None) -> int:
    return min(searches, 1) if calls_per_turn is None else math.ceil(searches / calls_per_turn)


@functools.lru_cache(maxsize=32)
def _generated(cls: type[Navigation], config: str, split: str) -> tuple[tuple[Task, ...], Report]:
    parsed = cls.Config.model_validate_json(config)
    return generate(parsed, split, cls.make_map(parsed))
