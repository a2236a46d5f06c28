"""The τ²-bench environment (airline, retail, telecom, mock); see docs/tau2.md."""

from envs.tau2.config import Tau2Config, UserConfig
from envs.tau2.environment import Tau2

__all__ = ["Tau2", "Tau2Config", "UserConfig"]
