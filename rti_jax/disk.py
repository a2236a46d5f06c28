"""A disk that is full: one line that names the folder and what is free, instead of a library's error."""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORDS = tuple(os.strerror(number) for number in FULL)  # libraries in C++ hand on no number


class DiskFullError(Exception):
    """Nothing more can be written to a folder; one line."""


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """For a body that writes to `path`, a file or a folder.

    Raises:
      DiskFullError: the disk, a quota or the limit on a file's size is reached; other errors are not touched.
    """
    try:
        yield
    except Exception as error:
        if not full(error):
            raise
        raise DiskFullError(describe(path)) from error


def full(error: BaseException) -> bool:
    """Whether an error, of the system or of a library, is that nothing more can be written."""
    return getattr(error, "errno", None) in FULL or any(word in str(error) for word in WORDS)


def describe(path: str | os.PathLike) -> str:
    """The line: where, how many bytes are free there, and what to do."""
    path = pathlib.Path(path).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    return (
        f"no space left to write {path.name} in {folder} ({free:,} bytes free there; a quota or a limit on file sizes "
        "may be lower): what was written whole before stays; make room, then the same command goes on"
    )
