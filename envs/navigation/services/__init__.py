"""Navigation on map services: AMap, or Nominatim and OSRM; see docs/navigation.md."""

from envs.navigation.services.load import check, load
from envs.navigation.services.service_map import ServiceMap, Unanswered

__all__ = ["ServiceMap", "Unanswered", "check", "load"]
