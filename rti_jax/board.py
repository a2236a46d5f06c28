"""TensorBoard files, written in the caller's thread: a full disk is an error here, and not a thread that has died."""

import pathlib
import time

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar


class Board:
    """Scalars of a run.

    Args:
      folder: created if needed. step: from it on TensorBoard forgets what earlier files say.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"))
        self._events.write_event(Event(step=step, file_version="brain.Event:2"))
        self._events.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()
