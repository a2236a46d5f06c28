"""A domain of τ²-bench, loaded once a process: tasks, splits, schemas, policy, and templates of its databases."""

import copy
import dataclasses
import functools
import hashlib
import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import jsonschema
import pydantic

from envs.base import ToolCall
from envs.tau2 import expression, package
from envs.tau2.copy_on_write import Template

MESSAGE_LIMIT = 300  # characters of an error about an argument


class Domain:
    """What all episodes of a domain share, and nobody changes.

    Attributes:
      tasks: τ²'s tasks by id, in τ²'s order. splits: ids of each split.
      agent_prompt: the agent's system prompt.
      tools: schemas of the agent's tools in OpenAI format. user_tools: those of the user's device, by name.
      writes: names of the agent's tools that change a database.
    """

    def __init__(self, name: str):
        self.name = name
        source = package.module(f"domains.{name}.environment")
        try:
            example = source.get_environment()
            self.tasks: Mapping[str, Any] = {t.id: t for t in source.get_tasks(None)}
            self.splits: Mapping[str, list[str]] = dict(source.get_tasks_split())
        except OSError as error:
            raise package.MissingError(f"τ²-bench has no data of {name} ({error}); set TAU2_DATA_DIR") from error
        self.policy: str = example.get_policy()
        self.agent_prompt = package.agent_prompt(self.policy)
        self.tools: list[dict[str, Any]] = [t.openai_schema for t in example.get_tools()]
        device = example.get_user_tools() if example.user_tools else []
        self.user_tools: dict[str, dict[str, Any]] = {t.name: t.openai_schema for t in device}
        self.writes = frozenset(n for n in example.tools.tools if example.tools.tool_type(n).value == "write")
        self._make = source.get_environment
        self._arguments = {
            t["function"]["name"]: jsonschema.Draft202012Validator(t["function"]["parameters"]) for t in self.tools
        }
        self._databases = {"db": Template(example.tools.db)}
        if "user_db" in inspect.signature(source.get_environment).parameters:
            self._databases["user_db"] = Template(example.user_tools.db)
        kits = (example.tools, example.user_tools)
        self._class_state = [pickle.dumps(_class_state(type(kit))) for kit in kits]

    def world(self) -> Any:
        """A fresh environment of τ² that shares nothing mutable with another."""
        world = self._make(**{name: template.copy() for name, template in self._databases.items()})
        world.policy = self.policy  # τ² has read the file again: one text for all episodes is enough
        for kit, state in zip((world.tools, world.user_tools), self._class_state, strict=True):
            for name, value in pickle.loads(state).items():
                setattr(kit, name, value)
        return world

    def start(self, task: Any) -> Any:
        """A fresh environment in the state in which a task begins."""
        world, state = self.world(), task.initial_state
        if state is None:
            world.sync_tools()
        else:
            actions = state.initialization_actions and [_private(a) for a in state.initialization_actions]
            world.set_state(state.initialization_data, actions, state.message_history or [])
        return world

    def device_tools(self, task: Any) -> list[dict[str, Any]]:
        """Schemas of the tools of this task's user; none in domains whose user has no device."""
        chosen = getattr(task, "user_tools", None)  # upstream's release may name some
        return [schema for name, schema in self.user_tools.items() if chosen is None or name in chosen]

    def refusal(self, call: ToolCall) -> str | None:
        """Why a call of the agent must not reach the environment, or None.

        Unknown tools are left to τ², whose answer to them is an error as well.
        """
        if call.error is not None:
            return call.error
        if call.name in self._arguments:
            error = jsonschema.exceptions.best_match(self._arguments[call.name].iter_errors(call.arguments))
            if error is not None:
                where = "".join(f"{part}: " for part in error.absolute_path)
                return f"{where}{error.message}"[:MESSAGE_LIMIT]
        if call.name == "calculate":
            return expression.problem(call.arguments["expression"])
        return None


def respond(world: Any, call: Any) -> Any:
    """τ²'s answer to a tool call (its ToolMessage); what the call creates has the same ids in every run."""
    with _reproducible_bills(world):
        return world.get_response(call)


def replay(world: Any, action: Any) -> None:
    """A gold action as τ²'s evaluator plays it: without synchronising device and line. Raises what the tool raises."""
    with _reproducible_bills(world):
        world.make_tool_call(tool_name=action.name, requestor=action.requestor, **copy.deepcopy(action.arguments))


class _reproducible_bills:
    """τ² names a bill that it creates by a random uuid; here it is named by its customer and its place in the list."""

    def __init__(self, world: Any):
        self._db = world.tools.db
        self._known = len(getattr(self._db, "bills", ()))

    def __enter__(self):
        pass

    def __exit__(self, *_):
        for place, bill in enumerate(getattr(self._db, "bills", ())[self._known :], self._known):
            old, new = bill.bill_id, "B" + hashlib.sha256(f"{bill.customer_id}/{place}".encode()).hexdigest()[:8]
            bill.bill_id = new
            for customer in self._db.customers:
                customer.bill_ids = [new if b == old else b for b in customer.bill_ids]


def _private(action: Any) -> Any:
    """An action whose arguments a tool may keep in its database: lists and dicts of a task are everybody's."""
    holds = any(isinstance(v, list | dict) for v in action.arguments.values())
    return action.model_copy(deep=True) if holds else action


def _class_state(kit: type) -> dict[str, Any]:
    """Mutable values that a toolkit keeps on its class, where all episodes would share them (telecom's VPN details)."""
    merged: dict[str, Any] = {}
    for cls in reversed(kit.__mro__):
        merged |= {n: v for n, v in vars(cls).items() if not n.startswith("__") and not callable(v)}
    return {n: v for n, v in merged.items() if isinstance(v, pydantic.BaseModel | dict | list | set)}


@functools.cache
def load(name: str) -> Domain:
    """The domain of that name. Raises MissingError (a ValueError) where τ²-bench is not installed."""
    return Domain(name)


def split_ids(domain: Domain, split: str) -> list[str]:
    """Ids of a split as τ² defines it; "full-base" is what full has and base has not.

    Raises:
      ValueError: for a split that τ² does not define, or a difference that leaves nothing.
    """
    if split in domain.splits:
        return list(domain.splits[split])
    kept, minus, left_out = split.partition("-")
    for name in (kept, left_out) if minus else (split,):
        if name not in domain.splits:
            known = ", ".join(sorted(domain.splits))
            raise ValueError(f"τ²-bench's {domain.name} has the splits {known}, or a difference such as full-base")
    gone = set(domain.splits[left_out])
    ids = [i for i in domain.splits[kept] if i not in gone]
    if not ids:
        raise ValueError(f"every task of {kept} is in {left_out} as well")
    return ids


@dataclasses.dataclass(frozen=True)
class Step:
    """A gold action, and what goes wrong with it when it is played in its place ("" if nothing)."""

    action: Any
    error: str


@functools.lru_cache(maxsize=4096)
def gold_steps(domain: Domain, task_id: str) -> tuple[Step, ...]:
    """The gold actions of a task in order, with those marked that fail even when gold is played."""
    task = domain.tasks[task_id]
    message = package.module("data_model.message")
    world, steps = domain.start(task), []
    for i, action in enumerate((task.evaluation_criteria.actions if task.evaluation_criteria else None) or []):
        call = message.ToolCall(
            id=f"gold_{i}", name=action.name, arguments=copy.deepcopy(action.arguments), requestor=action.requestor
        )
        reply = respond(world, call)
        steps.append(Step(action, reply.content.removeprefix("Error: ") if reply.error else ""))
    return tuple(steps)
