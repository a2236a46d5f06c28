"""A process that plays jobs of a study, one after another, on one engine; started by rti_jax/reproduce.py.

    python -m rti_jax.study_worker [CPU]

A line of JSON on standard input is a job, a line on standard output says how it ended; the end of the input, also in
the middle of a job, ends the process after its last whole step is saved. CPU pins it, with its vLLM, to that core:
rollouts and updates take turns in one run, so two pinned runs fill two cores better than one run does.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

from rti_jax import redaction
from rti_jax.config import Config, ConfigError
from rti_jax.study import FINAL


class SharedEngines:
    """The engines of the jobs so far: the policy's, and those of frozen models by their folder.

    All are started anew when a job asks for other settings.
    """

    def __init__(self):
        self._key, self._policy, self._frozen, self._stack = "", None, {}, contextlib.AsyncExitStack()

    async def policy(self, config: Config) -> Any:
        """An engine that suits the config, with the weights of whichever run came before."""
        from rti_jax.engine import make_engine

        sampling, model = config.sampling, config.model
        key = f"{model.path} {model.dtype} {sampling.max_context} {config.rollout.concurrency} {config.engine}"
        if key != self._key:
            await self.close()
            self._policy, self._key = await asyncio.to_thread(make_engine, model.path, config), key
        return self._policy

    async def frozen(self, config: Config) -> dict[str, Any]:
        """Key of the config -> engine, for a teacher and for stronger models in roles. Call `policy` before."""
        from rti_jax import frozen

        for folder in config.frozen_folders.values():
            if folder not in self._frozen:
                self._frozen |= await self._stack.enter_async_context(frozen.serving({folder: folder}, config))
        return {key: self._frozen[folder] for key, folder in config.frozen_folders.items()}

    async def close(self) -> None:
        policy, self._policy, self._key, self._frozen = self._policy, None, "", {}
        await self._stack.aclose()
        if policy:
            await policy.close()


async def play(config: Config, evaluation: dict[str, int], engines: SharedEngines) -> None:
    """Trains, or goes on with, one run as `rti train` does, then evaluates it as the study does.

    Args:
      evaluation: split -> tasks of each kind; the result is evals/final.json.

    Raises:
      ConfigError: a budget (`stop.tokens`, `stop.hours`) ended the run before its steps were done.
    """
    from rich.console import Console

    from rti_jax import hosts, runs, weight_sync
    from rti_jax.engine_session import EngineSession
    from rti_jax.metrics import Recorder
    from rti_jax.run_tasks import RunTasks
    from rti_jax.runtime import load_policy
    from rti_jax.train import Trainer
    from rti_jax.training_state import Learner

    hosts.only_one(config.hosts, "rti reproduce")
    run = runs.open_run(config)
    with runs.locked(run), open(run.folder / "log.txt", "a") as log:
        tasks, policy = RunTasks.load(config), load_policy(config)
        engine, others = await engines.policy(config), await engines.frozen(config)
        session = await EngineSession.begin(engine, weight_sync.FlaxWeights(policy.model, policy.params))
        learner = Learner(config, policy, run, tasks)
        console = Console(file=log, width=120)
        with Recorder.of(config, run.folder, learner.step, console) as recorder:
            trainer = Trainer(config, run, learner, session, tasks, recorder, others)
            await trainer.run()
            result = await evaluate_finally(trainer, evaluation, recorder)
        runs.write_json(run.folder / "evals" / FINAL, result)


async def evaluate_finally(trainer: Any, evaluation: dict[str, int], recorder: Any) -> dict[str, Any]:
    """Pass@k and Pass^k of the trained policy on every split of the plan. Raises ConfigError for half a run."""
    from rti_jax import evaluate, task_sets

    config, step, result = trainer.config, trainer.learner.step, {}
    if step < config.steps:  # beside runs of all steps it would be another experiment
        raise ConfigError(f"{trainer.budget.spent()} ended it after step {step} of {config.steps}; raise or remove it")
    for split, limit in evaluation.items():
        tasks = task_sets.limited(trainer.tasks.source.tasks(split), limit)
        evaluate.check_disjoint(trainer.tasks.trained, tasks)
        with recorder.episodes(f"{split}, after {step} steps", len(tasks) * config.eval.trials) as seen:
            result[split] = (await evaluate.evaluate(trainer.player, tasks, config, on_episode=seen))[0]
    return {"step": step, "evaluation": evaluation, "splits": result}


async def serve(replies: Any) -> None:
    """Plays jobs until the input ends."""
    from rti_jax import environments
    from rti_jax.config import load_config

    loop, task, jobs = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(jobs.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=read, name="jobs", daemon=True).start()
    engines = SharedEngines()
    try:
        while job := await jobs.get():
            started = time.monotonic()
            error = ""
            try:
                config = load_config(job["source"], job["overrides"], check_env=environments.env_config)
                await play(config, job["evaluation"], engines)
            except Exception as problem:  # this arm's; the others go on
                error = redaction.redact(" ".join(f"{type(problem).__name__}: {problem}".split()))
                if not isinstance(problem, ConfigError):
                    sys.stderr.write(redaction.redact(traceback.format_exc()))
                    await engines.close()  # the next job starts from a fresh one
            reply = {"name": job["name"], "error": error, "seconds": time.monotonic() - started}
            print(json.dumps(reply), file=replies, flush=True)
            gc.collect()  # compiled programs of the run that has ended
    finally:
        await engines.close()


def main() -> None:
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})  # before JAX and torch count cores
    redaction.guard_logs()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(replies))


if __name__ == "__main__":
    main()
