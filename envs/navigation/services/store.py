"""The answers of map services in an SQLite file, for any number of processes.

SQLite with its default journal, and a connection for each access: nothing is held that a fork, a thread or an event
loop could spoil, and an access costs a fraction of a millisecond. An HTTP cache would not do: the URL holds the key,
and AMap's errors come with HTTP status 200.
"""

import contextlib
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator

from envs.navigation.services.request import ServiceError

WAIT = 30.0  # seconds for another process to finish writing


class Store:
    """Answers by the name of their request.

    Args:
      read_only: the file must be there, and is not changed.
    """

    def __init__(self, path: str, read_only: bool):
        self._path, self._read_only = pathlib.Path(path).absolute(), read_only
        self._ready = read_only

    def get(self, name: str) -> tuple[int, str] | None:
        """(HTTP status, body), or None if there is none."""
        with self._open() as database:
            row = database.execute("SELECT status, body FROM answers WHERE request = ?", (name,)).fetchone()
            return (row[0], zlib.decompress(row[1]).decode()) if row else None

    def put(self, name: str, status: int, body: str) -> None:
        """Keeps an answer. The first one stays, so that all processes see the same."""
        packed = zlib.compress(body.encode())
        with self._open() as database:
            database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, datetime())", (name, status, packed))

    def check(self) -> None:
        """Raises ServiceError if the file cannot be used."""
        self.get("")

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        mode = "ro" if self._read_only else "rwc"
        try:
            if not self._ready:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(f"{self._path.as_uri()}?mode={mode}", uri=True, timeout=WAIT)
            with contextlib.closing(connection) as database, database:
                if not self._ready:
                    database.execute(
                        "CREATE TABLE IF NOT EXISTS answers "
                        "(request TEXT PRIMARY KEY, status INTEGER, body BLOB, stored TEXT) WITHOUT ROWID"
                    )
                    self._ready = True
                yield database
        except (OSError, sqlite3.Error, zlib.error) as error:
            raise ServiceError("cache", f"{self._path}: {error}") from None
