"""Stand-in of the benchmark's judge: tries for ever, and ends with nothing."""

import json
import re
import time

import pydantic


class JudgeResult(pydantic.BaseModel):
    score: float
    reasoning: str


class LLMJudge:
    def __init__(self, model_id="", api_key=None, base_url=""):
        raise AssertionError("the adapter makes no client of the benchmark's")

    def evaluate(self, task_prompt, conversation, actions_summary, rubric):
        return self._ask("Judge the assistant.", f"{task_prompt}\n{conversation}\n{actions_summary}\n{rubric}")

    def evaluate_actions(self, task_prompt, artifacts, rubric):
        return self._ask("Judge the actions.", f"{task_prompt}\n{artifacts}\n{rubric}")

    def _ask(self, system, text):
        for _ in range(30):
            try:
                answer = self.client.chat.completions.create(
                    model=self.model_id,
                    messages=[{"role": "system", "content": system}, {"role": "user", "content": text}],
                    temperature=0.0,
                    max_tokens=8192,
                )
                found = json.loads(re.search(r"\{[^{}]*\}", answer.choices[0].message.content)[0])
                result = JudgeResult(score=found["score"], reasoning=found["reasoning"])
                self._call_log.append({"score": result.score})
                print("[judge]", result.score)
                return result
            except Exception:
                time.sleep(10)

    def get_call_log(self):
        return list(self._call_log)

    def reset_call_log(self):
        self._call_log.clear()
