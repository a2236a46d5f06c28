"""Groups as a run recorded them: the inverse of `runs.write_groups`, for `rti view`, and for a checkpoint's next batch.

Intervened rollouts hold what the roles saw, evidence included. It comes back as `Intervention`s, from which no row of a
batch is made; training never reads the files of trajectories/.
"""

import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rti_jax.types import (
    Correction,
    GateDecision,
    Group,
    IntervenedRollout,
    Intervention,
    Proposal,
    RejectReason,
    Status,
    Trajectory,
    Turn,
)


def read_groups(path: pathlib.Path) -> tuple[list[Group], dict[str, float], list[str]]:
    """Groups in the order of the file, advantages by trajectory, and a note for each line that could not be read.

    An attempt is a member of its group exactly if the gate admitted it, as in the group that was written.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    advantages, notes = {}, []
    written = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    for number, text in enumerate(written.split("\n") if written else [], 1):  # JSON text may hold other line breaks
        try:
            line = json.loads(text)
            record = _record(line)
            trajectory = record["trajectory"]
            if line.get("advantage") is not None:
                advantages[trajectory.id] = float(line["advantage"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path.name}, line {number} cannot be read ({type(error).__name__}) and is left out")
            continue
        lines.setdefault(trajectory.group_id, []).append(record)
    return [_group(name, records) for name, records in lines.items()], advantages, notes


def groups(lines: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The groups of `runs.group_lines`, in order.

    Raises ValueError, KeyError, TypeError or AttributeError for something else.
    """
    records: dict[str, list[Mapping[str, Any]]] = {}
    for record in map(_record, lines):
        records.setdefault(record["trajectory"].group_id, []).append(record)
    return [_group(*each) for each in records.items()]


def _record(line: Mapping[str, Any]) -> dict[str, Any]:
    trajectory = read_trajectory(line)
    record = {"trajectory": trajectory, "replaced": bool(line.get("replaced"))}
    return record | {"attempt": _attempt(trajectory, line)} if "interventions" in line else record


def _group(name: str, records: Sequence[Mapping[str, Any]]) -> Group:
    attempts = tuple(r["attempt"] for r in records if "attempt" in r)
    outside = {a.trajectory.id for a in attempts if not (a.decision and a.decision.admitted)}
    members = [r["trajectory"] for r in records if not r["replaced"] and r["trajectory"].id not in outside]
    replaced = next((r["trajectory"] for r in records if r["replaced"]), None)
    return Group(name, records[0]["trajectory"].task_id, tuple(members), attempts, replaced)


def read_trajectory(line: Mapping[str, Any]) -> Trajectory:
    """The episode of a line; ValueError, KeyError, TypeError or AttributeError for something else."""
    return Trajectory(
        id=str(line["id"]),
        group_id=str(line["group_id"]),
        member=int(line["member"]),
        task_id=str(line["task_id"]),
        turns=tuple(map(_turn, line["turns"])),
        status=Status(line["status"]),
        reward=line["reward"],
        messages=tuple(dict(m) for m in line["messages"]),
        info=dict(line["info"]),
        replies=int(line.get("replies", 0)),
    )


def _turn(line: Mapping[str, Any]) -> Turn:
    ids = {key: tuple(line[key]) for key in ("prompt_ids", "response_ids")}
    correction = line["correction"] and Correction(
        tuple(line["correction"]["original_ids"]),
        *(_numbers(line["correction"][key]) for key in ("rollout_logprobs", "corrector_logprobs")),
    )
    return Turn(**{**line, **ids, "sampler_logprobs": _numbers(line["sampler_logprobs"]), "correction": correction})


def _attempt(trajectory: Trajectory, line: Mapping[str, Any]) -> IntervenedRollout:
    decision = line["decision"] and GateDecision(
        bool(line["decision"]["admitted"]), str(line["decision"]["reason"]), _numbers(line["decision"]["perplexities"])
    )
    return IntervenedRollout(trajectory, tuple(map(_intervention, line["interventions"])), decision)


def _intervention(line: Mapping[str, Any]) -> Intervention:
    return Intervention(**{**line, "proposals": tuple(map(_proposal, line["proposals"]))})


def _proposal(line: Mapping[str, Any]) -> Proposal:
    ids = {key: tuple(line[key]) for key in ("prompt_ids", "response_ids")}
    return Proposal(**{**line, **ids, "rejected": line["rejected"] and RejectReason(line["rejected"])})


def _numbers(values: Sequence[float | None] | None) -> tuple[float, ...] | None:
    """JSON has null for what was not finite, and for all of them where nothing was scored."""
    return None if values is None else tuple(math.nan if v is None else float(v) for v in values)
