"""Objects behind tools of type ``method``: one per class and episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.services.env.tools.base import CallError
from penstock.shared.config.tools import MethodTool
from penstock.shared.data.user_code import import_named
from penstock.shared.errors import ToolError

__all__ = ["Method", "Objects", "load_classes"]


def load_classes(configs: Iterable[MethodTool]) -> dict[str, Any]:
    """Import the classes of the tools, and return them by path; the imports run user code.

    Raises:
        ToolError: a class cannot be imported, is not a class, or lacks a method.
    """
    classes: dict[str, Any] = {}
    for config in configs:
        found = import_named(config.path, what="the class", beside="env", error=ToolError)
        classes[config.path] = found
        if not isinstance(found, type):
            raise ToolError(f"'{config.path}' of tool '{config.name}' is a {type(found).__name__}, not a class")
        if not callable(getattr(found, config.method or config.name, None)):
            raise ToolError(f"the class '{config.path}' has no method '{config.method or config.name}'")
    return classes


class Objects:
    """Creates the objects of one episode when they are first needed, from seed and row alone."""

    def __init__(self, classes: Mapping[str, Any], seed: int, row: dict[str, Any]) -> None:
        self._classes, self._seed, self._row = classes, seed, row
        self._made: dict[str, Any] = {}

    def of(self, path: str) -> Any:
        """Return the object of a class. Exceptions of its constructor propagate."""
        if path not in self._made:
            self._made[path] = self._classes[path](seed=self._seed, row=dict(self._row))
        return self._made[path]

    def reward(self, answer: str) -> float:
        """Return the sum of the objects' rewards for an episode that ended with ``answer``.

        Raises:
            ToolError: no class has a method ``reward``.
        """
        judges = [path for path, found in self._classes.items() if callable(getattr(found, "reward", None))]
        if not judges:
            raise ToolError(f"none of {', '.join(self._classes)} has a method `reward(answer)`")
        return float(sum(self.of(path).reward(answer) for path in judges))

    def close(self) -> None:
        """Close the objects that have a method ``close``."""
        for made in self._made.values():
            if callable(getattr(made, "close", None)):
                made.close()


class Method:
    """Tool that calls a method of one episode's objects."""

    def __init__(self, config: MethodTool, objects: Objects) -> None:
        self._config, self._objects = config, objects

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the method's result, as JSON unless it is text. A ValueError becomes an error message to the policy;
        any other exception is a failure of the tool.

        Raises:
            CallError: the method raised ValueError.
        """
        method = getattr(self._objects.of(self._config.path), self._config.method or self._config.name)
        try:
            result = method(**arguments)
        except ValueError as error:
            raise CallError(str(error)) from None
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    def close(self) -> None:
        """Do nothing: ``Objects`` closes the objects."""
