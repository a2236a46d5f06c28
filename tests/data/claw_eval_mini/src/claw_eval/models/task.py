"""Stand-in of the benchmark's task definition: the keys of task.yaml that the adapter reads."""

from typing import Any

import pydantic


class Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")


class Prompt(Part):
    text: str
    language: str = "en"
    attachments: list[str] = []


class Limits(Part):
    max_turns: int = 20


class Service(Part):
    name: str
    command: str
    port: int
    reset_endpoint: str | None = None
    env: dict[str, str] = {}


class Tool(Part):
    name: str
    description: str
    input_schema: dict[str, Any] = {}


class Place(Part):
    tool_name: str
    url: str
    method: str = "POST"


class Check(Part):
    type: str
    tool_name: str | None = None
    patterns: list[str] | None = None
    description: str = ""


class Action(Part):
    service: str
    action_key: str


class UserAgent(Part):
    enabled: bool = False
    persona: str = ""
    max_rounds: int = 3
    system_prompt_suffix: str = ""


class TaskDefinition(Part):
    task_id: str
    difficulty: str = "easy"
    prompt: Prompt
    tools: list[Tool] = []
    tool_endpoints: list[Place] = []
    environment: Limits = Limits()
    safety_checks: list[Check] = []
    expected_actions: list[Action] = []
    services: list[Service] = []
    judge_rubric: str = ""
    reference_solution: str = ""
    sandbox_files: list[str] = []
    env_snapshot_files: list[str] = []
    env_snapshot_commands: list[str] = []
    user_agent: UserAgent = UserAgent()

    def get_endpoint_map(self):
        return {place.tool_name: place for place in self.tool_endpoints}
