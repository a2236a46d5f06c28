"""The map service that a config names, and whether it can be asked."""

import urllib.parse
from collections.abc import Sequence

from envs.navigation.config import NavigationConfig, OSMConfig
from envs.navigation.map import Place
from envs.navigation.services import amap
from envs.navigation.services.client import client, key_of
from envs.navigation.services.osm import OSM
from envs.navigation.services.request import ServiceError
from envs.navigation.services.service_map import ServiceMap
from envs.navigation.services.store import Store

USER_AGENT = "rti-jax"
# Servers that the OpenStreetMap community pays for: https://operations.osmfoundation.org/policies/nominatim/
SHARED = ("openstreetmap.org", "openstreetmap.de", "project-osrm.org")


def load(config: NavigationConfig, places: Sequence[Place]) -> ServiceMap:
    """The service of the config; `places` are those of the tasks."""
    settings = config.amap if config.map == "amap" else config.osm
    service = amap.AMap(config.amap) if config.map == "amap" else OSM(config.osm, config.countries)
    agent = f"{USER_AGENT} ({config.osm.contact})" if config.map == "osm" and config.osm.contact else USER_AGENT
    return ServiceMap(service, client(settings, agent), config.decimals, places, config.candidates)


def check(config: NavigationConfig) -> None:
    """Raises ValueError, in one line, for a missing key, a missing contact or a cache that cannot be used."""
    settings = config.amap if config.map == "amap" else config.osm
    if config.map == "amap" and not settings.offline:
        try:
            key_of(amap.KEY)
        except ValueError as error:
            raise ValueError(
                f"{error} (https://console.amap.com gives one); or replay recorded answers with env.amap.offline=true"
            ) from None
    if config.map == "osm" and not settings.offline:
        _check_manners(config.osm)
    try:
        Store(settings.cache, settings.offline).check()
    except ServiceError as error:
        raise ValueError(f"env.{config.map}.cache: {error}") from None


def _check_manners(config: OSMConfig) -> None:
    hosts = [urllib.parse.urlsplit(url).hostname or "" for url in (config.nominatim_url, config.osrm_url)]
    shared = [h for h in hosts if any(h == s or h.endswith(f".{s}") for s in SHARED)]
    if shared and not config.contact:
        raise ValueError(f"env.osm.contact is empty: {shared[0]} wants an e-mail address or a page in the User-Agent")
    if shared and config.rate > 1:
        raise ValueError(f"env.osm.rate={config.rate:g}: {shared[0]} allows one request a second at most")
