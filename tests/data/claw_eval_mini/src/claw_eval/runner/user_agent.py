"""Stand-in of the benchmark's simulated user: tries for ever, and takes a failure for a satisfied user."""

import time


class UserAgent:
    def __init__(self, model_id, api_key, base_url=""):
        raise AssertionError("the adapter makes no client of the benchmark's")

    def generate_response(self, persona, conversation_messages):
        dialogue = "\n".join(f"{m.role}: {m.text}" for m in conversation_messages)
        for _ in range(30):
            try:
                answer = self.client.chat.completions.create(
                    model=self.model_id,
                    messages=[{"role": "system", "content": persona}, {"role": "user", "content": dialogue}],
                    temperature=0.7,
                )
                text = answer.choices[0].message.content
                return None if "[DONE]" in text else text
            except Exception:
                time.sleep(10)
        return None
