"""What an engine raises; every message is one line that says what to do."""


class EngineError(Exception):
    """The engine cannot do what was asked.

    Attributes:
      http_status: of the answer that refused it, where there was one.
    """

    http_status: int | None = None


class CutOffError(EngineError):
    """An answer ended at the token limit."""


class ContextLengthError(EngineError):
    """A prompt leaves no room for a token within the engine's context: the episode is truncated, not failed."""


class EngineDiedError(EngineError):
    """The engine's process is gone, or an update left it unusable: it must be started again."""


class WeightMismatchError(EngineError):
    """The tensors of an update are not the model's: lists what is missing, unexpected and mis-shaped."""


class StaleVersionError(EngineError):
    """An update whose version is not above the one that the engine serves."""


class ServerError(EngineError):
    """One server cannot answer; another one may: it is gone, hangs, fails or serves other weights."""


class UnreachableError(ServerError):
    """A server is not there, or its connection broke."""


class HungError(ServerError):
    """A server took longer than it may."""


class BusyError(ServerError):
    """A server has too much to do: asked again, later or elsewhere."""


class GarbageError(ServerError):
    """A server's answer is not one."""
