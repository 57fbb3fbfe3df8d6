"""Harness of `verifiers` without a program of its own: the chat loop runs in the process of the environment.

The library's harness `null` does the same in a new Python process for every segment of every episode, which `uv` must
set up first. The library finds this harness under the id `penstock-chat`, because ``child.py`` imports it under that
name.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Requests turns and executes the calls of the task's tools until a turn has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917 - the library's own interface
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Run one segment of a conversation; see the library's ``Harness.launch``."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    known = name in dispatch
                    content = (
                        await call_mcp(connections, dispatch, name, arguments)
                        if known
                        else f"error: there is no tool '{name}'; there is: {', '.join(dispatch)}"
                    )
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
