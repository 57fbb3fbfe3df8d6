"""A tool process: opens the tools of a job and executes one call after another. May be killed at any moment.

Started by ``process.py`` as ``python -m penstock.services.env.tools.worker FD PARENT TOOLS``; FD is its end of a socket
pair, TOOLS the configs as JSON. Output of user code goes to standard error.
"""

from __future__ import annotations

import os
import socket
import sys

from pydantic import TypeAdapter

from penstock.services.env.tools import open_tool
from penstock.services.env.tools.answering import Toolbox, describe
from penstock.services.env.tools.channel import encode, read
from penstock.shared.config.tools import ToolConfig
from penstock.shared.errors import ToolError
from penstock.shared.runtime.user_process import die_with

__all__ = ["main"]


def main() -> None:
    """Open the tools and send ``{"error": TEXT}``, with '' for success; then answer calls until the channel closes."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)  # a child process of user code must not keep the channel open
    die_with(parent, "env")
    with socket.socket(fileno=descriptor) as channel:
        adapter: TypeAdapter[list[ToolConfig]] = TypeAdapter(list[ToolConfig])
        tools, error = Toolbox([], open_tool), ""
        try:
            tools = Toolbox(adapter.validate_json(sys.argv[3]), open_tool)
        except ToolError as problem:
            error = str(problem)
        except (Exception, SystemExit) as problem:  # user code may raise anything on import
            error = describe("opening the tools", problem)
        channel.sendall(encode({"error": error}))
        while (request := read(channel)) is not None:
            channel.sendall(encode(tools.answer(request)))
        tools.close()


if __name__ == "__main__":
    main()
