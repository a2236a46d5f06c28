"""Stand-in of the benchmark's system prompt."""

import json


def build_system_prompt(task, config):
    if not config.enabled:
        return "You assist a librarian."
    lines = ["You assist a librarian. Your tools:", *(f"- {t.name}: {t.description}" for t in task.tools)]
    if config.include_tool_schema:
        lines += [json.dumps(t.input_schema) for t in task.tools]
    return "\n".join(lines)
