"""The sections of a configuration: every key with its type, default and, in the comment beside it, its meaning.

Every default below is the paper's (Rollout-Time Intervention, arXiv 2610.13438) where it gives a number, marked
"paper"; a number that its summary does not give is marked "ours" and is a choice to be tuned. What sections ask of each
other is checked by `rti_jax.config.Config`, which holds them all.
"""

import math
from typing import Any, Literal

import pydantic


class Section(pydantic.BaseModel):
    """A group of keys. Strict: no coercion of "yes" to True or of 3.7 to 3, no unknown keys, no mutation."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Section):
    path: str = ""  # Hugging Face folder of the policy
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # compute; master weights are float32
    attention: Literal["auto", "blockwise", "cudnn", "splash"] = "auto"  # cuDNN on GPU, splash on TPU, else blockwise
    remat: Literal["none", "dots", "attention", "full", "offload"] = "full"  # kept for the backward pass, docs/plan.md
    scan_layers: bool = True  # one compiled layer for all; false unrolls (faster for tiny models on CPU)


class EnvConfig(pydantic.BaseModel):
    """Keys beside these belong to the environment, which checks them (its `Config` class)."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = "navigation"  # built-in name, or "package.module:Class"
    split: str = "train"  # the environment's split that is trained on
    max_turns: int = pydantic.Field(6, ge=1)  # paper: 6 in Navigation, 30 in tau2-bench

    @property
    def own(self) -> dict[str, Any]:
        """The environment's own keys."""
        return dict(self.model_extra or {})


class RolloutConfig(Section):
    groups_per_step: int = pydantic.Field(16, ge=1)  # ours
    group_size: int = pydantic.Field(8, ge=2)  # paper: G = 8
    mix: dict[str, float] = {}  # share of each task kind in a step, e.g. {hard: 0.5, easy: 0.5}; empty = as drawn
    concurrency: int = pydantic.Field(256, ge=1)  # episodes at once
    episode_timeout: float = pydantic.Field(600.0, gt=0)  # seconds; a slower episode is a `timeout`, not reward 0
    step_timeout: float = pydantic.Field(
        300.0, gt=0
    )  # seconds of one set-up, one answer or one score of the environment
    retries: int = pydantic.Field(1, ge=0)  # of an episode that ended in an infrastructure error
    max_rounds: int = pydantic.Field(1, ge=1)  # rounds of tasks in a step until groups_per_step have a gradient (dapo)
    truncated_is_failure: bool = True  # an episode cut by max_context counts as a failure (reward 0)
    staleness: int = pydantic.Field(0, ge=0, le=1)  # updates a batch is behind; 1 samples the next during the update
    tasks: str = ""  # train on these tasks of env.split only: a file with an id a line, e.g. of `rti select`


class SamplingConfig(Section):
    temperature: float = pydantic.Field(0.8, gt=0, allow_inf_nan=False)  # paper
    max_tokens: int = pydantic.Field(1024, ge=1)  # of one response; ours
    max_context: int = pydantic.Field(16384, ge=2)  # prompt + response; ours
    thinking: bool = True  # ours; false renders the empty thinking block
    top_p: float = 1.0  # below 1 (top_k > 0, min_p > 0) the sampled distribution is not the policy's: rejected
    top_k: int = 0
    min_p: float = 0.0

    @pydantic.model_validator(mode="after")
    def _neutral(self):
        for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, key) != neutral:
                raise ValueError(
                    f"{key}={getattr(self, key)} truncates the sampling distribution, so the sampled tokens' ratio to "
                    f"the policy would be biased; training rollouts need {key}={neutral}"
                )
        return self


class RoleConfig(Section):
    """One of the three roles. By default the policy's own engine plays it."""

    endpoint: str = ""  # OpenAI-compatible base URL; empty = the policy itself
    model: str = ""  # name at that endpoint; without an endpoint: a Hugging Face folder, played frozen
    temperature: float | None = pydantic.Field(None, ge=0)  # None = sampling.temperature; 0 = greedy
    max_tokens: int | None = pydantic.Field(None, ge=1)  # None = sampling.max_tokens


class RolesConfig(Section):
    validator: RoleConfig = RoleConfig(temperature=0.0)  # ours: judges decide greedily
    corrector: RoleConfig = RoleConfig()
    verifier: RoleConfig = RoleConfig(temperature=0.0)  # ours


class ReplayConfig(Section):
    rows: int = pydantic.Field(0, ge=0)  # packed rows of role transcripts learned after each update; 0 = off; ours
    row_length: int = pydantic.Field(384, ge=16)  # tokens of such a row
    leak_share: float = pydantic.Field(0.25, ge=0, le=1)  # as data.leak_share of rti sft


