"""A tool process: opens the tools of a job, carries out one call after another, may be killed at any moment.

Started by ``process.py`` as ``python -m penstock.services.env.tools.worker FD PARENT TOOLS``; FD is its end of a socket
pair, TOOLS their configuration as JSON. Whatever user code prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

from pydantic import TypeAdapter

from penstock.services.env.tools import CallError, Tool, open_tool
from penstock.services.env.tools.channel import LENGTH, encode
from penstock.shared.config.environment import ToolConfig
from penstock.shared.errors import ToolError
from penstock.shared.protocol.tools import MAX_RESULT_CHARS

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_MAX_ERROR_CHARS = 600


def main() -> None:
    """Serve one channel until it closes. The first message says ``{"error": ...}``: empty, or why tools do not open."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # a child of user code must not keep the channel open
    _die_with(parent)
    with socket.socket(fileno=descriptor) as channel:
        adapter: TypeAdapter[list[ToolConfig]] = TypeAdapter(list[ToolConfig])
        configs, tools, error = adapter.validate_json(sys.argv[3]), dict[str, Tool](), ""
        try:
            tools = {config.name: open_tool(config) for config in configs}
        except ToolError as problem:
            error = str(problem)
        except (Exception, SystemExit) as problem:  # code of the user may raise anything while it is imported
            error = _describe("opening the tools", problem)
        channel.sendall(encode({"error": error}))
        schemas = {config.name: config.parameters for config in configs}
        while (request := _read(channel)) is not None:
            channel.sendall(encode(_answer(tools, schemas, request)))
        for tool in tools.values():
            tool.close()


def _answer(tools: dict[str, Tool], schemas: dict[str, dict[str, Any]], request: dict[str, Any]) -> dict[str, str]:
    name, arguments = request["name"], request["arguments"]
    try:
        if name not in tools:
            raise CallError(f"there is no tool '{name}'; there is: {', '.join(tools)}")
        _check(schemas[name], arguments)
        return _reply("ok", tools[name].call(arguments))
    except CallError as error:
        return _reply("error", str(error))
    except ToolError as error:
        return _reply("failed", str(error))
    except (Exception, SystemExit) as error:  # code of the user may raise anything
        return _reply("failed", _describe(f"tool '{name}'", error))


def _reply(status: str, text: str) -> dict[str, str]:
    """Half of a character (a surrogate), which no message can carry, becomes a question mark."""
    return {"status": status, "text": text[:MAX_RESULT_CHARS].encode(errors="replace").decode()}


def _check(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raises CallError where arguments are missing or unknown."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in required if name not in arguments]:
        raise CallError(f"argument '{missing[0]}' is missing")
    if unknown := [name for name in arguments if name not in known]:
        raise CallError(f"there is no argument '{unknown[0]}'; there is: {', '.join(known) or 'none'}")


def _describe(what: str, error: BaseException) -> str:
    return f"{what} raised {type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def _read(channel: socket.socket) -> dict[str, Any] | None:
    header = _exactly(channel, LENGTH.size)
    body = _exactly(channel, LENGTH.unpack(header)[0]) if header else b""
    return json.loads(body) if body else None


def _exactly(channel: socket.socket, size: int) -> bytes:
    """That many bytes; fewer once the channel is closed."""
    data = b""
    while len(data) < size and (chunk := channel.recv(size - len(data))):
        data += chunk
    return data


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the service dies: user code that hangs would not notice a closed channel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the env service is gone")


if __name__ == "__main__":
    main()
