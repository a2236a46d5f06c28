"""The task generator of Navigation: kinds, splits, wording, filters, determinism."""

import asyncio
import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import Task
from envs.navigation import Navigation, NavigationConfig, phrasing
from envs.navigation.gazetteer import Gazetteer
from envs.navigation.map import Place, distance_km, fold
from envs.navigation.tasks import SPLITS, classify, generate, held_out, ood_regions

FULL = NavigationConfig()
MINIATURE = NavigationConfig(
    places=(2, 3), candidates=2, decimals=2, kinds={"easy": 1, "hard": 1}, tools="short", anchor_radius_km=None
)
MAP = Navigation.make_map(FULL)


def places_of(config, split):
    """The places of each task of a split."""
    map = Navigation.make_map(config)
    return [[map.place(i) for i in t.data["places"]] for t in Navigation.tasks(config, split)]


def names(config, split):
    return {fold(p.name) for places in places_of(config, split) for p in places}


@pytest.mark.parametrize("config", [FULL, MINIATURE], ids=["full", "miniature"])
class TestSplits:
    def test_sizes_and_kinds(self, config):
        train = collections.Counter(t.kind for t in Navigation.tasks(config, "train"))
        assert train == ({"easy": 150, "mixed": 300, "hard": 150} if config is FULL else {"easy": 300, "hard": 300})
        assert [len(Navigation.tasks(config, s)) for s in ("test", "ood")] == [150, 150]
        assert len({t.id for s in ("train", "test", "ood") for t in Navigation.tasks(config, s)}) == 900

    def test_deterministic_by_seed(self, config):
        map = Navigation.make_map(config)
        again = generate(config, "test", map)
        assert again == Navigation.generated(config, "test") and [t.data for t in again[0]] == [
            t.data for t in Navigation.tasks(config, "test")
        ]
        other = generate(config.model_copy(update={"seed": 1}), "test", map)[0]
        assert [t.data for t in other] != [t.data for t in again[0]]

    def test_no_held_out_name_is_trained(self, config):
        """Not with another seed or another number of tasks either: the hash of the name decides."""
        train = names(config, "train") | names(config.model_copy(update={"seed": 7, "train_tasks": 900}), "train")
        assert train.isdisjoint(names(config, "test") | names(config, "ood") | names(config, "regions"))

    def test_regions_and_families_of_ood_are_not_trained(self, config):
        regions = {s: {p.region for ps in places_of(config, s) for p in ps} for s in SPLITS}
        assert regions["ood"] and regions["regions"]
        assert (regions["ood"] | regions["regions"]).isdisjoint(regions["train"] | regions["test"])
        used = {s: {t.data["family"] for t in Navigation.tasks(config, s)} for s in SPLITS}
        assert used["train"] == {f.name for f in phrasing.families(config.tools, ood=False)} >= used["test"]
        assert used["ood"] == {f.name for f in phrasing.families(config.tools, ood=True)}
        assert used["ood"].isdisjoint(used["train"])
        assert used["regions"] <= used["train"]

    def test_kinds_are_what_they_say(self, config):
        """Checked by searching, without the generator's own classes."""
        map, k = Navigation.make_map(config), config.candidates
        for split in ("train", "test", "ood"):
            for task in Navigation.tasks(config, split):
                places = [map.place(i) for i in task.data["places"]]
                unique = [map.search(p.name, None, 9) == [p] for p in places]
                hidden = [
                    p not in map.search(p.name, None, k) and len({q.region for q in map.named(p.name)}) >= 3
                    for p in places
                ]
                kind = "easy" if all(unique) else "hard" if all(hidden) else "mixed"
                assert task.kind == kind
                assert all(map.search(p.name, p.region, k) == [p] for p in places)

    def test_requests_name_all_places_in_order_and_regions_where_needed(self, config):
        map = Navigation.make_map(config)
        for task in Navigation.tasks(config, "train"):
            position = 0
            for place in (map.place(i) for i in task.data["places"]):
                position = task.data["request"].index(place.name, position) + len(place.name)
                if len(map.named(place.name)) > 1:
                    rest = task.data["request"][position:]
                    assert rest.startswith((f", {place.region}", f" ({place.region})", f" in {place.region}"))

    def test_plausible(self, config):
        for places in places_of(config, "train"):
            assert config.places[0] <= len(places) <= config.places[1]
            pairs = [(a, b) for i, a in enumerate(places) for b in places[:i]]
            distances = [distance_km(a.latitude, a.longitude, b.latitude, b.longitude) for a, b in pairs]
            assert min(distances) >= config.min_leg_km
            assert config.anchor_radius_km is None or max(distances) <= 2 * config.anchor_radius_km + 1e-6
            assert all(fold(a.name) != fold(b.name) for a, b in pairs)