Control = Literal["none", "always_invalid", "never_invalid", "always_accept", "swapped_evidence"]


class RTIConfig(Section):
    enabled: bool = True  # false is plain GRPO
    attempts: int = pydantic.Field(1, ge=0)  # intervened rollouts per all-failed group; ours
    retries: int = pydantic.Field(1, ge=0)  # of a rejected correction at one turn; ours
    post_check: bool = True  # paper's ablation "w/o post-check" turns this off (takes the leak guard with it)
    leak_guard: bool = True  # deterministic guard, ours
    conceal: bool = True  # the corrector is told to conceal the evidence ("leak suppression")
    verify_leaks: bool = True  # the verifier judges leaks
    accept_uncorrected: bool = False  # a success without any correction replaces a member; ours (biased, so off)
    prompts: str = "default"  # role prompts: "default", "compact" (small models), or a folder of templates
    control: Control = "none"  # an experiment's control: a role that is not asked, or evidence of another task; ours
    roles: RolesConfig = RolesConfig()
    replay: ReplayConfig = ReplayConfig()  # also without rti.enabled, so that a baseline can replay the same

    @property
    def role_folders(self) -> dict[str, str]:
        """Role -> folder of the frozen model that plays it; roles of the policy and behind endpoints have none."""
        roles = {name: getattr(self.roles, name) for name in RolesConfig.model_fields}
        return {name: role.model for name, role in roles.items() if role.model and not role.endpoint}


class GateConfig(Section):
    delta: float = pydantic.Field(5.0, ge=0)  # paper: perplexity threshold 5; 0 rejects all, inf admits all
    scope: Literal["trajectory", "turn"] = "trajectory"  # ours


class ReweightConfig(Section):
    enabled: bool = True  # paper: reasoning-shift weights on corrected tokens; false is w = 1
    epsilon_cal: float = pydantic.Field(0.2, ge=0, lt=1)  # ours


class TeacherConfig(Section):
    """The teacher of a baseline: one of path, urls and rollouts. It has the policy's vocabulary."""

    path: str = ""  # Hugging Face folder; opd: scored by the learner, luffy: sampled by a vLLM of its own
    urls: list[str] = []  # vLLM servers of the teacher, e.g. [http://host:8000]
    rollouts: str = ""  # luffy: JSONL of its episodes, as `rti eval` writes it beside its result
    temperature: float | None = pydantic.Field(None, gt=0, le=100)  # of the teacher; None = sampling.temperature
    attempts: int = pydantic.Field(1, ge=1)  # luffy: episodes it plays for a failed group until one succeeds; ours


# What a variant or a baseline sets where the config does not.
LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28},
    "opd": {"aggregation": "token_mean"},
    "luffy": {"variant": "dr_grpo", "clip_low": 1.0, "clip_high": math.inf, "entropy_coef": 0.001},
}


class LossConfig(Section):
    variant: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"  # paper: GRPO; luffy sets dr_grpo
    baseline: Literal["none", "opd", "luffy"] = "none"  # on-policy distillation, or off-policy guidance; without rti
    teacher: TeacherConfig = TeacherConfig()
    aggregation: Literal["sequence_mean", "token_mean", "constant"] | None = None  # None = the variant's; opd sets it
    constant: float | None = pydantic.Field(
        None, gt=0
    )  # divisor of "constant"; None = sampling.max_tokens * trajectories (Dr. GRPO)
    clip_low: float = pydantic.Field(0.2, ge=0, le=1)  # paper: epsilon = 0.2; luffy sets 1 (no clip)
    clip_high: float = pydantic.Field(0.2, ge=0)  # paper; dapo sets 0.28, luffy inf (no clip)
    kl_beta: float = pydantic.Field(0.0, ge=0)  # ours: no KL by default
    entropy_coef: float = pydantic.Field(0.0, ge=0)  # bonus on the policy's entropy; luffy sets 0.001
    shaping: float = pydantic.Field(0.1, gt=0)  # luffy: gamma of p / (p + gamma) on the teacher's tokens
    behavior: Literal["recompute", "engine"] = "recompute"  # denominator of policy tokens' ratio; staleness sets engine
    mismatch_clip: float | None = pydantic.Field(
        None, gt=0
    )  # truncated importance sampling of engine/learner mismatch; None = off

    @property
    def on_every_token(self) -> bool:
        """Whether a term has a gradient on tokens without an advantage too, so that no row may be left out."""
        return bool(self.kl_beta or self.entropy_coef)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in (data.get("baseline"), data.get("variant")):
            data = (LOSS_DEFAULTS.get(name, {}) if isinstance(name, str) else {}) | data
        return data

    @pydantic.model_validator(mode="after")
    def _one_teacher(self):
        teacher = self.teacher
        given = [k for k in ("path", "urls", "rollouts") if getattr(teacher, k)]
        if self.baseline == "none" and given:
            raise ValueError(f"teacher.{given[0]} is given, but loss.baseline=none has no teacher; use opd or luffy")
        wanted = {"none": (), "opd": ("path", "urls"), "luffy": ("rollouts", "path", "urls")}[self.baseline]
        if wanted and (len(given) != 1 or given[0] not in wanted):
            names = " or ".join(f"loss.teacher.{k}" for k in wanted)
            raise ValueError(f"baseline={self.baseline} needs one of {names}, got {', '.join(given) or 'none'}")
        if self.baseline != "none" and self.variant == "gspo":
            raise ValueError(
                f"variant=gspo has one ratio per sequence; {self.baseline} needs one per token: use grpo or dr_grpo"
            )
        return self


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"  # muon: matrices by Muon, the rest by Adam (warm starts)
    lr: float = pydantic.Field(1e-6, gt=0, allow_inf_nan=False)  # paper
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # ours
    warmup_steps: int = pydantic.Field(0, ge=0)  # ours
    weight_decay: float = pydantic.Field(0.1, ge=0)  # paper
    b1: float = pydantic.Field(0.9, ge=0, lt=1)  # ours
    b2: float = pydantic.Field(0.98, ge=0, lt=1)  # ours
    clip_norm: float = pydantic.Field(1.0, gt=0)  # ours
    muon_lr: float = pydantic.Field(0.02, gt=0, allow_inf_nan=False)  # matrices, with name = muon
    offload: bool = False  # moments in the host's memory between updates
    minibatches: int = pydantic.Field(1, ge=1)  # optimizer steps per batch; ours (with one, the ratio is 1)


