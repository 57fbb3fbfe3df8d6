"""Modules whose names can be imported and whose functions and classes cannot be used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Name(type):
    """Type of an absent name: it has every attribute, and calling it raises an error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no implementation here: this is a stub for contract tests")


def absent(name: str) -> Any:
    """Return an object that can stand where SGLang imports ``name`` and cannot be called."""
    return _Name(name, (), {})


class AbsentModule(ModuleType):
    """A module in which every name is absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")


def absent_modules(package: str, *names: str) -> None:
    """Let ``package.NAME`` be imported for each of the names, which may have dots; parents come first."""
    for name in names:
        module = AbsentModule(f"{package}.{name}")
        module.__path__ = []
        parent, _, last = f"{package}.{name}".rpartition(".")
        sys.modules[module.__name__] = module
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)