class TestGenerator:
    def test_easy_requests_mention_regions_as_often_as_configured(self):
        def mentions(share):
            keys = {"kinds": {"easy": 1}, "easy_region_mention": share, "places": (2, 2)}
            config = MINIATURE.model_copy(update=keys)
            tasks = Navigation.tasks(config, "train")
            return sum(t.data["request"].count(", ") for t in tasks) / (2 * len(tasks))

        commas = mentions(0.0)  # from the templates
        assert mentions(1.0) - commas == pytest.approx(1.0, abs=0.1)
        assert mentions(0.5) - commas == pytest.approx(0.5, abs=0.1)

    def test_tasks_hold_no_coordinates(self):
        task = Navigation.tasks(FULL, "train")[0]
        assert set(task.data) == {"request", "family", "places"} and isinstance(task, Task)

    def test_share_of_random_coordinates(self):
        config = MINIATURE.model_copy(update={"random_coordinates": 0.7})
        share = sum("coordinates_seed" in t.data for t in Navigation.tasks(config, "train")) / 600
        assert share == pytest.approx(0.7, abs=0.06)

    def test_counts_what_it_filters(self):
        """Seven places, of which only the pairs (Adam, Berta) and (Adam, Carl) are plausible."""
        places = (
            Place(1, "Adam", "North", 10.0, 10.0, 9),
            Place(2, "Berta", "North", 11.0, 10.0, 8),
            Place(3, "Carl", "North", 11.01, 10.0, 7),  # 1 km from Berta
            Place(4, "North", "South", 12.0, 10.0, 6),  # name of a region
            Place(5, "Dora", "South", 13.0, 10.0, 5),  # twice in a region
            Place(6, "Dora", "South", 14.0, 10.0, 4),
            Place(7, "Emil (old)", "South", 15.0, 10.0, 3),
        )
        config = MINIATURE.model_copy(
            update={
                "kinds": {"easy": 1},
                "places": (2, 2),
                "ood_regions": 0.0,
                "train_tasks": 4,
                "test_names": 1e-9,
            }  # fmt: skip
        )
        tasks, report = generate(config, "train", Gazetteer(places, 2))
        assert {frozenset(t.data["places"]) for t in tasks} == {frozenset((1, 2)), frozenset((1, 3))}
        assert report.tasks == {"easy": 4} and report.pool == {"easy": 3, "ambiguous": 0, "hard": 0}
        assert report.excluded_places == {"name of a region": 1, "same name and region": 2, "name with punctuation": 1}
        assert set(report.rejected_draws) <= {"implausible pair: too near", "task drawn before"}
        with pytest.raises(ValueError, match="no easy task of 2 to 2 places could be drawn.*easy: 3"):
            generate(config.model_copy(update={"train_tasks": 5}), "train", Gazetteer(places, 2))

    def test_pairs_that_one_search_would_confuse(self):
        """York and New York, and a target at the very coordinates of another target's namesake."""
        places = (
            Place(1, "York", "North", 10.0, 10.0, 9),
            Place(2, "New York", "North", 12.0, 10.0, 8),
            Place(3, "Dora", "North", 20.0, 10.0, 7),
            Place(4, "Dora", "South", 30.0, 10.0, 6),
            Place(5, "Emil", "South", 30.0, 10.0, 5),
        )
        map, keys = Gazetteer(places, 2), {"places": (2, 2), "ood_regions": 0.0, "test_names": 1e-9}
        mixed = MINIATURE.model_copy(update=keys | {"kinds": {"mixed": 1}, "train_tasks": 8})
        tasks, report = generate(mixed, "train", map)
        assert {frozenset(t.data["places"]) for t in tasks} == {frozenset(p) for p in ((1, 3), (1, 4), (2, 3), (2, 4))}
        assert "ambiguous pair: same coordinates" in report.rejected_draws
        easy = mixed.model_copy(update={"kinds": {"easy": 1}, "train_tasks": 4})
        tasks, report = generate(easy, "train", map)
        assert {frozenset(t.data["places"]) for t in tasks} == {frozenset(p) for p in ((1, 5), (2, 5))}
        assert "ambiguous pair: one name within the other" in report.rejected_draws

    def test_classes(self):
        def place(i, name, region):
            return Place(i, name, region, float(i), 0.0, 100 - i)

        map = Gazetteer([place(i, "Dora", r) for i, r in enumerate("ABCDD")] + [place(9, "Emil", "A")], 2)
        classes = [classify(map, p, candidates=2) for p in map.places]
        assert classes == ["ambiguous", "ambiguous", "hard", None, None, "easy"]
        assert classify(map, map.place(2), candidates=3) == "ambiguous"

    def test_unknown_split(self):
        with pytest.raises(ValueError, match="unknown split 'dev'"):
            Navigation.tasks(FULL, "dev")

    @pytest.mark.parametrize("keys", [{"places": (1, 3)}, {"places": (4, 3)}, {"kinds": {"easy": 0}}, {"town": 1}])
    def test_config_errors(self, keys):
        with pytest.raises(ValueError):
            NavigationConfig(**keys)


