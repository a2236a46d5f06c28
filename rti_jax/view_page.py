"""The page of `rti view`: groups, episodes and interventions as what the template shows.

Everything that a model, a tool or an environment wrote is plain text here and is escaped by the template. Beyond
that, the page's Content-Security-Policy lets only its own script run, by hash, and nothing be loaded.
"""

import base64
import dataclasses
import hashlib
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from rti_jax.config import Config
from rti_jax.gate import GateReason, passes
from rti_jax.types import Group, IntervenedRollout, Intervention, Proposal, RejectReason, Status, Trajectory, Turn
from rti_jax.view_tokens import LEVELS, SURE, Piece, Tokens, level

TEMPLATES = pathlib.Path(__file__).with_name("templates")

REJECTED = {
    RejectReason.MALFORMED: "empty, cut off or unparsable",
    RejectReason.UNCHANGED: "the corrector repeated the turn",
    RejectReason.INCONSISTENT: "verifier: does not lead to the goal",
    RejectReason.LEAK: "verifier: reveals privileged information",
    RejectReason.IMPLAUSIBLE: "verifier: not what this policy would write",
    RejectReason.UNREADABLE: "the verifier's verdict could not be read",
    RejectReason.LEAK_GUARD: "leak guard: has a value that only the evidence has",
    RejectReason.GATE: "perplexity at or above the gate's limit",
}
DECISIONS = {
    GateReason.ADMITTED: "admitted",
    GateReason.FAILED: "not admitted: the episode did not succeed",
    GateReason.UNCORRECTED: "not admitted: it succeeded without a correction",
    GateReason.NON_FINITE: "not admitted: a perplexity is not finite",
    GateReason.PERPLEXITY: "not admitted: a perplexity is at or above the limit",
}
MARKS = {Status.SUCCESS: "✓", Status.FAILURE: "✗", Status.TRUNCATED: "…"}


@dataclasses.dataclass(frozen=True)
class Side:
    """A run's part of the page: all that it `recorded` in a step, and the `groups` of it that are wanted."""

    name: str
    folder: pathlib.Path
    step: int
    config: Config
    recorded: Sequence[Group]
    groups: Sequence[Group]
    advantages: Mapping[str, float]
    notes: Sequence[str]


