"""Tasks of an environment: a row holds the number of a task, which the env service interprets."""

from __future__ import annotations

from typing import Any

from penstock.shared.config.data import TasksSource

__all__ = ["TaskRows"]


class TaskRows:
    """Rows with the field ``task``, a number. Prompt and answer are placeholders, which the env service replaces."""

    endless = False
    notes: tuple[str, ...] = ()

    def __init__(self, config: TasksSource) -> None:
        self._config = config
        self.name = f"tasks {config.skip}..{config.skip + config.num_rows - 1}"

    def __len__(self) -> int:
        return self._config.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        task = self._config.skip + index
        return {"task": task, "prompt": f"task {task}", "answer": ""}

    def where(self, index: int) -> str:
        """Return the number of the task, for error messages."""
        return f"task {self._config.skip + index}"
