"""The Navigation environment; see docs/navigation.md."""

from envs.navigation.config import NavigationConfig
from envs.navigation.environment import Navigation

__all__ = ["Navigation", "NavigationConfig"]
