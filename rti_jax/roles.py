"""The three roles of an intervened rollout: validator, corrector, verifier (RTI, 2610.13438; docs/intervention.md).

Each role is a model with a prompt: the visible conversation h_t, then one user message rendered from a template, then
the same generation prompt as h_t's. By default the policy itself plays all three on its own engine; another model may
play a role instead, a frozen checkpoint with the policy's vocabulary or one behind an endpoint. Templates are jinja2
files, `<style>/{validator,corrector,verifier}.j2`, of a built-in style (rti_jax/prompts/) or of a folder of the user's.
"""

import dataclasses
import json
import math
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from envs.base import Evidence, Message
from envs.chat_api import split_thinking
from rti_jax.chat import Chat, ParsedTurn
from rti_jax.config import ConfigError
from rti_jax.config_sections import RoleConfig, RTIConfig, SamplingConfig
from rti_jax.engine import Engine, GenerateRequest
from rti_jax.engine_errors import CutOffError
from rti_jax.rollout import TurnView
from rti_jax.types import ROLES, RejectReason, RoleUsage

STYLES = pathlib.Path(__file__).with_name("prompts")
_BRACES = re.compile(r'[{}]|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # a brace, or a string, which may be left open
_REJECTIONS = {r.value: r for r in (RejectReason.INCONSISTENT, RejectReason.LEAK, RejectReason.IMPLAUSIBLE)}


class Endpoint(Protocol):
    """Another model that plays a role: the conversation in OpenAI format in, the text of its answer out."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        temperature: float,
        max_tokens: int,
        seed: int | None = None,
    ) -> str: ...


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The validator's judgement. `text` and `reason` hold evidence."""

    flagged: bool
    readable: bool
    reason: str
    text: str


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A completion of the corrector; `prompt_ids` is h_corr and holds evidence."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    parsed: ParsedTurn


def added(parts: Sequence[Mapping[str, RoleUsage]]) -> dict[str, RoleUsage]:
    """What each role has cost on all hosts."""
    total = {role: RoleUsage() for part in parts for role in part}
    for part in parts:
        for role, usage in total.items():
            usage.add(part[role])
    return total


class RolePrompts:
    """The user messages of the three roles.

    Args:
      style: "default", "compact" (small models, which were warm-started on it), or a folder of templates.
      conceal: tell the corrector to hide the evidence (`rti.conceal`).
      verify_leaks: give the verifier its leak criterion (`rti.verify_leaks`).

    Raises:
      ConfigError: for a style that is neither built in nor a folder, or a missing or broken template.
    """

    def __init__(self, style: str = "default", *, conceal: bool = True, verify_leaks: bool = True):
        folder = STYLES / style if (STYLES / style).is_dir() else pathlib.Path(style)
        if not folder.is_dir():
            known = ", ".join(sorted(p.name for p in STYLES.iterdir()))
            raise ConfigError(f"rti.prompts={style!r} is neither a built-in style ({known}) nor a folder of templates")
        loader = SandboxedEnvironment(
            loader=jinja2.FileSystemLoader(folder),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )
        try:
            self._templates = {role: loader.get_template(f"{role}.j2") for role in ROLES}
        except jinja2.TemplateNotFound as error:
            raise ConfigError(f"rti.prompts: {folder} has no {error.name}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"rti.prompts: {folder}/{error.name}, line {error.lineno}: {error.message}") from error
        self._switches = {"conceal": conceal, "verify_leaks": verify_leaks}

    def validator(self, evidence: str, proposed: str, rules: str = "") -> str:
        """Asks whether `proposed`, the plain text of y, is likely to derail success."""
        return self._render("validator", evidence=evidence, proposed=proposed, rules=rules)

    def corrector(self, evidence: str, proposed: str, reason: str, rules: str = "") -> str:
        """Asks for the turn itself, minimally rewritten, as the whole completion."""
        return self._render("corrector", evidence=evidence, proposed=proposed, reason=reason, rules=rules)

    def verifier(self, evidence: str, proposed: str, replacement: str, rules: str = "") -> str:
        """Asks whether `replacement`, thinking included, may stand."""
        return self._render("verifier", evidence=evidence, proposed=proposed, replacement=replacement, rules=rules)

    def _render(self, role: str, **values: str) -> str:
        try:
            return self._templates[role].render(**values, **self._switches).strip()
        except jinja2.TemplateError as error:  # a name that is not there, or what a sandbox does not allow
            raise ConfigError(f"rti.prompts: template {role}.j2: {error.message}") from error


def connect(config: RTIConfig) -> dict[str, Endpoint]:
    """A client for each role whose config names an endpoint."""
    from rti_jax.endpoints import ChatEndpoint

    roles = {role: role_config(config, role) for role in ROLES}
    return {role: ChatEndpoint(c.endpoint, c.model) for role, c in roles.items() if c.endpoint}


def role_config(config: RTIConfig, role: str) -> RoleConfig:
    """The section `rti.roles.ROLE`."""
    return getattr(config.roles, role)


class Roles:
    """Plays the three roles.

    Args:
      endpoints: another model per role name, for the roles whose config names an endpoint.
      engines: of other models per role name, for the roles whose config names a folder (rti_jax/frozen.py).

    Raises:
      ConfigError: if a role's config names an endpoint or a folder and none is given.
    """

    def __init__(
        self,
        chat: Chat,
        engine: Engine,
        sampling: SamplingConfig,
        config: RTIConfig,
        endpoints: Mapping[str, Endpoint] | None = None,
        engines: Mapping[str, Engine] | None = None,
    ):
        self.chat = chat
        self.engine = engine
        self.sampling = sampling
        self.config = config
        self.prompts = RolePrompts(config.prompts, conceal=config.conceal, verify_leaks=config.verify_leaks)
        self.usage = {role: RoleUsage() for role in ROLES}
        self._endpoints, self._engines = dict(endpoints or {}), dict(engines or {})
        for role in ROLES:
            own = role_config(self.config, role)
            if own.endpoint and role not in self._endpoints:
                raise ConfigError(f"rti.roles.{role}.endpoint={own.endpoint} has no client to reach it with")
            if config.enabled and role in config.role_folders and role not in self._engines:
                raise ConfigError(f"rti.roles.{role}.model={own.model} has no engine that serves it")

    async def validate(self, view: TurnView, evidence: Evidence, rules: str, proposed: str, seed: int) -> Verdict:
        """Step 2: is y likely to derail success? An unreadable verdict counts as valid."""
        text = self.prompts.validator(evidence.text, proposed, rules)
        return read_validator(await self._answer("validator", view, text, seed))

    async def correct(
        self, view: TurnView, evidence: Evidence, rules: str, proposed: str, reason: str, seed: int
    ) -> Replacement:
        """Step 3: the replacing turn, token for token the corrector's completion."""
        message = self.prompts.corrector(evidence.text, proposed, reason, rules)
        prompt_ids = self.chat.ask(view.prompt_ids, message)
        if endpoint := self._endpoints.get("corrector"):
            answer = await self._ask_endpoint("corrector", endpoint, view, message, seed)
            ids = self.chat.encode_text(answer)
            logprobs, version = (math.nan,) * len(ids), self.engine.version  # not a sample of the policy's
        else:
            ids, logprobs, version = await self._sample("corrector", prompt_ids, seed)
        if "corrector" in self._engines:  # not a sample of the policy's either
            logprobs, version = (math.nan,) * len(ids), self.engine.version
        return Replacement(prompt_ids, ids, logprobs, version, self.chat.parse(view.prompt_ids, ids, view.tools))

    async def verify(
        self, view: TurnView, evidence: Evidence, rules: str, proposed: str, replacement: str, seed: int
    ) -> tuple[RejectReason | None, str]:
        """Step 4: (None or why the replacement is rejected, the verifier's text). An unreadable verdict rejects."""
        text = self.prompts.verifier(evidence.text, proposed, replacement, rules)
        answer = await self._answer("verifier", view, text, seed)
        return read_verifier(answer, self.config.verify_leaks), answer

    def pop_usage(self) -> dict[str, RoleUsage]:
        """What each role has cost since the last call."""
        usage, self.usage = self.usage, {role: RoleUsage() for role in ROLES}
        return usage

    async def _answer(self, role: str, view: TurnView, message: str, seed: int) -> str:
        """A judge's answer after its thinking."""
        if endpoint := self._endpoints.get(role):
            _, answer, opened = split_thinking(await self._ask_endpoint(role, endpoint, view, message, seed))
            return "" if opened else answer
        prompt_ids = self.chat.ask(view.prompt_ids, message)
        ids, _, _ = await self._sample(role, prompt_ids, seed)
        return self.chat.parse(prompt_ids, ids).body

    async def _ask_endpoint(self, role: str, endpoint: Endpoint, view: TurnView, message: str, seed: int) -> str:
        """The answer's text, thinking included; empty, which no role's answer may be, if it was cut off."""
        started = time.monotonic()
        try:
            answer = await endpoint.complete(
                [*view.messages, {"role": "user", "content": message}],
                view.tools if role == "corrector" else (),  # a judge has nothing to call
                temperature=self._temperature(role),
                max_tokens=self._max_tokens(role),
                seed=seed,
            )
        except CutOffError:  # where its thinking ends cannot be known
            answer = ""
        self._count(role, 0, 0, started)
        return answer

    async def _sample(self, role: str, prompt_ids, seed: int) -> tuple[tuple[int, ...], tuple[float, ...], int]:
        """(ids, log-probabilities, weights version); no ids where the context has no room left for an answer."""
        started = time.monotonic()
        room = self.sampling.max_context - len(prompt_ids)
        if room < 1:
            return (), (), self.engine.version
        result = await self._engines.get(role, self.engine).generate(
            GenerateRequest(
                prompt_ids=tuple(prompt_ids),
                max_tokens=min(self._max_tokens(role), room),
                temperature=self._temperature(role),
                seed=seed,
                stop_token_ids=self.chat.stop_ids,
                role=role,
            )
        )
        self._count(role, len(prompt_ids), len(result.ids), started)
        return result.ids, result.logprobs, result.policy_version

    def _temperature(self, role: str) -> float:
        own = role_config(self.config, role).temperature
        return self.sampling.temperature if own is None else own

    def _max_tokens(self, role: str) -> int:
        return role_config(self.config, role).max_tokens or self.sampling.max_tokens

    def _count(self, role: str, prompt_tokens: int, tokens: int, started: float) -> None:
        self.usage[role].add(RoleUsage(1, prompt_tokens, tokens, time.monotonic() - started))


def last_json_object(text: str) -> dict[str, Any] | None:
    """The last JSON object of a text that is not inside another one, or None.

    What is inside a broken object is not looked at: a verdict that it quotes is not its verdict.
    """
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    while at != -1:
        try:
            found, end = decoder.raw_decode(text, at)
        except RecursionError:
            return None  # nested without end, and so is what it holds
        except ValueError:
            end = _closing(text, at)
        at = text.find("{", end)
    return found


def _closing(text: str, start: int) -> int:
    """Where what begins with the brace at `start` ends (braces in strings not counted), or the text if it is open."""
    depth = 0
    for token in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)


def read_validator(text: str) -> Verdict:
    """Reads {"expected": ..., "verdict": "valid"|"invalid", "reason": ...}; the reason falls back to `expected`."""
    answer = last_json_object(text) or {}
    verdict = _word(answer.get("verdict"))
    flagged = verdict == "invalid"
    reason = answer.get("reason") or answer.get("expected") or ""
    if not isinstance(reason, str):
        reason = json.dumps(reason, ensure_ascii=False)
    return Verdict(flagged, verdict in ("valid", "invalid"), reason if flagged else "", text)


def read_verifier(text: str, verify_leaks: bool = True) -> RejectReason | None:
    """Reads {"verdict": "accept"|"reject", "reason": "inconsistent"|"leak"|"implausible"}.

    A rejection without a known reason is unreadable. With `verify_leaks` off the leak criterion is not asked for, so
    a rejection that names nothing else is none.
    """
    answer = last_json_object(text) or {}
    verdict = _word(answer.get("verdict"))
    if verdict == "accept":
        return None
    reason = _REJECTIONS.get(_word(answer.get("reason")))
    if verdict != "reject" or reason is None:
        return RejectReason.UNREADABLE
    return None if reason is RejectReason.LEAK and not verify_leaks else reason


def _word(value: Any) -> str:
    return value.strip().lower() if isinstance(value, str) else ""
