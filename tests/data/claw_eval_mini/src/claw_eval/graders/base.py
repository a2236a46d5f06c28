"""Stand-in of the base of graders."""

import abc
import importlib.util
import inspect
import pathlib

TASKS = pathlib.Path(__file__).resolve().parents[3] / "tasks"


def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder / "grader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graders = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, AbstractGrader)]
    own = [c for c in graders if c.__module__ == name]
    return next(c for c in own if c is not AbstractGrader)


def load_peer_grader(task_id, tasks_dir=TASKS):
    return load(f"peer_grader_{task_id}", pathlib.Path(tasks_dir) / task_id)


class AbstractGrader(abc.ABC):
    @abc.abstractmethod
    def grade(self, messages, dispatches, task, audit_data=None, judge=None): ...

    @staticmethod
    def compute_robustness(dispatches):
        failed = {d.tool_name for d in dispatches if d.response_status >= 400}
        return 1.0 - len(failed) / max(1, len({d.tool_name for d in dispatches}))
