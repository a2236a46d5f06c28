"""What an engine raises; every message is one line that says what to do."""


class EngineError(Exception):
    """The engine cannot do what was asked."""


class ContextLengthError(EngineError):
    """A prompt leaves no room for a token within the engine's context: the episode is truncated, not failed."""


class EngineDiedError(EngineError):
    """The engine's process is gone, or an update left it unusable: it must be started again."""


class WeightMismatchError(EngineError):
    """The tensors of an update are not the model's: lists what is missing, unexpected and mis-shaped."""


class StaleVersionError(EngineError):
    """An update whose version is not above the one that the engine serves."""
