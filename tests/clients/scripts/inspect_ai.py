"""Inspect: an evaluation, one sample of which needs a tool. Run as ``inspect_ai.py URL KEY MODEL TOKENIZER``."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

URL, KEY, MODEL = sys.argv[1:4]
SAYS = "hello world and more"


@tool
def add() -> Tool:
    """Return a tool that adds two numbers."""

    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The one.
            b: The other.
        """
        return f"{a + b}, and hi"

    return execute


def main() -> None:
    """Run the client and print the number of answers."""
    task = Task(
        dataset=[Sample(input="hi", target=SAYS), Sample(input="tool", target=SAYS), Sample(input="hi", target="bye")],
        solver=[use_tools(add()), generate()],
        scorer=exact(),
    )
    model = get_model(
        f"openai/{MODEL}", base_url=f"{URL}/v1", api_key=KEY, responses_api=False, config=GenerateConfig(max_tokens=16)
    )
    (log,) = eval(task, model=model, display="none", log_dir="logs", fail_on_error=True)
    assert log.status == "success", log.error
    assert log.results is not None
    assert abs(log.results.scores[0].metrics["mean"].value - 2 / 3) < 1e-6
    assert log.samples is not None
    called = log.samples[1].messages
    assert [message.role for message in called] == ["user", "assistant", "tool", "assistant"]
    print(json.dumps({"version": version("inspect-ai"), "answers": 4}))


main()
