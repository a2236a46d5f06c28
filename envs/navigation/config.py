"""The keys that Navigation adds under `env:`."""

from typing import Literal

import pydantic

from envs.base import EnvironmentConfig

Kind = Literal["easy", "mixed", "hard"]


class NavigationConfig(EnvironmentConfig):
    """Defaults are the paper's task where it gives a number (3 to 9 places, 600 + 150 tasks), else ours."""

    countries: tuple[str, ...] = ("US",)  # ISO codes; empty = the whole world
    min_population: int = pydantic.Field(1000, ge=0)  # of the places on the map, at least
    alternate_names: bool = False  # searches also match a place's other names
    places: tuple[int, int] = (3, 9)  # paper: places of a task, origin and destination included
    candidates: int = pydantic.Field(5, ge=1)  # results of one search, at most
    decimals: int = pydantic.Field(5, ge=0, le=5)  # of coordinates, in degrees
    anchor_radius_km: float | None = pydantic.Field(400.0, gt=0)  # places lie this near to an anchor; None = anywhere
    min_leg_km: float = pydantic.Field(5.0, ge=0)  # two places nearer to each other are no plausible pair

    kinds: dict[Kind, float] = {"easy": 1, "mixed": 2, "hard": 1}  # relative numbers of tasks of each kind
    train_tasks: int = pydantic.Field(600, ge=0)  # paper
    test_tasks: int = pydantic.Field(150, ge=0)  # paper
    ood_tasks: int = pydantic.Field(150, ge=0)
    seed: int = 0
    test_names: float = pydantic.Field(0.25, gt=0, lt=1)  # share of place names that no training task has
    ood_regions: float = pydantic.Field(0.15, ge=0, lt=1)  # share of regions that only "ood" and "regions" have

    tools: Literal["full", "short"] = "full"  # short: the miniature's brief prompt, schemas and results
    easy_region_mention: float = pydantic.Field(0.3, ge=0, le=1)  # how often a request names a region without need
    calls_per_turn: int | None = pydantic.Field(None, ge=1)  # tool calls that one turn may make; None = any number
    turn_slack: int | None = pydantic.Field(None, ge=0)  # limit min(max_turns, places + 1 + slack); None = max_turns
    random_coordinates: float = pydantic.Field(0.0, ge=0, le=1)  # share of tasks on a map with coordinates of its own
    random_names: float = pydantic.Field(0.0, ge=0, le=1)  # share of tasks whose names are invented, for warm starts

    @pydantic.model_validator(mode="after")
    def _check(self):
        low, high = self.places
        if not 2 <= low <= high:
            raise ValueError(f"places={list(self.places)} must be [min, max] with 2 <= min <= max")
        if any(n < 0 for n in self.kinds.values()) or not sum(self.kinds.values()):
            raise ValueError(f"kinds={self.kinds} needs a positive number for at least one kind")
        return self
