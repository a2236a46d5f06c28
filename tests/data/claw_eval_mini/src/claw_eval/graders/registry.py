"""Stand-in of the graders' registry."""

import pathlib

from .base import load


def get_grader(task_id, tasks_dir="tasks", task_dir=None):
    folder = pathlib.Path(tasks_dir) / task_id
    return load(f"task_grader_{task_id}", folder if folder.is_dir() else pathlib.Path(task_dir))()
