"""The task generator: which places a task has, in which order, and how the request is worded.

A place is *easy* if its name is unique on the map, *hard* if its name occurs in three or more regions and a search
without region does not return it, *ambiguous* otherwise. A task is easy or hard if all its places are, else mixed.
Names are divided between training and the other splits by a hash of the name alone, so no seed and no number of tasks
can move a name across. Whatever is left out is counted in the `Report`.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from envs.base import Task
from envs.navigation import phrasing
from envs.navigation.config import NavigationConfig
from envs.navigation.map import EARTH_RADIUS_KM, Map, Place, distance_km, fold, invent_name

SPLITS = ("train", "test", "ood", "regions")
OTHER_REGIONS = ("ood", "regions")  # splits of regions that train and test have not
CLASSES = ("easy", "ambiguous", "hard")
HARD_REGIONS = 3  # a hard place's name occurs in at least so many regions
DRAWS_PER_TASK = 2000  # before the generator gives up on a kind


@dataclasses.dataclass(frozen=True)
class Report:
    """What generating a split did.

    Attributes:
      tasks: number of tasks by kind. pool: number of usable places by class.
      excluded_places: places of the map that no task of this split may have, by reason.
      rejected_draws: drawn waypoint sets that were thrown away, by reason.
    """

    split: str
    tasks: Mapping[str, int]
    pool: Mapping[str, int]
    excluded_places: Mapping[str, int]
    rejected_draws: Mapping[str, int]


def held_out(name: str, share: float) -> bool:
    """True if the name belongs to the splits that are not trained; depends on the name and the share only."""
    return _unit("name", fold(name)) < share


def ood_regions(regions: Sequence[str], share: float) -> frozenset[str]:
    """The regions that only the splits "ood" and "regions" have: the nearest whole number of them, chosen by hash."""
    ranked = sorted(set(regions), key=lambda r: _unit("region", fold(r)))
    return frozenset(ranked[: round(share * len(ranked))])


def classify(map: Map, place: Place, candidates: int) -> str | None:
    """The class of a place; None if no search can single it out (another one has its name and region)."""
    namesakes = map.named(place.name)
    if len(namesakes) == 1:
        return "easy"
    if sum(p.region == place.region for p in namesakes) > 1:
        return None
    found = any(p.id == place.id for p in namesakes[:candidates])
    regions = {p.region for p in namesakes}
    return "hard" if len(regions) >= HARD_REGIONS and not found else "ambiguous"


def generate(config: NavigationConfig, split: str, map: Map) -> tuple[tuple[Task, ...], Report]:
    """The tasks of a split, the same for equal arguments.

    Raises ValueError for an unknown split and when the map has too few places for a kind of task.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; Navigation has {', '.join(SPLITS)}")
    rng = random.Random(f"navigation/{config.seed}/{split}")
    pool, excluded = _pool(config, split, map)
    rejected: collections.Counter[str] = collections.Counter()
    seen: set[tuple[int, ...]] = set()
    tasks = []
    for i, kind in enumerate(_schedule(config, split, rng)):
        places = _draw(config, kind, pool, map, rng, rejected, seen)
        seen.add(tuple(p.id for p in places))
        tasks.append(_task(config, f"{split}/{i:04d}", kind, places, split == "ood", map, rng))
    sizes = {c: len(pool.places[c]) for c in CLASSES}
    counts = collections.Counter(t.kind for t in tasks)
    return tuple(tasks), Report(split, dict(counts), sizes, dict(excluded), dict(rejected))


