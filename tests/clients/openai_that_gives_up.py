"""OpenAI's SDK with a timeout that is too short for its answer: it times out and retries. Prints the answer's id."""

from __future__ import annotations

import sys

import openai

URL, KEY, MODEL = sys.argv[1:4]
TOKENS = 2000

with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=8, timeout=0.25) as client:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "again"}], max_tokens=TOKENS
    )
    answer = raw.parse()
    assert raw.retries_taken >= 1, "it was answered in time"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS
    print(answer.id)
