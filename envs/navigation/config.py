"""The keys that Navigation adds under `env:`."""

import urllib.parse
from typing import Annotated, Literal

import pydantic

from envs.base import EnvironmentConfig

Kind = Literal["easy", "mixed", "hard"]
EMBEDDED_DECIMALS = 5  # GeoNames gives so many
MOST_RESULTS = {"amap": 25, "osm": 40}  # of one search of a service


def _base_url(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
        # Not shown: a key may stand in it, and this line goes to logs.
        raise ValueError(
            "a base URL is http(s)://host[:port][/path], without user and query; keys come from the environment"
        )
    return url.rstrip("/")


BaseURL = Annotated[str, pydantic.AfterValidator(_base_url)]


class ServiceConfig(pydantic.BaseModel):
    """How a map service is asked. Keys are never here: they come from environment variables."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    rate: float = pydantic.Field(3.0, gt=0)  # requests a second, of all episodes of this process
    concurrency: int = pydantic.Field(16, ge=1)  # requests at once
    timeout: float = pydantic.Field(10.0, gt=0)  # seconds, of one request
    retries: int = pydantic.Field(4, ge=0)  # of a request that another try may answer
    backoff: float = pydantic.Field(0.5, gt=0)  # seconds before the first retry; doubles from one to the next
    backoff_limit: float = pydantic.Field(30.0, gt=0)  # seconds, the longest wait before a retry
    cache: str = pydantic.Field("runs/map_answers.sqlite", min_length=1)  # file of all answers; they never expire
    offline: bool = False  # replay: answers come from the cache alone, what it lacks is an environment_error


class AMapConfig(ServiceConfig):
    """AMap's web service; its key is $AMAP_KEY."""

    url: BaseURL = "https://restapi.amap.com"
    version: Literal["v3", "v5"] = "v3"  # of the web service


class OSMConfig(ServiceConfig):
    """OpenStreetMap: Nominatim and OSRM. Where a server wants a key, it is $NOMINATIM_KEY or $OSRM_KEY."""

    nominatim_url: BaseURL = "http://localhost:8080"  # a server of one's own: the public one allows no training
    osrm_url: BaseURL = "http://localhost:5000"
    profile: str = pydantic.Field("driving", pattern=r"^[A-Za-z0-9_-]+$")  # OSRM's
    contact: str = pydantic.Field("", pattern=r"^[\x20-\x7e]*$")  # e-mail or page in the User-Agent
    language: str = "en"  # of names and regions
    feature_type: Literal["", "country", "state", "city", "settlement"] = ""  # Nominatim's featureType; empty = all
    nominatim_key_parameter: str = "key"  # name of the parameter that $NOMINATIM_KEY goes into
    osrm_key_parameter: str = "access_token"  # ... that $OSRM_KEY goes into
    rate: float = pydantic.Field(1.0, gt=0)  # of both services together


class NavigationConfig(EnvironmentConfig):
    """Defaults are the paper's task where it gives a number (3 to 9 places, 600 + 150 tasks), else ours."""

    map: Literal["embedded", "amap", "osm"] = "embedded"  # GeoNames, or a service that is asked over the network
    tasks_file: str | None = None  # JSONL of tasks with their gold places; None = generated, on the embedded map only
    amap: AMapConfig = AMapConfig()
    osm: OSMConfig = OSMConfig()

    countries: tuple[str, ...] = ("US",)  # ISO codes; empty = the whole world
    min_population: int = pydantic.Field(1000, ge=0)  # of the places on the map, at least
    alternate_names: bool = False  # searches also match a place's other names
    places: tuple[int, int] = (3, 9)  # paper: places of a task, origin and destination included
    candidates: int = pydantic.Field(5, ge=1)  # results of one search, at most
    decimals: int = pydantic.Field(5, ge=0, le=7)  # of coordinates, in degrees; 5 at most on the embedded map
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
        if self.map == "embedded" and self.decimals > EMBEDDED_DECIMALS:
            raise ValueError(f"decimals={self.decimals} must be at most {EMBEDDED_DECIMALS} on the embedded map")
        if self.map != "embedded" and not self.tasks_file:
            raise ValueError(f"tasks_file=null: map={self.map} needs one; tasks are generated on the embedded map only")
        if self.candidates > MOST_RESULTS.get(self.map, self.candidates):
            raise ValueError(
                f"candidates={self.candidates} must be at most {MOST_RESULTS[self.map]} with map={self.map}"
            )
        if self.tasks_file and (self.random_coordinates or self.random_names):
            raise ValueError(f"tasks_file={self.tasks_file}: random_coordinates and random_names need generated tasks")
        return self