class BatchConfig(Section):
    buckets: list[pydantic.PositiveInt] = pydantic.Field(
        [1024, 4096, 16384], min_length=1
    )  # row lengths that are compiled; a longer trajectory is an error
    rows_per_microbatch: int = pydantic.Field(8, ge=1)  # rows of the longest bucket; shorter buckets hold more
    packing: bool = True  # several trajectories in a row; never changes the loss


class MeshConfig(Section):
    data: int = pydantic.Field(1, ge=1)  # replicas of the model
    fsdp: int = pydantic.Field(-1, ge=-1)  # -1 = all remaining devices
    tensor: int = pydantic.Field(1, ge=1)  # devices that share the heads and the mlp
    context: int = pydantic.Field(1, ge=1)  # devices that share the tokens of a row; divides every bucket


class EngineConfig(Section):
    kind: Literal["vllm", "server"] = "vllm"  # vllm: beside the learner; server: vLLM servers (docs/engines.md)
    urls: list[str] = []  # servers that run already, e.g. [http://host:8000]
    start: int = pydantic.Field(0, ge=0)  # servers that the trainer starts on its host, beside those of urls
    devices: list[str] = []  # CUDA_VISIBLE_DEVICES of each started server, e.g. ["4,5", "6,7"]; empty = all see all
    args: dict[str, Any] = {}  # passed to vLLM as they are
    memory_fraction: float = pydantic.Field(0.5, gt=0, le=1)  # of each GPU, beside the learner
    frozen_fraction: float = pydantic.Field(0.2, gt=0, le=1)  # the same for each engine of a teacher or a role; ours
    sleep: bool = False  # the engine gives its GPU memory to the learner during the update (vLLM's sleep mode)
    weight_transfer: Literal["auto", "shared_memory", "file", "nccl", "ipc"] = "auto"  # of new weights to the engine
    weights_dir: str = ""  # where weights are handed over; empty = shared memory (servers elsewhere: a shared folder)
    restarts: int = pydantic.Field(3, ge=0)  # of a vLLM that we started, between two weight updates
    restart_timeout: float = pydantic.Field(600.0, gt=0)  # seconds without any server before the run ends
    request_timeout: float = pydantic.Field(600.0, gt=0)  # seconds of one request, then another server is asked
    probe_seconds: float = pydantic.Field(10.0, gt=0)  # between two looks at a server; three times that is too slow
    max_in_flight: int | None = pydantic.Field(None, ge=1)  # requests at once on a server; None = what it runs at once


class PolicyEndpointConfig(Section):
    """Another model as the policy of `rti eval` and `rti select`, behind an OpenAI-compatible endpoint."""

    url: str = ""  # base URL, with /v1; empty = the policy is model.path. Training never plays an endpoint
    model: str = ""  # model name there; empty = its first
    key_variable: str = "RTI_POLICY_API_KEY"  # environment variable with the key; where it is not set, OPENAI_API_KEY
    concurrency: int = pydantic.Field(32, ge=1)  # episodes, and so requests, at once
    timeout: float = pydantic.Field(300.0, gt=0)  # seconds, of one request
    retries: int = pydantic.Field(5, ge=0)  # of a request; after that its episode is excluded
    extra_body: dict[str, Any] = {}  # more fields of the request; null leaves one of ours out, e.g. {seed: null}


