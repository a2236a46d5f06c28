"""Stand-in of the system prompt's settings."""

import pydantic


class PromptConfig(pydantic.BaseModel):
    enabled: bool = True
    include_tool_schema: bool = True
