"""Process that runs environments of `verifiers`.

Run by the interpreter that has the library, which need not have Penstock.

The library leads each episode and requests turns from a model over OpenAI's API. This process is the server: it
forwards requests to the env service, and replies with the policy's turns. Started by ``host.py`` as ``python child.py
FD ENV``; messages over FD are length-prefixed JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["main"]

LENGTH = struct.Struct("<I")
KEY = "PENSTOCK_POLICY_API_KEY"
MODEL = "policy"
MAX_STEPS = 8
"""Maximum number of steps of an episode that the env service has not fetched; usually there is at most one."""
END_S = 4.0
"""Time (seconds) after which this process exits once the env service is gone, even if its episodes have not ended."""

Message = dict[str, Any]


class Channel:
    """Connection to the env service. A separate thread reads the messages, and so notices at once when the connection
    closes."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; safe to call from several threads."""
        body = json.dumps(message).encode()
        with self._sending:
            self._socket.sendall(LENGTH.pack(len(body)) + body)

    def messages(self) -> Iterator[Message]:
        """Yield all messages until the channel is closed."""
        while header := self._exactly(LENGTH.size):
            yield json.loads(self._exactly(LENGTH.unpack(header)[0]))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (chunk := self._socket.recv(size - len(data))):
            data += chunk
        return data


class Episode:
    """One episode in progress: steps for the env service, and the request that waits for the policy."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[Message] = asyncio.Queue(MAX_STEPS + 2)
        """Queue of steps for the env service. In addition to MAX_STEPS it has room for the last step and for an
        abort."""
        self.turn: asyncio.Future[Message | None] | None = None
        self.trace: Any = None
        self.problem = ""
        self.task: asyncio.Task[None] | None = None
        self._known: list[Message] = []
        """Messages of the conversation so far, as returned by ``comparable``."""
        self._tools: list[Message] = []

    def take(self, trace: Any, body: Message) -> list[Message]:
        """Return the new messages of a request. Raises ValueError if the request does not continue the conversation."""
        if self.turn is not None and not self.turn.done():
            raise ValueError("it asks for several turns of the policy at once")
        if self.trace is not None and trace is not self.trace:
            raise ValueError("more than one agent of it, or a second attempt, asks the policy for turns")
        messages, tools = body["messages"], body.get("tools") or []
        plain = [comparable(message) for message in messages]
        if plain[: len(self._known)] != self._known:
            raise ValueError("it changed what was said before; only conversations that grow can be trained on")
        if self._known and tools != self._tools:
            raise ValueError("it changed the tools during an episode")
        new = messages[len(self._known) :]
        if not new:
            raise ValueError("it asks for a turn and says nothing new")
        self.trace, self._known, self._tools = trace, plain, tools
        return list(new)

    def ask(self, messages: list[Message], tools: list[Message]) -> None:
        """Request a turn of the policy. Raises ValueError if MAX_STEPS requests still wait for the env service to fetch
        them."""
        if self.steps.qsize() >= MAX_STEPS:
            raise ValueError(f"it gave up {MAX_STEPS} turns that it had asked for")
        self.turn = asyncio.get_running_loop().create_future()
        self.steps.put_nowait({"messages": messages, "tools": tools})

    def say(self, message: Message) -> None:
        """Append the policy's turn to the conversation that the next request must continue."""
        self._known.append(comparable(message))

    def give_up(self) -> None:
        """Cancel the episode's task and its request for a turn of the policy, because the env service dropped the
        episode."""
        if self.task is not None:
            self.task.cancel()
        if self.turn is not None and not self.turn.done():
            self.turn.cancel()
        self.steps.put_nowait({"error": "given up"})


