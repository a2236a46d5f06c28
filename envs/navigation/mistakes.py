"""Wrong turns of known kinds: what a policy gets wrong, and what a corrector that has seen the evidence may reveal.

Used to make warm-start transcripts of the three roles and to measure the roles by kind of fault. Each function
returns the kind with the turn, or None where no such fault is possible in the state at hand.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from envs.base import AssistantTurn, ToolCall
from envs.navigation.map import Map, Place, coordinates

REFERENCE_PHRASES = (
    "According to the reference answer this is next.",
    "The answer key says so.",
    "The evidence lists this place.",
    "As the checker expects:",
    "The gold route wants this.",
    "Following the reference,",
)
INVENTED_PHRASES = (
    "The search shows {name} at {location}.",
    "{name} lies at {location}.",
    "The result was {location}.",
    "I already found {location}.",
)

LOCATION = re.compile(r"-?\d+\.\d+,-?\d+\.\d+")


class Episode(Protocol):
    """What is read of an episode of Navigation."""

    config: Any
    places: Sequence[Place]
    gold_coordinates: list[str]
    shown: list[str]
    request: str
    map: Map

    def make_map(self, config: Any) -> Map: ...


def search_turn(name: str, region: str | None = None, content: str = "") -> AssistantTurn:
    """A turn that searches a place."""
    arguments = {"keyword": name} | ({"region": region} if region else {})
    return AssistantTurn(content, (ToolCall("search_places", arguments),))


def direction_turn(locations: Sequence[str], content: str = "") -> AssistantTurn:
    """A turn that asks for the route through these coordinates."""
    stops = {"waypoints": list(locations[1:-1])} if len(locations) > 2 else {}
    arguments = {"origin": locations[0]} | stops | {"destination": locations[-1]}
    return AssistantTurn(content, (ToolCall("direction", arguments),))


def revealed(env: Episode, turn: AssistantTurn) -> str | None:
    """The kind of leak that a turn is, by what it says and what the episode has shown; None if it is none."""
    if re.search(r"\b(reference|answer key|evidence|checker|gold)\b", turn.content, re.IGNORECASE):
        return "mentions_reference"
    shown = set(env.shown)
    if any(number not in shown for number in LOCATION.findall(turn.content)):
        return "invented_result"
    for call in turn.tool_calls:
        arguments = call.arguments or {}
        if any(number not in shown for number in LOCATION.findall(json.dumps(arguments))):
            return "unseen_coordinates"
        place = next((p for p in env.places if p.name == arguments.get("keyword")), None)
        if place and arguments.get("region") == place.region and place.region not in env.request:
            return "unseen_region"
    return None


class Mistakes:
    """Draws faults for the state that an episode is in."""

    def __init__(self, env: Episode, rng: random.Random):
        self._places, self._map, self._shown = env.places, env.map, env.shown
        self._visible, self._rng = env.request, rng
        self._names = env.make_map(env.config).places  # of the real map: a moved one would be made anew
        self._gold = env.gold_coordinates
        self._several_regions = any(p.region != self._names[0].region for p in self._names)

    def wrong(self, gold: AssistantTurn) -> tuple[str, AssistantTurn] | None:
        """A turn that does not lead to the gold path."""
        call = gold.tool_calls[0]
        makers = self._wrong_search(call) if call.name == "search_places" else self._wrong_direction()
        return self._draw(makers)

    def leak(self, gold: AssistantTurn) -> tuple[str, AssistantTurn] | None:
        """A turn that is right but reveals or invents what the visible history does not have."""
        return self._draw(self._leaks(gold))

    def all(self, gold: AssistantTurn) -> dict[str, AssistantTurn]:
        """One turn of each kind that is possible here, wrong and leaking ones."""
        call = gold.tool_calls[0]
        wrong = self._wrong_search(call) if call.name == "search_places" else self._wrong_direction()
        return {kind: make() for kind, make in (wrong | self._leaks(gold)).items()}

    def _leaks(self, gold: AssistantTurn) -> dict[str, Callable[[], AssistantTurn]]:
        call = gold.tool_calls[0]
        unseen = [g for g in self._gold if g not in self._shown]
        makers: dict[str, Callable[[], AssistantTurn]] = {
            "mentions_reference": lambda: AssistantTurn(self._rng.choice(REFERENCE_PHRASES), gold.tool_calls)
        }
        if unseen:
            makers["unseen_coordinates"] = lambda: direction_turn(self._gold)
            makers["invented_result"] = lambda: AssistantTurn(self._invention(unseen), gold.tool_calls)
        if call.name == "search_places" and not call.arguments.get("region"):
            place = next(p for p in self._places if p.name == call.arguments["keyword"])
            if place.region not in self._visible:
                makers["unseen_region"] = lambda: search_turn(place.name, place.region)
        return makers

    def _invention(self, unseen: Sequence[str]) -> str:
        location = self._rng.choice(unseen)
        name = self._places[self._gold.index(location)].name
        return self._rng.choice(INVENTED_PHRASES).format(name=name, location=location)

    def _wrong_search(self, call: ToolCall) -> dict[str, Callable[[], AssistantTurn]]:
        name, region = call.arguments["keyword"], call.arguments.get("region")
        makers = {
            "wrong_name": lambda: search_turn(self._other_name(name), region),
            "misspelt": lambda: search_turn(self._misspell(name), region),
        }
        if region:
            makers["no_region"] = lambda: search_turn(name)
            if self._several_regions:
                makers["wrong_region"] = lambda: search_turn(name, self._other_region(region))
        elif self._several_regions:
            gold = next(p.region for p in self._places if p.name == name)
            makers["invented_region"] = lambda: search_turn(name, self._other_region(gold))
        if self._shown:
            makers["early_direction"] = lambda: direction_turn(
                [self._rng.choice(self._shown) for _ in range(len(self._places))]
            )
        return makers

    def _wrong_direction(self) -> dict[str, Callable[[], AssistantTurn]]:
        def swapped():
            i = self._rng.randrange(len(self._gold) - 1)
            order = list(self._gold)
            order[i], order[i + 1] = order[i + 1], order[i]
            return direction_turn(order)

        def replaced(value: Callable[[str], str]):
            i = self._rng.randrange(len(self._gold))
            return direction_turn([value(g) if j == i else g for j, g in enumerate(self._gold)])

        makers = {"swapped": swapped, "wrong_digits": lambda: replaced(self._wrong_digits)}
        others = [s for s in self._shown if s not in self._gold]
        if others:
            makers["wrong_candidate"] = lambda: replaced(lambda _: self._rng.choice(others))
        return makers

    def _draw(self, makers: dict[str, Callable[[], AssistantTurn]]) -> tuple[str, AssistantTurn] | None:
        if not makers:
            return None
        kind = self._rng.choice(sorted(makers))
        return kind, makers[kind]()

    def _other_name(self, name: str) -> str:
        others = [p.name for p in self._places if p.name != name]
        if others and self._rng.random() < 0.5:
            return self._rng.choice(others)
        return self._random_place(lambda p: p.name != name).name

    def _other_region(self, region: str) -> str:
        return self._random_place(lambda p: p.region != region).region

    def _random_place(self, accept: Callable[[Place], bool]) -> Place:
        while not accept(place := self._rng.choice(self._names)):
            pass
        return place

    def _misspell(self, name: str) -> str:
        """A copy gone wrong: the tail of another name, a missing end or a doubled piece."""
        cut = self._rng.randint(max(1, len(name) // 3), max(1, len(name) - 1))
        other = self._random_place(lambda p: p.name != name).name
        wrong = self._rng.choice((name[:cut], name[:cut] + other[-max(1, len(other) - cut) :], name + name[cut:]))
        return wrong.strip() if wrong.strip() and wrong.strip() != name else name + "s"

    def _wrong_digits(self, location: str) -> str:
        """One of the numbers of a coordinate replaced by that of another place."""
        other = coordinates(self._random_place(lambda _: True), self._map.decimals).split(",")
        lat, lon = location.split(",")
        wrong = f"{other[0]},{lon}" if self._rng.random() < 0.5 else f"{lat},{other[1]}"
        return wrong if wrong != location else f"{lat},{float(lon) + 1:.{self._map.decimals}f}"
