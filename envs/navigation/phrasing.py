"""Natural-language requests: families of templates that name the places in the order of travel.

In a template {o}, {s} and {d} are origin, stops and destination, {all} is all of them; what stands in brackets is left
out when there are no stops. The families of `OOD` are never used in training or test tasks.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

from envs.navigation.map import Place


@dataclasses.dataclass(frozen=True)
class Family:
    """Requests of one kind. `joins` are ways to join several places, one of which is drawn for a request."""

    name: str
    templates: tuple[str, ...]
    joins: tuple[str, ...] = (", then ", " and then ")


FULL = (
    Family(
        "plan",
        (
            "Plan a driving route from {o}[ via {s}] to {d}.",
            "I need directions from {o}[, passing through {s},] to {d}.",
            "Please work out the drive from {o}[ through {s}] to {d}.",
        ),
    ),
    Family(
        "day",
        (
            "We leave {o} in the morning[, stop in {s}] and have to be in {d} by the evening. Please set up the route.",
            "Tomorrow I start in {o}[, have appointments in {s}] and spend the night in {d}. How do I drive?",
        ),
    ),
    Family(
        "delivery",
        (
            "Delivery run: load in {o}[, drop off in {s}], last stop {d}. Get me the directions.",
            "The truck loads at {o}[, unloads at {s}] and parks at {d}. I need its route.",
        ),
    ),
    Family(
        "list",
        (
            "Directions please, in this order: {all}.",
            "Here is my itinerary, please turn it into a route: {all}.",
        ),
        ("; ", ", then "),
    ),
    Family(
        "trip",
        (
            "Our road trip starts in {o}[, continues through {s}] and ends in {d}. Can you get the route?",
            "My parents and I set out from {o}[, want to see {s}] and finish in {d}. Which way do we drive?",
        ),
    ),
    Family("terse", ("{all}, by car.", "Driving directions {all}."), (" to ",)),
    Family(
        "polite",
        (
            "Could you route me from {o}[ by way of {s}] to {d}? The order matters.",
            "Would you be so kind as to look up the way from {o}[ over {s}] to {d}?",
        ),
    ),
    Family("visits", ("I am visiting friends in {all}. Give me the drive.",), (", then ", ", after that ")),
)
FULL_OOD = (
    Family(
        "calendar",
        (
            "Monday finds me in {o}[, the middle of the week in {s}], Friday in {d}. Map it for me.",
            "The tour opens in {o}[, plays {s}] and closes in {d}. The bus driver asks for directions.",
        ),
    ),
    Family("arrows", ("Map this: {all}", "{all} (one way, by road)"), (" -> ", " > ")),
    Family(
        "dispatch",
        (
            "Convoy assembles at {o}[, refuels at {s}] and disbands at {d}. Work out the drive for dispatch.",
            "Unit departs {o}[, checks in at {s}], arrives {d}. Route required.",
        ),
    ),
)
SHORT = (
    Family("plan", ("Route from {o}[ via {s}] to {d}.",), (" then ",)),
    Family("drive", ("Drive from {o}[ through {s}] to {d}.",), (" and ",)),
    Family("chain", ("{all}.",), (" then ",)),
    Family("go", ("Go {all}.",), (" to ",)),
    Family("start", ("Start {o}[, stop {s}], end {d}.",), (" then ",)),
)
SHORT_OOD = (
    Family("leave", ("Leave {o}[, visit {s}], reach {d}.",), (" then ",)),
    Family("trip", ("Trip: {all}",), (" - ",)),
)

WITH_REGION = {"full": ("{name}, {region}", "{name} ({region})", "{name} in {region}"), "short": ("{name}, {region}",)}


def families(style: str, ood: bool) -> tuple[Family, ...]:
    """The families of a style ("full" or "short"), those never trained if `ood`."""
    return {"full": (FULL, FULL_OOD), "short": (SHORT, SHORT_OOD)}[style][ood]


def write(
    rng: random.Random, style: str, ood: bool, places: Sequence[Place], with_region: Sequence[bool]
) -> tuple[str, str]:
    """A request for the route through `places`, in order. Returns its text and its family's name.

    Args:
      with_region: for each place, whether the request names its region.
    """
    family = rng.choice(families(style, ood))
    form, join = rng.choice(WITH_REGION[style]), rng.choice(family.joins)
    named = [
        form.format(name=p.name, region=p.region) if region else p.name
        for p, region in zip(places, with_region, strict=True)
    ]
    template = rng.choice(family.templates)
    template = re.sub(r"\[(.*?)\]", r"\1" if len(named) > 2 else "", template)
    stops = join.join(named[1:-1])
    return template.format(o=named[0], s=stops, d=named[-1], all=join.join(named)), family.name