def _unit(*parts: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.blake2b("/".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _schedule(config: NavigationConfig, split: str, rng: random.Random) -> list[str]:
    """The kind of every task: shares of `kinds` by largest remainder, in random order."""
    total = {"train": config.train_tasks, "test": config.test_tasks}.get(split, config.ood_tasks)
    weight = sum(config.kinds.values())
    exact = {kind: total * n / weight for kind, n in config.kinds.items()}
    counts = {kind: int(x) for kind, x in exact.items()}
    for kind in sorted(exact, key=lambda k: counts[k] - exact[k])[: total - sum(counts.values())]:
        counts[kind] += 1
    kinds = [kind for kind, n in counts.items() for _ in range(n)]
    rng.shuffle(kinds)
    return kinds


class _Pool:
    """Usable places by class, with arrays for the distance to an anchor."""

    def __init__(self, places: Mapping[str, list[Place]]):
        self.places = places
        mixed = [p for c in CLASSES for p in places[c]]
        self.anchors = {**places, "mixed": mixed}  # by kind of task
        self._radians = {
            c: np.radians([(p.latitude, p.longitude) for p in ps] or [(0.0, 0.0)]) for c, ps in places.items()
        }

    def near(self, place_class: str, anchor: Place, radius_km: float | None) -> list[Place]:
        """Places of a class within the radius of the anchor (all of them without a radius)."""
        places = self.places[place_class]
        if radius_km is None or not places:
            return places
        lat, lon = self._radians[place_class].T
        lat0, lon0 = np.radians((anchor.latitude, anchor.longitude))
        h = np.sin((lat - lat0) / 2) ** 2 + np.cos(lat) * np.cos(lat0) * np.sin((lon - lon0) / 2) ** 2
        inside = 2 * EARTH_RADIUS_KM * np.arcsin(np.sqrt(np.minimum(h, 1.0))) <= radius_km
        return [places[i] for i in np.flatnonzero(inside)]


def _pool(config: NavigationConfig, split: str, map: Map) -> tuple[_Pool, collections.Counter[str]]:
    places: dict[str, list[Place]] = {c: [] for c in CLASSES}
    excluded: collections.Counter[str] = collections.Counter()
    for place, usable in _classes(map, config.candidates):
        reason = usable if usable not in CLASSES else _other_split(config, split, place, map)
        if reason:
            excluded[reason] += 1
        else:
            places[usable].append(place)
    return _Pool(places), excluded


@functools.lru_cache(maxsize=8)
def _classes(map: Map, candidates: int) -> list[tuple[Place, str]]:
    """Every place with its class, or with the reason why no task may have it."""
    regions = {fold(p.region) for p in map.places}
    return [(p, _unusable(p, regions) or classify(map, p, candidates) or "same name and region") for p in map.places]


def _unusable(place: Place, regions: set[str]) -> str | None:
    if fold(place.name) in regions:
        return "name of a region"
    if any(c in place.name for c in ',;|()[]{}<>/"') or not any(c.isalpha() for c in place.name):
        return "name with punctuation"
    return None


def _other_split(config: NavigationConfig, split: str, place: Place, map: Map) -> str | None:
    if (place.region in _ood_regions_of(map, config.ood_regions)) != (split in OTHER_REGIONS):
        return "region of another split"
    if held_out(place.name, config.test_names) == (split == "train"):
        return "name of another split"
    return None


@functools.lru_cache(maxsize=8)
def _ood_regions_of(map: Map, share: float) -> frozenset[str]:
    return ood_regions([p.region for p in map.places], share)


def _draw(
    config: NavigationConfig,
    kind: str,
    pool: _Pool,
    map: Map,
    rng: random.Random,
    rejected: collections.Counter[str],
    seen: set[tuple[int, ...]],
) -> list[Place]:
    """Places of one task in order, drawn around a random anchor until nothing speaks against them."""
    classes = [kind] if kind != "mixed" else [c for c in CLASSES if pool.places[c]]
    anchors = pool.anchors[kind]
    for _ in range(DRAWS_PER_TASK if anchors else 0):
        anchor, count = rng.choice(anchors), rng.randint(*config.places)
        near = {c: pool.near(c, anchor, config.anchor_radius_km) for c in classes}
        places = _pick(rng, near, count)
        reason = _implausible(config, kind, places, map)
        if reason is None and tuple(p.id for p in places) in seen:
            reason = "task drawn before"
        if reason is None:
            return places
        rejected[reason] += 1
    sizes = ", ".join(f"{c}: {len(ps)}" for c, ps in pool.places.items())
    raise ValueError(
        f"no {kind} task of {config.places[0]} to {config.places[1]} places could be drawn (usable places: {sizes}); "
        "lower env.places, or raise env.anchor_radius_km, env.test_names or env.ood_regions"
    )


def _pick(rng: random.Random, near: Mapping[str, Sequence[Place]], count: int) -> list[Place]:
    """`count` different places, the class of each drawn first; fewer if the anchor's surroundings have not so many."""
    wanted = collections.Counter(rng.choice([c for c in near if near[c]] or list(near)) for _ in range(count))
    places = [p for c, n in wanted.items() for p in rng.sample(near[c], min(n, len(near[c])))]
    rng.shuffle(places)
    return places if len(places) == count else []


def _implausible(config: NavigationConfig, kind: str, places: Sequence[Place], map: Map) -> str | None:
    """Why a drawn set of places makes no task, or None."""
    if not places:
        return "too few places near the anchor"
    if kind == "mixed":
        drawn = {classify(map, p, config.candidates) for p in places}
        if drawn in ({"easy"}, {"hard"}):
            return "not mixed"
    pairs = (_pair_problem(config, a, b, map) for a, b in itertools.combinations(places, 2))
    return next((problem for problem in pairs if problem), None)


def _pair_problem(config: NavigationConfig, a: Place, b: Place, map: Map) -> str | None:
    """Why two places of one task would be ambiguous or implausible, or None."""
    if map.share_keyword(a, b):
        return "ambiguous pair: same name"
    first, second = fold(a.name).split(), fold(b.name).split()
    if set(first) <= set(second) or set(second) <= set(first):
        return "ambiguous pair: one name within the other"
    if distance_km(a.latitude, a.longitude, b.latitude, b.longitude) < config.min_leg_km:
        return "implausible pair: too near"
    for target, other in ((a, b), (b, a)):
        namesakes = map.named(other.name)
        if any(p.latitude == target.latitude and p.longitude == target.longitude for p in namesakes):
            return "ambiguous pair: same coordinates"
    return None


def _task(
    config: NavigationConfig, task_id: str, kind: str, places: Sequence[Place], ood: bool, map: Map, rng: random.Random
) -> Task:
    """The task's record: ids of places, never their coordinates."""
    unique = [len(map.named(p.name)) == 1 for p in places]
    names = {}
    if config.random_names and rng.random() < config.random_names:
        names = {p.name: invent_name(map, rng) for p in places}
        places = [dataclasses.replace(p, name=names[p.name]) for p in places]
    with_region = [not u or rng.random() < config.easy_region_mention for u in unique]
    request, family = phrasing.write(rng, config.tools, ood, places, with_region)
    data = {"request": request, "family": family, "places": tuple(p.id for p in places)}
    if names:
        data["names"] = names
    if rng.random() < config.random_coordinates:
        data["coordinates_seed"] = rng.getrandbits(32)
    return Task(id=task_id, kind=kind, data=data)
