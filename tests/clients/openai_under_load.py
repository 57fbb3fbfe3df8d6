"""Four threads that stream answers by OpenAI's SDK for three seconds; errors end it. Prints the number of streams."""

from __future__ import annotations

import concurrent.futures
import sys
import time

import openai

URL, KEY, MODEL = sys.argv[1:4]


def speak(client: openai.OpenAI, until: float) -> int:
    """Stream answers one after another until the time ``until``; return their number."""
    number = 0
    while time.monotonic() < until:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "again"}], max_tokens=60, stream=True
        )
        assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        number += 1
    return number


with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as made:
    end = time.monotonic() + 3
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        print(sum(threads.map(speak, [made] * 4, [end] * 4)))