def comparable(message: Message) -> Message:
    """Return the parts of a chat message that must stay equal when a later request repeats the message."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", part)) for part in content)
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
    named = [[id, function["name"], function.get("arguments", "")] for id, function in calls]
    return {"role": message["role"], "content": content, "calls": named, "answers": message.get("tool_call_id")}


class Host:
    """Runs all episodes of one environment."""

    def __init__(self, vf: Any, env: Any, channel: Channel) -> None:
        self._vf, self._env, self._channel = vf, env, channel
        self._episodes: dict[str, Episode] = {}
        self._by_trace: dict[str, tuple[Episode, Any]] = {}
        self._tasks: list[Any] = []
        self._source = iter(env.taskset)
        self._loading = asyncio.Lock()
        self._context: Any = None

    # -- the env service ---------------------------------------------------------------------------------------------

    def serve(self, address: str) -> None:
        """Configure the environment to request turns of the policy from the OpenAI API server that this process runs at
        ``address``."""
        client = self._vf.EvalClientConfig(base_url=f"{address}/v1", api_key_var=KEY)
        self._context = self._vf.ModelContext(model=MODEL, client=client)

    async def on_message(self, message: Message) -> None:
        """Answer one request with the next step of its episode."""
        name, purpose = message["episode"], message["purpose"]
        if purpose == "end":
            episode = self._episodes.pop(name, None)
            if episode is not None:
                episode.give_up()
            return
        if purpose == "begin":
            episode = self._episodes[name] = Episode()
            episode.task = asyncio.create_task(self._play(episode, message["task"]))
        else:
            episode = self._episodes[name]
            assert episode.turn is not None, "nobody waits for a turn"
            if not episode.turn.done():
                episode.turn.set_result(message if purpose == "answer" else None)
        step = await episode.steps.get()
        self._channel.send({"id": message["id"], "text": json.dumps(step)})

    async def _play(self, episode: Episode, number: int) -> None:
        playing = asyncio.ensure_future(self._played(episode, number))
        try:
            await asyncio.wait([playing])
        finally:
            playing.cancel()
            for id in [id for id, (owner, _) in self._by_trace.items() if owner is episode]:
                del self._by_trace[id]
        if playing.cancelled():
            step: Message = {"error": "the environment cancelled its episode"}
        elif (error := playing.exception()) is not None:  # any exception of an environment ends only its episode
            step = {"error": f"{type(error).__name__}: {error}"}
        else:
            step = playing.result()
        episode.steps.put_nowait(step)

    async def _played(self, episode: Episode, number: int) -> Message:
        try:
            task = await self._task(number)
            on_trace = partial(self._enter, episode)
            return outcome(await self._env.run_episode(task, self._context, on_trace=on_trace), episode)
        except SystemExit as error:  # uncaught, it would end the loop with all episodes
            raise RuntimeError(f"SystemExit: {error}") from None

    def _enter(self, episode: Episode, trace: Any) -> None:
        self._by_trace[trace.id] = episode, trace

    async def _task(self, number: int) -> Any:
        async with self._loading:
            while len(self._tasks) <= number:
                task = await asyncio.to_thread(next, self._source, None)
                if task is None:
                    raise IndexError(f"the taskset has {len(self._tasks)} tasks and no number {number}: see data")
                self._tasks.append(task)
        return self._tasks[number]

    # -- the environment ---------------------------------------------------------------------------------------------

    async def on_chat(self, headers: Any, body: Message) -> tuple[Message | None, str]:
        """Wait for a turn of the policy; return ``(turn, '')``, or ``(None, reason)`` if there is none."""
        if headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
            return None, "unauthorized"
        found = self._by_trace.get(headers.get("X-Session-ID", ""))
        if found is None:
            return None, "this is not a request of an episode"
        episode, trace = found
        try:
            episode.ask(episode.take(trace, body), body.get("tools") or [])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            episode.problem = f"the environment cannot be played: {error}"
            return None, episode.problem
        assert episode.turn is not None
        answer = await episode.turn
        if answer is None:
            trace.stop("max_total_tokens")
            return None, "a budget of the episode is used up"
        episode.say(answer["message"])
        return answer, ""


def outcome(result: Any, episode: Episode) -> Message:
    """Return the last step of an episode: reward, metrics, and an error or ''."""
    own = [trace for trace in result.traces if trace is episode.trace] or list(result.traces)
    errors = [*result.errors, *(error for trace in own for error in trace.errors)]
    problem = episode.problem
    if not problem and not result.ok:
        problem = f"{errors[-1].type}: {errors[-1].message}" if errors else "the environment failed without a reason"
    metrics = {name: value for trace in own for name, value in trace.metrics.items() if value is not None}
    return {"reward": sum(trace.reward for trace in own), "metrics": metrics, "error": problem}


# -- OpenAI's API ------------------------------------------------------------------------------------------------------


def completion(answer: Message) -> Message:
    """Return a turn of the policy as a chat completion."""
    message = answer["message"]
    finish = "tool_calls" if message.get("tool_calls") and answer["finish"] == "stop" else answer["finish"]
    prompt, written = answer["prompt_tokens"], answer["completion_tokens"]
    return {
        "id": f"chatcmpl-{os.urandom(8).hex()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }


def events(whole: Message) -> bytes:
    """Return a completion as a stream of server-sent events."""
    [choice] = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {**{key: whole[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": whole["usage"]},
    ]
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


async def open_server(host: Host) -> tuple[Any, str]:
    """Serve OpenAI's API to the environment. Return the aiohttp ``AppRunner``, whose ``cleanup`` stops the server, and
    the server's address."""
    from aiohttp import web

    async def chat(request: Any) -> Any:
        body = await request.json()
        answer, problem = await host.on_chat(request.headers, body)
        if answer is None:
            return web.json_response({"error": {"message": problem, "type": "invalid_request_error"}}, status=400)
        whole = completion(answer)
        if body.get("stream"):
            return web.Response(body=events(whole), content_type="text/event-stream")
        return web.json_response(whole)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}"