class HostsConfig(Section):
    """The processes of a run on several hosts, one each (docs/clusters.md)."""

    coordinator: str = ""  # empty = this process alone; auto = SLURM, Open MPI, JobSet or TPU pod; or HOST:PORT
    processes: int | None = pydantic.Field(None, ge=1)  # with HOST:PORT (of process 0): how many there are
    process_id: int | None = pydantic.Field(None, ge=0)  # with HOST:PORT: which one this is, from 0
    start_timeout: int = pydantic.Field(300, ge=1)  # seconds to wait for the others at the start
    stall_timeout: float = pydantic.Field(1800.0, gt=0)  # seconds without a sign of life until a host counts as stuck

    @pydantic.model_validator(mode="after")
    def _complete(self):
        if self.coordinator in ("", "auto"):
            return self
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator={self.coordinator!r}: give HOST:PORT of process 0, or auto")
        if self.processes is None or self.process_id is None:
            raise ValueError("coordinator=HOST:PORT needs hosts.processes and hosts.process_id")
        if self.process_id >= self.processes:
            raise ValueError(f"process_id={self.process_id} of {self.processes} processes: they count from 0")
        return self


class EvalConfig(Section):
    every: int = pydantic.Field(0, ge=0)  # steps; 0 = only before and after
    trials: int = pydantic.Field(4, ge=1)  # paper: Pass@k and Pass^k, k = 1..4
    split: str = "test"  # held-out tasks
    splits: list[str] = []  # `rti eval`: several splits in one table, and their union; empty = split alone
    tasks: str = ""  # only these tasks of the split(s): a file with an id a line, e.g. of `rti select`
    limit: int | None = pydantic.Field(None, ge=1)  # tasks of each kind; None = all
    temperature: float | None = pydantic.Field(None, ge=0)  # None = sampling.temperature
    roles: int = pydantic.Field(0, ge=0)  # held-out tasks of each kind on which the three roles are measured as well
    keep_best: bool = False  # also keep the checkpoint of the best evaluation
    endpoint: PolicyEndpointConfig = PolicyEndpointConfig()


class StopConfig(Section):
    """What ends a run before its steps are done: a budget, or that it goes on but no longer learns."""

    tokens: int | None = pydantic.Field(None, ge=1)  # sampled in the steps of the run, all roles; null = no limit
    hours: float | None = pydantic.Field(None, gt=0, allow_inf_nan=False)  # wall time of the run, resumes included
    nonfinite_steps: int = pydantic.Field(5, ge=1)  # steps in a row whose gradient is not finite; ours
    dropped_steps: int = pydantic.Field(5, ge=1)  # steps in a row in which no group has two valid members; ours


class AlarmsConfig(Section):
    """What is warned of, and after how many in a row; null turns an alarm off. All numbers are ours."""

    constant_reward: int | None = pydantic.Field(10, ge=1)  # steps without a group that has successes and failures
    no_tool_calls: int | None = pydantic.Field(3, ge=1)  # steps without a readable tool call, where tools are offered
    never_accepted: int | None = pydantic.Field(50, ge=1)  # intervened episodes without an accepted correction
    steps: int = pydantic.Field(3, ge=1)  # of the alarms below
    truncated: float | None = pydantic.Field(0.9, gt=0, le=1)  # share of episodes that are cut at a token limit
    mismatch: float | None = pydantic.Field(0.1, gt=0)  # mean |engine - learner| log-probability, in nats
    entropy: float | None = pydantic.Field(0.001, gt=0)  # of the policy at its trained tokens, in nats: below it


class LoggingConfig(Section):
    """Where metrics go beside metrics.jsonl and TensorBoard (docs/observability.md)."""

    sinks: list[Literal["wandb", "trackio"]] = []  # Weights & Biases, Trackio; pip install "rti-jax[logging]"
    project: str = pydantic.Field("rti-jax", min_length=1)
    entity: str = ""  # wandb: user or team; empty = the account's default
    group: str = ""  # of runs, e.g. the seeds of one method
    tags: list[str] = []
    mode: Literal["online", "offline"] = "online"  # offline: on this machine alone, `wandb sync` sends it later
    space: str = ""  # trackio: a Hugging Face Space, or the URL of a Trackio server; empty = on this machine alone


class CheckpointConfig(Section):
    every: int = pydantic.Field(10, ge=1)  # steps
    minutes: float = pydantic.Field(30.0, gt=0)  # also when this much time has passed
    keep: int = pydantic.Field(2, ge=1)  # newest checkpoints that are kept
