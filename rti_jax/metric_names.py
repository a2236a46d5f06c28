"""What every metric means: the one table, from which docs/metrics.md is written.

python -m rti_jax.metric_names > docs/metrics.md
"""

import fnmatch
from collections.abc import Iterable

# Name or pattern -> meaning. A `*` stands for a name that a task, a role or a reason gives.
NAMES: dict[str, str] = {
    "rollout/pre_success": "share of valid on-policy episodes that succeeded, before any intervention",
    "rollout/pre_success_*": "the same for one kind of task, e.g. easy or hard",
    "rollout/pre_solved_groups": "share of groups with a success before intervention (Pass@G)",
    "rollout/post_success": "share of successes among the members that are trained, admitted episodes included",
    "rollout/post_solved_groups": "share of groups with a success after intervention",
    "rollout/groups": "groups that were rolled out",
    "rollout/groups_all_failed": "groups without a success: what triggers the intervention",
    "rollout/groups_all_solved": "groups whose every member succeeded: no gradient",
    "rollout/turns": "mean turns of a valid episode",
    "rollout/sampled_tokens": "tokens sampled in the step: valid rollouts, intervened episodes and roles",
    "rollout/tokens": "sampled tokens of valid episodes",
    "rollout/tool_calls": "tool calls of valid episodes that could be read (environments that offer tools)",
    "rollout/policy_calls": "turns that the policy sampled as the agent, in intervened and broken episodes too",
    "rollout/policy_prompt_tokens": "their prompt tokens",
    "rollout/policy_tokens": "their sampled tokens",
    "rollout/policy_seconds": "seconds of these requests, added up over concurrent ones",
    "rollout/rounds": "rounds of tasks that the step played (rollout.max_rounds)",
    "rollout/truncated": "episodes cut by sampling.max_context or a token limit; a failure unless configured otherwise",
    "rollout/environment_error": "episodes that the environment broke; not in any mean",
    "rollout/user_error": "episodes that the user simulator broke; not in any mean",
    "rollout/judge_error": "episodes that could not be graded; not in any mean",
    "rollout/timeout": "episodes that, or a call in which, took longer than its limit; not in any mean",
    "rollout/staleness": "updates between the weights that sampled the batch and those that it trains: 0 or 1 "
    "(rollout.staleness=1)",
    "rti/groups_triggered": "groups whose valid members all failed",
    "rti/attempts": "intervened episodes that were played",
    "rti/attempts_in_error": "of these, ended by the infrastructure",
    "rti/turns_validated": "turns that the validator judged",
    "rti/turns_flagged": "turns that it called invalid",
    "rti/validator_unreadable": "verdicts that could not be read (count as valid)",
    "rti/proposals": "rewrites that the corrector proposed",
    "rti/accepted": "rewrites that replaced a turn",
    "rti/leak_guard_found": "rewrites in which the deterministic guard found a value that only the evidence has",
    "rti/rejected_malformed": "rewrites that were empty, truncated or unparsable",
    "rti/rejected_unchanged": "rewrites equal to the original turn",
    "rti/rejected_inconsistent": "rejected by the verifier: does not lead to the gold path",
    "rti/rejected_leak": "rejected by the verifier: reveals privileged information",
    "rti/rejected_implausible": "rejected by the verifier: not what this policy would write",
    "rti/rejected_unreadable": "rejected since the verifier's verdict could not be read",
    "rti/rejected_leak_guard": "rejected by the deterministic guard",
    "rti/rejected_gate": "rejected by the gate during the episode (gate.scope=turn)",
    "rti/successes": "intervened episodes that succeeded",
    "rti/successes_uncorrected": "of these, without any correction (not trained unless rti.accept_uncorrected)",
    "rti/gate_admitted": "successes with corrections that passed the gate",
    "rti/gate_rejected": "successes that it rejected",
    "rti/replaced": "failed members that an admitted episode took the place of",
    "rti/perplexity_before_gate": "mean perplexity of corrected turns of successes under the rollout prompt",
    "rti/perplexity_before_gate_max": "the largest of them",
    "rti/perplexity_admitted": "their mean over admitted episodes",
    "rti/perplexity_rejected": "their mean over episodes that the gate rejected",
    "rti/turns_per_attempt": "mean turns of a valid intervened episode",
    "rti/tokens_per_attempt": "mean tokens of its turns, as they were played",
    "rti/turns_per_admitted": "mean turns of an admitted episode",
    "rti/corrected_turns_per_admitted": "of these, those that the corrector wrote",
    "rti/validator_precision": "share of flagged turns that were invalid, where the environment can tell",
    "rti/validator_recall": "share of invalid turns that were flagged, where the environment can tell",
    "rti/validator_precision_outcome": "share of failures among flagged intervened episodes without any correction",
    "rti/validator_recall_outcome": "share of flagged ones among failed intervened episodes without any correction",
    "rti/corrector_success": "share of first rewrites of invalid turns that win and give nothing away",
    "rti/proposals_revealing": "rewrites that give something privileged away, by the environment's scripted check",
    "rti/accepted_revealing": "of these, those that replaced a turn",
    "rti/admitted_revealing": "of these, those in admitted episodes",
    "rti/policy_tokens": "tokens that the policy sampled as the agent in intervened episodes, replaced turns included",
    "rti/*_calls": "calls of a role (validator, corrector, verifier)",
    "rti/*_prompt_tokens": "prompt tokens of a role",
    "rti/*_tokens": "tokens that a role sampled",
    "rti/*_seconds": "seconds of a role's calls, added up over concurrent ones",
    "batch/trajectories": "trajectories in the batch, those without a gradient included",
    "batch/microbatches": "micro-batches of an update",
    "batch/tokens": "tokens in the packed rows, padding excluded",
    "batch/trained_tokens": "tokens with a loss: the policy's, the corrector's, a teacher's",
    "batch/padding_fraction": "share of the packed rows that is padding",
    "batch/buckets": "row lengths (batch.buckets) that were used",
    "compile/programs": "programs of the update that this process has compiled since it started; constant once each "
    "shape was seen",
    "groups/dropped": "groups with fewer than two valid members: not trained",
    "groups/filtered": "groups without a gradient that were left out (loss.variant=dapo)",
    "groups/flat": "groups whose rewards are all equal: advantage 0, in the denominators",
    "loss/total": "loss of the update: policy term plus loss.kl_beta times the KL",
    "loss/policy": "clipped policy term, negated",
    "loss/kl": "KL to the reference by the k3 estimator, unweighted",
    "loss/entropy": "entropy of the trained tokens as aggregated, before loss.entropy_coef",
    "policy/tokens": "trained tokens that the policy wrote",
    "policy/clip_fraction": "share of them whose ratio was clipped",
    "policy/ratio": "their mean ratio; exactly 1 in a first update of samples of its own weights",
    "policy/approx_kl": "their mean k3 distance to the behaviour policy",
    "policy/weight": "their mean weight; 1 unless loss.mismatch_clip truncates",
    "policy/truncated": "share of them whose importance weight loss.mismatch_clip truncates",
    "policy/entropy": "mean entropy of the policy at them, in nats",
    "policy/grad_norm": "gradient norm of their part of the loss (steps with corrected tokens)",
    "corrector/tokens": "trained tokens of accepted corrections",
    "corrector/token_share": "their share of all trained tokens (lambda)",
    "corrector/trajectory_share": "share of trained trajectories that hold corrected turns (lambda by trajectories)",
    "corrector/clip_fraction": "share of them whose ratio was clipped",
    "corrector/ratio": "their mean ratio to the rollout prompt's log-probabilities",
    "corrector/approx_kl": "their mean k3 distance to the behaviour policy",
    "corrector/scorer_gap": "largest |cached score - this update's forward pass| of them (one mini-batch a step)",
    "corrector/weight": "their mean reasoning-shift weight w",
    "reweight/mean_copied": "mean w on tokens of corrections that the original turn has too",
    "reweight/min_copied": "least w on them",
    "reweight/max_copied": "largest w on them",
    "reweight/mean_edited": "mean w on the other tokens of corrections",
    "reweight/min_edited": "least w on them",
    "reweight/max_edited": "largest w on them",
    "corrector/entropy": "mean entropy of the policy at them, in nats",
    "corrector/grad_norm": "gradient norm of their part of the loss",
    "teacher/reverse_kl": "opd: mean of log pi_student - log pi_teacher over the trained tokens, before the update",
    "teacher/logprob": "opd: mean of log pi_teacher over them",
    "teacher/groups_triggered": "luffy: groups whose valid members all failed",
    "teacher/replaced": "luffy: failed members that a teacher's rollout took the place of",
    "teacher/missing": "luffy: failed groups for which the teacher had no success",
    "teacher/sampled_tokens": "luffy: tokens that the teacher sampled; not in rollout/sampled_tokens",
    "teacher/tokens": "luffy: trained tokens of the teacher's rollouts",
    "teacher/token_share": "luffy: their share of all trained tokens",
    "teacher/trajectory_share": "luffy: share of trained trajectories that are the teacher's",
    "teacher/probability": "luffy: mean probability that the policy gives them",
    "teacher/grad_norm": "luffy: gradient norm of their part of the loss",
    "mismatch/abs": "mean |engine - learner| log-probability of the policy's sampled tokens, before the update",
    "mismatch/max": "largest such gap",
    "mismatch/after_max": "largest gap on fresh samples of the new weights, after the weight sync",
    "optimizer/lr": "learning rate of the update",
    "optimizer/grad_norm": "global gradient norm, before clipping",
    "optimizer/update_norm": "global norm of the parameter change",
    "optimizer/skipped": "1 if the gradient was not finite and the update was left out",
    "optimizer/updates": "optimizer steps made in this step",
    "optimizer/idle": "optimizer steps left out since no group had a gradient",
    "time/other": "seconds of the step that no phase accounts for (metrics, transcripts, engines put to sleep), up to "
    "this line; with it the sum of time/* is the whole step",
    "time/*": "seconds of a phase: rollout, intervention or teacher, update (packing included), sync, probe; with "
    "rollout.staleness=1 rollout is what the step waits for its next batch after the update, help included",
    "overlap/sampling_seconds": "rollout.staleness=1: seconds in which the next batch was sampled, beside this update",
    "overlap/hidden_seconds": "of these, seconds in which the update ran; the others are in time/rollout",
    "run/sampled_tokens": "tokens that the run sampled so far (stop.tokens), broken and repeated episodes included",
    "run/wall_seconds": "seconds of the run so far, over its resumes (stop.hours); without the starts of vLLM",
    "alarms/constant_reward": "1 while no group has both a success and a failure (alarms.constant_reward)",
    "alarms/truncated": "1 while nearly all episodes are cut at a token limit (alarms.truncated)",
    "alarms/mismatch": "1 while engine and learner are far apart (alarms.mismatch)",
    "alarms/entropy": "1 while the policy's entropy is next to nothing (alarms.entropy)",
    "alarms/no_tool_calls": "1 while no tool call of the policy can be read (alarms.no_tool_calls)",
    "alarms/never_accepted": "1 while no correction is accepted (alarms.never_accepted)",
    "engine/retried_requests": "requests asked once more, since what was to answer them died, hung or was wrong",
    "engine/restarts": "vLLM engines and servers that were started again, with the weights of now",
    "engine/servers": "servers of engine.kind=server",
    "engine/servers_alive": "of these, those that serve at the end of the step",
    "engine/failures": "times that a server stopped to serve, whatever the reason",
    "engine/hung": "times that a server took longer than engine.request_timeout, or did not answer a look at it",
    "engine/garbage": "answers of servers that were none",
    "engine/busy": "answers of servers that had too much to do",
    "engine/queued_seconds": "seconds that requests waited for a place at a server, added up over concurrent ones",
    "engine/prefix_share": "share of prompt tokens whose prefix the chosen server had seen",
    "replay/loss": "mean of -log p over the answers of the replayed role transcripts (rti.replay)",
    "roles/*": "evals/roles_*.json in brief: how right each role is on held-out tasks (eval.roles)",
    "eval/*": "TensorBoard only: Pass@k and Pass^k by kind of task; evals/ holds the numbers with their intervals",
    "loss/supervised": "rti sft: weighted mean of -log p over all tokens",
    "loss/answers": "rti sft: mean of -log p over the tokens of assistant turns that are trained",
}

HEADER = """# Metrics

`metrics.jsonl` in the run folder has a line for each step: `{"step": 3, "group/name": value, ...}`. A value that is not
a finite number, e.g. a mean over nothing, is `null` or absent. TensorBoard files and the sinks of `logging.sinks`
have the same names (docs/observability.md). Counts are of one step and of all hosts. `rti report` draws them.

| name | meaning |
|---|---|
"""


def meaning(name: str) -> str | None:
    """What a metric means; exact names before patterns. None for a name that the table lacks."""
    if name in NAMES:
        return NAMES[name]
    return next(
        (text for pattern, text in NAMES.items() if "*" in pattern and fnmatch.fnmatchcase(name, pattern)), None
    )


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that the table lacks; `step` and `tokens` are columns, not metrics."""
    return sorted({n for n in names if n not in ("step", "tokens") and meaning(n) is None})


def table() -> str:
    """The text of docs/metrics.md."""
    return HEADER + "".join(f"| `{name}` | {text} |\n" for name, text in NAMES.items())


if __name__ == "__main__":
    print(table(), end="")
