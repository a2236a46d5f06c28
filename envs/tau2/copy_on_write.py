"""Private copies of a database that cost microseconds: records are shared until they are read by key.

A database of τ² is a pydantic model whose large fields are dicts of records (users, orders, flights). `Template.copy`
gives one whose large fields are `Records`: the shared dicts, except that a record is copied when it is looked up. Tools
change records only after they looked them up; iteration shows shared ones, which tools only read (a test checks
that the template stays as it was). `fingerprint` compares what two copies have changed, so it never reads the rest.
"""

import json
import pickle
from typing import Any

import pydantic

SMALL = 50  # a dict of fewer records is copied whole


class Records(dict):
    """A dict of records that belong to a template until they are looked up.

    Attributes:
      touched: keys whose record is private, new or deleted.
    """

    __slots__ = ("touched", "_shared")

    def __init__(self, shared: "Shared"):
        super().__init__(shared.records)
        self.touched: set[Any] = set()
        self._shared = shared

    def __getitem__(self, key):
        if key not in self.touched and key in self:
            self[key] = self._shared.record(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __setitem__(self, key, value):
        self.touched.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key):
        super().__delitem__(key)
        self.touched.add(key)

    def pop(self, key, *default):
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args, **kwargs):
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def popitem(self):
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self):
        self.touched.update(self)
        super().clear()

    def changes(self) -> dict[Any, str | None]:
        """Records that differ from the template's, as canonical text; None for a deleted one."""
        now = {k: canonical(super(Records, self).__getitem__(k)) if k in self else None for k in self.touched}
        return {k: text for k, text in now.items() if text != self._shared.canonical(k)}


class Shared:
    """The records of one field of a template, with a pickle and the canonical text of those that were needed."""

    def __init__(self, records: dict[Any, pydantic.BaseModel]):
        self.records = records
        self._pickles: dict[Any, bytes] = {}
        self._texts: dict[Any, str] = {}

    def record(self, key: Any) -> pydantic.BaseModel:
        """A private copy."""
        if key not in self._pickles:
            self._pickles[key] = pickle.dumps(self.records[key], pickle.HIGHEST_PROTOCOL)
        return pickle.loads(self._pickles[key])

    def canonical(self, key: Any) -> str | None:
        if key not in self.records:
            return None
        if key not in self._texts:
            self._texts[key] = canonical(self.records[key])
        return self._texts[key]


class Template:
    """A database that is copied for every episode and never changed."""

    def __init__(self, db: pydantic.BaseModel):
        self._type = type(db)
        fields = {name: getattr(db, name) for name in self._type.model_fields}
        self._shared = {name: Shared(value) for name, value in fields.items() if _large(value)}
        self._rest = pickle.dumps({n: v for n, v in fields.items() if n not in self._shared}, pickle.HIGHEST_PROTOCOL)

    def copy(self) -> Any:
        """A database that shares nothing mutable with any other copy."""
        large = {name: Records(shared) for name, shared in self._shared.items()}
        return self._type.model_construct(**large, **pickle.loads(self._rest))


def fingerprint(db: pydantic.BaseModel | None) -> Any:
    """Equal for two copies of a template exactly if τ²'s hashes of them are equal."""
    if db is None:
        return None
    large = {name for name in type(db).model_fields if isinstance(getattr(db, name), Records)}
    changes = {name: changed for name in sorted(large) if (changed := getattr(db, name).changes())}
    return changes, json.dumps(db.model_dump(exclude=large), sort_keys=True, default=str)


def canonical(record: Any) -> str:
    """A record as τ²'s hash reads it."""
    dumped = record.model_dump() if isinstance(record, pydantic.BaseModel) else record
    return json.dumps(dumped, sort_keys=True, default=str)


def _large(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) >= SMALL
        and all(isinstance(v, pydantic.BaseModel) for v in value.values())
    )
