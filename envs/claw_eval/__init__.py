"""The Claw-Eval environment; see docs/claw_eval.md."""

from envs.claw_eval.config import ClawEvalConfig, JudgeConfig, UserConfig
from envs.claw_eval.environment import ClawEval

__all__ = ["ClawEval", "ClawEvalConfig", "JudgeConfig", "UserConfig"]
