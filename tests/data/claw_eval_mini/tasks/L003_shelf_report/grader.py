"""A report, graded by the judge's own client; the last message may ask the grader to misbehave."""

import json
import time

from claw_eval.graders.base import AbstractGrader
from claw_eval.models import DimensionScores


class ShelfReport(AbstractGrader):
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, media_events=None):
        report = messages[-1].message.text
        if "raise" in report:
            raise KeyError("the grader stumbles")
        if "nonsense" in report:
            return DimensionScores(completion=float("nan"))
        if "sleep" in report:
            time.sleep(5)
        answer = judge.client.chat.completions.create(
            model=judge.model_id, messages=[{"role": "user", "content": f"Grade as JSON, late readers: {report}"}]
        )
        late = json.loads(answer.choices[0].message.content)
        return DimensionScores(completion=float("Otto Quist" in late.get("late", [])), robustness=1.0)