class TestHoldingOut:
    def test_share(self):
        assert sum(held_out(f"Town {i}", 0.25) for i in range(4000)) / 4000 == pytest.approx(0.25, abs=0.03)
        assert held_out("Saint Louis", 0.25) == held_out("ST. LOUIS", 0.25)

    @settings(max_examples=50)
    @given(name=st.text(), low=st.floats(0, 1), high=st.floats(0, 1))
    def test_a_larger_share_holds_out_more(self, name, low, high):
        low, high = sorted((low, high))
        assert held_out(name, low) <= held_out(name, high)

    def test_regions(self):
        regions = [p.region for p in MAP.places]
        assert len(ood_regions(regions, 0.15)) == 8 and ood_regions(regions, 0.0) == frozenset()
        assert ood_regions(regions, 0.1) < ood_regions(reversed(regions), 0.2)


class TestPhrasing:
    @pytest.mark.parametrize("style", ["full", "short"])
    def test_every_template_names_every_place(self, style):
        for ood in (False, True):
            for family in phrasing.families(style, ood):
                for template in family.templates:
                    assert ("{all}" in template) != all(slot in template for slot in ("{o}", "{s}", "{d}"))

    def test_brackets_go_without_stops(self):
        two = [Place(1, "A", "X", 0.0, 0.0, 1), Place(2, "B", "Y", 0.0, 0.0, 1)]
        for seed in range(60):
            text, _ = phrasing.write(random.Random(seed), "full", bool(seed % 2), two, [False, True])
            assert not set("[]{}") & set(text) and "  " not in text and text.index("A") < text.rindex("B")


def test_invented_names_are_on_no_map_and_the_expert_finds_them():
    config = MINIATURE.model_copy(update={"random_names": 1.0, "random_coordinates": 0.5, "train_tasks": 60})
    map = Navigation.make_map(config)
    env = Navigation(config, 9)
    for task in Navigation.tasks(config, "train")[:40]:
        for old, new in task.data["names"].items():
            assert map.named(old) and not map.named(new)
            assert new in task.data["request"]

        async def play(task=task):
            await env.reset(task)
            assert [p.name for p in env.places] == list(task.data["names"].values())
            while (turn := env.expert()) is not None:
                await env.step(turn)

        asyncio.run(play())
        assert env.success