# -- the process -------------------------------------------------------------------------------------------------------


def open_environment(spec: Message) -> tuple[Any, Any]:
    """Return the library and the environment that ``spec`` configures. Exceptions of the library propagate."""
    import verifiers.v1 as vf

    import_harness(Path(__file__).with_name("penstock_chat.py"))
    taskset = spec["taskset"]["id"]
    config_type = vf.env_config_type(taskset, spec.get("id", ""))
    whole = dict(spec)
    for name, field in config_type.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            whole[name] = local_role(dict(spec.get(name) or {}), field.default, vf.default_harness_id(taskset))
    return vf, vf.load_environment(vf.resolve_env_config(whole))


def local_role(role: Message, declared: Any, harness: str) -> Message:
    """Fill defaults into ``role`` and return it. ``role`` is the user's config of one agent of the environment. Unless
    the user or the environment chose otherwise, the agent uses Penstock's harness and the library's runtime
    `subprocess`."""
    if declared.harness is None and harness == "bash":
        role.setdefault("harness", {"id": "penstock-chat"})
    if "runtime" not in declared.model_fields_set:
        role.setdefault("runtime", {"type": "subprocess"})
    return role


def import_harness(path: Path) -> None:
    """Import a module from a file, so that the library finds it as a plugin."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


async def run(channel: Channel, vf: Any, env: Any) -> None:
    """Serve until the channel closes."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    host, tasks = Host(vf, env, channel), set[asyncio.Task[None]]()
    runner, address = await open_server(host)
    host.serve(address)

    def take(message: Message) -> None:
        task = asyncio.create_task(host.on_message(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            for message in channel.messages():
                loop.call_soon_threadsafe(take, message)
        finally:  # a broken channel counts as closed
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(closed.set)
            time.sleep(END_S)
            os._exit(1)

    async with env.serving():
        threading.Thread(target=read, daemon=True).start()
        channel.send({"error": ""})
        await closed.wait()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
    await runner.cleanup()


def main() -> None:
    """Open the environment and send ``{"error": TEXT}``, with '' for success; then serve episodes."""
    channel, spec = Channel(int(sys.argv[1])), json.loads(sys.argv[2])
    os.set_inheritable(int(sys.argv[1]), False)  # processes of the environment must not keep the channel open
    try:
        vf, env = open_environment(spec)
    except ModuleNotFoundError as error:
        advice = "; install penstock[verifiers] beside the env service, or set environment.python"
        channel.send({"error": f"the environment cannot be opened: {error}{advice * (error.name == 'verifiers')}"})
        return
    except (Exception, SystemExit) as error:  # user code may raise anything
        channel.send({"error": f"the environment cannot be opened: {type(error).__name__}: {error}"[:2000]})
        return
    asyncio.run(run(channel, vf, env))


if __name__ == "__main__":
    main()
