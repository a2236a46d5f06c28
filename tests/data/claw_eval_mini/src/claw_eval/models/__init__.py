"""Stand-in of the benchmark's records."""

from typing import Any, Literal

import pydantic

from .scoring import compute_task_score, is_pass
from .task import TaskDefinition

__all__ = ["DimensionScores", "Message", "TaskDefinition", "TraceMessage", "compute_task_score", "is_pass"]


class TextBlock(pydantic.BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(pydantic.BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(pydantic.BaseModel):
    type: Literal["tool_result"] = "tool_result"
    tool_use_id: str
    content: list[TextBlock] = []
    is_error: bool = False


class Message(pydantic.BaseModel):
    role: Literal["user", "assistant", "system"]
    content: list[TextBlock | ToolUseBlock | ToolResultBlock] = []

    @property
    def text(self) -> str:
        return "\n".join(b.text for b in self.content if b.type == "text")


class TraceMessage(pydantic.BaseModel):
    trace_id: str
    message: Message


class ToolDispatch(pydantic.BaseModel):
    trace_id: str
    tool_use_id: str
    tool_name: str
    endpoint_url: str
    request_body: dict[str, Any] = {}
    response_status: int = 200
    response_body: Any = None


class DimensionScores(pydantic.BaseModel):
    completion: float = 0.0
    robustness: float = 0.0
    safety: float = 1.0