def page(sides: Sequence[Side], limit: int, asked: str = "", evaluation: bool = False) -> tuple[str, str]:
    """(HTML, what it shows in a line).

    Args:
      limit: rows (groups, or tasks of two runs) at most. asked: the filter in words, "" for none.
    """
    writers = [Writer(side, *_tokenizer(side)) for side in sides]
    rows = list(_rows(sides))
    shown = [
        {
            "task": task,
            "request": _request(groups),
            "sides": [w.groups(g) for w, g in zip(writers, groups, strict=True)],
        }
        for task, groups in rows[:limit]
    ]
    for row in shown:
        every = [g for side in row["sides"] for g in side]
        row["rti"] = " ".join(sorted({kind for g in every for kind in g["rti"]})) or "none"
    what = "step " + " and ".join(dict.fromkeys(str(s.step) for s in sides))
    what += f", {len(shown)} of {len(rows)} {'groups' if len(sides) == 1 else 'tasks'}"
    names = [s.name for s in sides]
    labels = names if len(set(names)) == len(names) else [str(s.folder) for s in sides]
    epsilon = sides[0].config.reweight.epsilon_cal
    script = (TEMPLATES / "view.js").read_text(encoding="utf-8")
    text = _template().render(
        title=f"rti view: {', '.join(labels)}, {what}",
        kind="evaluation after step" if evaluation else "step",
        heads=[w.head(label) for w, label in zip(writers, labels, strict=True)],
        rows=shown,
        hidden=len(rows) - len(shown),
        limit=len(rows),
        asked=asked,
        outcomes=_outcomes(sides),
        scale=[level(1 + n / LEVELS * epsilon, epsilon) for n in range(-LEVELS, LEVELS + 1)],
        sure=SURE,
        style=markupsafe.Markup((TEMPLATES / "view.css").read_text(encoding="utf-8")),
        script=markupsafe.Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return text, what


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    return environment.get_template("view.html.j2")


def _rows(sides: Sequence[Side]) -> Iterable[tuple[str, list[list[Group]]]]:
    """(task, groups of each side): a row for each group of one run, for each task of two."""
    if len(sides) == 1:
        return [(g.task_id, [[g]]) for g in sides[0].groups]
    tasks = dict.fromkeys(g.task_id for side in sides for g in side.groups if g.attempts)
    tasks |= dict.fromkeys(g.task_id for side in sides for g in side.groups)
    return [(task, [[g for g in side.groups if g.task_id == task] for side in sides]) for task in tasks]


def _request(sides: Sequence[Sequence[Group]]) -> str:
    """The first thing a user says in the first episode."""
    for episode in (t for groups in sides for g in groups for t in _episodes(g)):
        for message in episode.messages:
            if message.get("role") == "user":
                return _content(message)[:300]
    return ""


def _episodes(group: Group) -> list[Trajectory]:
    attempts = [a.trajectory for a in group.attempts if a.trajectory.id not in {t.id for t in group.trajectories}]
    return [*group.trajectories, *filter(None, [group.replaced]), *attempts]


def _outcomes(sides: Sequence[Side]) -> dict[str, int]:
    counts = Counter(t.status for side in sides for g in side.groups for t in _episodes(g))
    return {str(status): counts[status] for status in Status if counts[status]}


def _tokenizer(side: Side) -> tuple[Any, str]:
    """(tokenizer, note): of the model the run started from, or of what the run exported."""
    from tokenizers import Tokenizer

    folders = [pathlib.Path(side.config.model.path or "."), side.folder / "export", side.folder / "best"]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            try:
                return Tokenizer.from_file(str(folder / "tokenizer.json")), ""
            except Exception as error:  # the library raises plain Exception
                return None, f"{folder}/tokenizer.json cannot be read ({error}); coloured tokens are shown as ids"
    return None, f"no tokenizer.json in {', '.join(map(str, folders))}; coloured tokens are shown as ids"


class Writer:
    """Turns a side's records into what the template shows."""

    def __init__(self, side: Side, tokenizer: Any, note: str):
        self.side = side
        self.tokens = Tokens(tokenizer, side.config.reweight.epsilon_cal)
        self.notes = [*side.notes, *filter(None, [note])]
        self.delta = side.config.gate.delta

    def head(self, label: str) -> dict[str, Any]:
        """The run's line at the top of the page; counts are of the entire step."""
        groups = self.side.recorded
        before = [t for g in groups for t in (*g.trajectories, *filter(None, [g.replaced])) if t.member >= 0]
        attempts = [a for g in groups for a in g.attempts]
        return {
            "label": label,
            "step": self.side.step,
            "groups": len(groups),
            "episodes": len(before),
            "success": sum(t.success for t in before),
            "attempts": len(attempts),
            "admitted": sum(bool(a.decision and a.decision.admitted) for a in attempts),
            "epsilon": self.tokens.epsilon,
            "reweighted": self.side.config.reweight.enabled,
            "notes": self.notes,
        }

    def groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        return [self.group(g) for g in groups]

    def group(self, group: Group) -> dict[str, Any]:
        """A group: what all episodes begin with, members with the replaced one last, and attempts."""
        episodes = _episodes(group)
        shared = _shared([_opening(t) for t in episodes])
        full = next((g for g in self.side.recorded if g.id == group.id), group)
        members = [*group.trajectories, *filter(None, [group.replaced])]
        return {
            "id": group.id,
            "opening": [_message(m) for m in episodes[0].messages[:shared]],
            "members": [self.member(t, t is group.replaced, shared) for t in members],
            "attempts": [self.attempt(a, shared, group.replaced) for a in group.attempts],
            "success": sum(t.success for t in full.trajectories),
            "size": len(full.trajectories),
            "rti": {"admitted" if a.decision and a.decision.admitted else "refused" for a in group.attempts},
        }

    def member(self, episode: Trajectory, replaced: bool, shared: int) -> dict[str, Any]:
        return self._episode(episode) | {
            "replaced": replaced,
            "advantage": self.side.advantages.get(episode.id),
            "items": self._items(episode, shared),
        }

    def _episode(self, episode: Trajectory) -> dict[str, Any]:
        return {
            "name": _name(episode),
            "id": episode.id,
            "intervened": episode.member < 0,
            "status": str(episode.status),
            "mark": MARKS.get(episode.status, "!"),
            "reward": episode.reward,
            "info": ", ".join(f"{key} {_plain(value)}" for key, value in episode.info.items()),
        }

    def _items(self, episode: Trajectory, shared: int) -> list[dict[str, Any]]:
        """Messages after the shared ones; assistant messages that were sampled are turns, counted from the end, since
        an environment may open a dialogue in the assistant's name."""
        assistants = [i for i, m in enumerate(episode.messages) if m.get("role") == "assistant"]
        turns = dict(zip(assistants[len(assistants) - len(episode.turns) :], episode.turns, strict=False))
        items = []
        for i, message in list(enumerate(episode.messages))[shared:]:
            turn = turns.get(i)
            items.append(_message(message) if turn is None else self.turn(turn, _content(message)))
        return items

    def turn(self, turn: Turn, text: str) -> dict[str, Any]:
        """A turn as sampled; its message's text where there is no tokenizer."""
        if turn.correction:
            pieces = self.tokens.weighted(turn, text)
        else:
            pieces = self.tokens.sampled(turn) if self.tokens.tokenizer else [Piece(text)]
        return {
            "role": "corrected" if turn.correction else "turn",
            "id": turn.id,
            "turn": True,
            "corrected": bool(turn.correction),
            "pieces": pieces,
            "cut": turn.finish_reason == "length",
            "tokens": len(turn.response_ids),
        }

    def attempt(self, attempt: IntervenedRollout, shared: int, replaced: Trajectory | None) -> dict[str, Any]:
        """An intervened episode turn by turn, with what the roles said."""
        said = {i.turn_id: i for i in attempt.interventions}
        turns = {t.id: t for t in attempt.trajectory.turns}
        items = self._items(attempt.trajectory, shared)
        for item in items:
            if item["turn"] and item["id"] in said:
                item["intervention"] = self.intervention(said.pop(item["id"]), turns[item["id"]])
        items += [  # turns that were judged and not played: the episode broke off
            {"turn": True, "id": i.turn_id, "pieces": [], "intervention": self.intervention(i, None)}
            for i in said.values()
        ]
        decision = attempt.decision
        admitted = bool(decision and decision.admitted)
        return self._episode(attempt.trajectory) | {
            "items": items,
            "admitted": admitted,
            "decision": DECISIONS.get(decision.reason, decision.reason) if decision else "not decided",
            "perplexities": [_number(p) for p in decision.perplexities] if decision else [],
            "delta": self.delta,
            "took": f"member {replaced.member}" if admitted and replaced else "",
            "advantage": self.side.advantages.get(attempt.trajectory.id),
        }

    def intervention(self, said: Intervention, turn: Turn | None) -> dict[str, Any]:
        """The original turn and each proposal beside it."""
        original = turn.correction.original_ids if turn and turn.correction else turn.response_ids if turn else ()
        last = said.accepted or (said.proposals[-1] if said.proposals else None)
        perplexity = turn.correction.perplexity if turn and turn.correction else math.nan
        return {
            "flagged": said.flagged,
            "readable": said.readable,
            "reason": said.reason,
            "validator": said.validator_text,
            "valid": said.valid,
            "original": self.tokens.compared(
                original, last.response_ids if last else original, said.original_text, "gone"
            ),
            "proposals": [self.proposal(p, original, turn) for p in said.proposals],
            "accepted": said.accepted is not None,
            "perplexity": None if math.isnan(perplexity) else perplexity,
            "passes": not math.isnan(perplexity) and passes(perplexity, self.delta),
            "delta": self.delta,
        }

    def proposal(self, proposal: Proposal, original: Sequence[int], turn: Turn | None) -> dict[str, Any]:
        accepted = proposal.rejected is None and turn is not None and turn.correction is not None
        history = _shared([turn.prompt_ids, proposal.prompt_ids]) if turn else 0
        return {
            "accepted": proposal.rejected is None,
            "rejected": str(proposal.rejected or ""),
            "why": REJECTED.get(proposal.rejected, ""),
            "detail": proposal.detail,
            "verifier": proposal.verifier_text,
            "wins": proposal.wins,
            "reveals": proposal.reveals,
            "pieces": self.tokens.weighted(turn, proposal.text)
            if accepted
            else self.tokens.compared(proposal.response_ids, original, proposal.text, "new"),
            "prompt": self.tokens.decode(proposal.prompt_ids[history:]),
        }


def _opening(episode: Trajectory) -> list[Any]:
    """Messages before the first sampled turn."""
    assistants = [i for i, m in enumerate(episode.messages) if m.get("role") == "assistant"]
    first = len(assistants) - len(episode.turns)
    return list(episode.messages[: assistants[first] if 0 <= first < len(assistants) else None])


def _shared(rows: Sequence[Sequence[Any]]) -> int:
    """Length of what all of them begin with."""
    same = 0
    for values in zip(*rows, strict=False):
        if any(value != values[0] for value in values):
            break
        same += 1
    return same


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, name = str(message.get("role", "?")), message.get("name")
    return {"turn": False, "role": f"{role} {name}" if name else role, "text": _content(message)}


def _content(message: Mapping[str, Any]) -> str:
    """What a message says, calls included, as text."""
    parts = [message.get("reasoning_content"), message.get("content")]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else call
        name = isinstance(function, Mapping) and "name" in function
        parts.append(f"{function['name']}({_plain(function.get('arguments', ''))})" if name else _plain(call))
    return "\n".join(_plain(part) for part in parts if part)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: float | None) -> str:
    return "?" if value is None or math.isnan(value) else f"{value:.3g}"


def _name(episode: Trajectory) -> str:
    """What an episode is in its group."""
    if episode.member >= 0:
        return f"member {episode.member}"
    return "teacher's rollout" if any(t.teacher for t in episode.turns) else f"intervened, attempt {-episode.member}"
