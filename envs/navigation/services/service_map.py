"""A map service as a map (map.Map): questions are answered from the store, and asked for where it lacks the answer.

A look-up is a function call on every map. Here it raises `Unanswered` if the answer has not come yet; `complete`
repeats a piece of work until it has all it needs. So the environment plays the same code on every map, and waits only
there.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from envs.navigation.map import Place, distance_km, fold
from envs.navigation.services.client import Client
from envs.navigation.services.request import Found, Request, Road
from envs.navigation.tools import Point, Words

T = TypeVar("T")


class Unanswered(Exception):
    """A look-up needs an answer that has not been asked for."""

    def __init__(self, request: Request):
        super().__init__(request.name)
        self.request = request


class Service(Protocol):
    """The requests of one kind of service. Each may raise ArgumentError for what it cannot ask."""

    words: Words

    def search(self, keyword: str, region: str | None, limit: int) -> Request: ...

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> Request: ...

    def route(self, points: Sequence[Point]) -> Request: ...


class ServiceMap:
    """Places and roads of a map service.

    Args:
      decimals: to which coordinates are rounded.
      places: what is known before anything is asked: the places of the tasks.
      limit: results of `named`.
    """

    def __init__(self, service: Service, client: Client, decimals: int, places: Sequence[Place], limit: int):
        self._service, self._client, self._limit = service, client, limit
        self.decimals, self.places, self.words = decimals, places, service.words

    def place(self, place_id: int) -> Place:
        return self.places[place_id]

    def named(self, keyword: str) -> Sequence[Place]:
        """The first places that a search for the name gives: a service does not tell all."""
        return self.search(keyword, None, self._limit)

    def search(self, keyword: str, region: str | None, limit: int) -> list[Place]:
        return self._places(self._service.search(keyword, region, limit))[:limit]

    def around(self, latitude: float, longitude: float, keyword: str, radius_km: float, limit: int) -> list[Place]:
        found = self._places(self._service.around(latitude, longitude, keyword, radius_km, limit))
        ranked = sorted((distance_km(latitude, longitude, p.latitude, p.longitude), p.id, p) for p in found)
        return [p for d, _, p in ranked if d <= radius_km][:limit]

    def share_keyword(self, a: Place, b: Place) -> bool:
        return fold(a.name) == fold(b.name)

    def route(self, points: Sequence[Point]) -> Road:
        """The driving route through the points; see map.Roads."""
        return self._answer(self._service.route(points))

    async def complete(self, work: Callable[[], T]) -> T:
        """The result of `work`, a function without effects, once all it looks up has been answered.

        Raises:
          ServiceError: the service cannot be used. What `work` itself raises is raised as well.
        """
        while True:
            try:
                return work()
            except Unanswered as missing:
                await self._client.ask(missing.request)

    def _places(self, request: Request) -> list[Place]:
        found: list[Found] = self._answer(request)
        return [
            Place(i, f.name, f.region, self._rounded(f.latitude), self._rounded(f.longitude), 0)
            for i, f in enumerate(found)
        ]

    def _rounded(self, degrees: float) -> float:
        return round(degrees, self.decimals) + 0.0  # + 0.0 turns -0.0 into 0.0

    def _answer(self, request: Request) -> Any:
        answer = self._client.store.get(request.name)
        if answer is None:
            raise Unanswered(request)
        return request.read(*answer)
