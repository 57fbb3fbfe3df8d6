"""Process that imports each tool of a user's job and calls it once, before the job is submitted.

The arguments are the first example in the tool's JSON schema, or else simple values of its types. Started by
``run_trial`` as ``python -m penstock.services.env.tools.trial FD PARENT``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.services.env.tools.base import CallError, Tool
from penstock.services.env.tools.function import Function
from penstock.services.env.tools.objects import Method, Objects, load_classes
from penstock.shared.config.environment import EnvironmentConfig
from penstock.shared.config.tools import FunctionTool, MethodTool
from penstock.shared.data.user_code import check_call, import_named, shown_name
from penstock.shared.errors import ToolError
from penstock.shared.protocol.trials import TrialRequest
from penstock.shared.runtime.user_process import Attempts, serve_trial

__all__ = ["example_of", "try_tools"]

SECTION = "environment"
ADVICE = (
    "; a tool raises ValueError for wrong arguments, which the policy reads, and any other exception is a failure; "
    "`examples: [...]` of an argument in `parameters` sets what is tried"
)


def try_tools(request: TrialRequest, attempts: Attempts) -> None:
    """Import each tool of the user, check that it takes the arguments of its schema, and call it once."""
    config = EnvironmentConfig.model_validate(request.parts[SECTION])
    keys = {tool.name: f"{SECTION}.tools[{place}] ({tool.name})" for place, tool in enumerate(config.tools)}
    for tool in config.tools:
        if isinstance(tool, FunctionTool):
            what = f"importing {shown_name(tool.path)}"
            opened, function = attempts.at(keys[tool.name], what, partial(_function, tool), fatal=True)
            if opened:
                _call(attempts, keys[tool.name], tool, function)
    methods = [tool for tool in config.tools if isinstance(tool, MethodTool)]
    classes: dict[str, Any] = {}
    for tool in methods:
        what = f"importing {shown_name(tool.path)}"
        opened, found = attempts.at(keys[tool.name], what, partial(_class, tool), fatal=True)
        if opened:
            classes |= found
    if len(classes) == len({tool.path for tool in methods}) and methods:
        _try_episode(request, attempts, {keys[tool.name]: tool for tool in methods}, classes)


def _function(config: FunctionTool) -> Function:
    tool = Function(config)
    found = import_named(config.path, what="tool function", beside="env", error=ToolError)
    _check(found, config, f"tool function '{shown_name(config.path)}'")
    return tool


def _class(config: MethodTool) -> dict[str, Any]:
    """Return ``{path: class}``. Raises ToolError if the class cannot be called with ``seed`` and ``row``, or if the
    method does not accept the arguments that the tool's schema declares."""
    found = load_classes([config])
    made, name = found[config.path], config.method or config.name
    check_call(made, f"the class '{shown_name(config.path)}'", "seed, row", ToolError, seed=0, row={})
    plain = not isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)
    _check(getattr(made, name), config, f"the method '{name}' of '{shown_name(config.path)}'", *[None] * plain)
    return found


def _check(function: Callable[..., Any], config: FunctionTool | MethodTool, what: str, *own: object) -> None:
    """Check that ``function`` can be called with all arguments of the schema, and with only the required ones. ``own``
    are positional arguments that come first in both calls, such as ``self``."""
    schema = config.parameters
    for names in (schema.get("properties", {}), schema.get("required", [])):
        check_call(function, what, ", ".join(names), ToolError, *own, **dict.fromkeys(names))


def _try_episode(
    request: TrialRequest, attempts: Attempts, tools: Mapping[str, MethodTool], classes: dict[str, Any]
) -> None:
    """Create the objects of one episode, call each method, and have the objects reward the reference answer."""
    objects = Objects(classes, 0, request.row)
    if request.judges:
        attempts.at(SECTION, "looking for a method `reward`", partial(_check_reward, classes), fatal=True)
    whole = True
    for path in classes:
        key = next(key for key, tool in tools.items() if tool.path == path)
        what = f"{shown_name(path)}(seed=0, row=<the first row>)"
        made, _ = attempts.at(key, what, partial(objects.of, path), fatal=False)
        whole &= made
    if not whole:
        return
    for key, tool in tools.items():
        _call(attempts, key, tool, Method(tool, objects))
    if request.judges and any(callable(getattr(each, "reward", None)) for each in classes.values()):
        judge = partial(objects.reward, request.answer or "")
        attempts.at(SECTION, "reward(<the reference answer of the first row>)", judge, fatal=False)
    attempts.at(SECTION, "close()", objects.close, fatal=False)


def _check_reward(classes: Mapping[str, Any]) -> None:
    judges = {path: each for path, each in classes.items() if callable(getattr(each, "reward", None))}
    if not judges:
        raise ToolError(
            f"none of {', '.join(classes)} has a method `reward(answer)`, which the scorer `environment` asks"
        )
    for path, each in judges.items():
        check_call(each.reward, f"the method 'reward' of '{shown_name(path)}'", "answer", ToolError, None, "answer")


def _call(attempts: Attempts, key: str, config: FunctionTool | MethodTool, tool: Tool) -> None:
    arguments = example_of(config.parameters)
    shown = f"calling it with {json.dumps(arguments, ensure_ascii=False)[:200]}"
    attempts.at(key, shown, partial(_answer, tool, arguments), fatal=False, advice=ADVICE)


def _answer(tool: Tool, arguments: dict[str, Any]) -> None:
    with contextlib.suppress(CallError):  # it refuses the arguments in order
        tool.call(arguments)


def example_of(schema: Mapping[str, Any]) -> Any:
    """Return an example value for a JSON schema: the first value that the schema gives, or a simple value of its
    type."""
    given = [
        *(schema.get("examples") or ()),
        *(schema[key] for key in ("example", "const", "default") if key in schema),
    ]
    given += schema.get("enum") or ()
    if given:
        return given[0]
    choices = schema.get("anyOf") or schema.get("oneOf")
    return example_of(choices[0]) if choices else _simple(schema)


def _simple(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            return {name: example_of(each) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [example_of(schema.get("items") or {})]
        case "integer" | "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
            return min(least, schema.get("maximum", least))
        case "boolean":
            return True
        case "null":
            return None
    return "text"


def main() -> None:
    """Serve one trial: import the tools of the request, call each once, and report the findings."""
    serve_trial("env", try_tools)


if __name__ == "__main__":
    main()
