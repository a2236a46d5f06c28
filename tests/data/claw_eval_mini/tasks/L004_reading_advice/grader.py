"""Advice after a question."""

from claw_eval.graders.base import AbstractGrader
from claw_eval.models import DimensionScores


class ReadingAdvice(AbstractGrader):
    ADVICE_RUBRIC = "Named a book on boats."

    def grade(self, messages, dispatches, task, audit_data=None, judge=None):
        asked = any(m.message.text.startswith("[user_agent]") for m in messages)
        said = "\n".join(f"{m.message.role}: {m.message.text}" for m in messages)
        score = judge.evaluate(task.prompt.text, said, "", self.ADVICE_RUBRIC).score
        return DimensionScores(completion=score * asked, robustness=1.0)
