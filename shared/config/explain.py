"""Readable validation errors, one line each: the key as written in the document, the value found, the values
allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

__all__ = ["explain"]

SHOWN_CHARS = 60


def explain(model: type[BaseModel], error: ValidationError) -> list[tuple[str, str]]:
    """Turn a pydantic error into ``(dotted key, error and remedy)`` pairs.

    Keys are those of the document: the names of union members that pydantic adds are removed, and errors of several
    members at one place become one line.
    """
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        keys, kinds, in_union = _walk(model, item["loc"])
        detail = _detail(item, kinds) if item["type"] != "extra_forbidden" else _unknown(model, item["loc"])
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            keys.append(str(item["ctx"]["discriminator"]).strip("'"))
        details = found.setdefault(".".join(keys) or "(top level)", [])
        if details and in_union:
            details[-1] += f", or: {detail}"
        else:
            details.append(detail)
    return [(key, detail) for key, details in found.items() for detail in details]


def _detail(item: Mapping[str, Any], kinds: Sequence[Any]) -> str:
    """Describe a wrong value: the value itself, and the values allowed."""
    context = item.get("ctx", {})
    match item["type"]:
        case "union_tag_invalid":
            near = difflib.get_close_matches(str(context["tag"]), _tags(kinds), n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'? " if near else ""
            return f"found {_shown(context['tag'])}; {hint}there are: {context['expected_tags']}"
        case "union_tag_not_found":
            return f"is missing; there are: {', '.join(repr(tag) for tag in _tags(kinds))}"
        case "literal_error" | "enum":
            return f"found {_shown(item['input'])}; must be {context['expected']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            tags = _tags(kinds)
            like = item["input"] if item["input"] in tags else next(iter(tags), None)
            return f"must be a mapping{f' like {{type: {like}}}' if like else ''}, found {_shown(item['input'])}"
    return str(item["msg"]).removeprefix("Value error, ")


def _unknown(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Describe an unknown key; suggest the same key one section deeper, a similar key, or else all valid keys."""
    kinds = _walk(model, loc[:-1])[1]
    names = sorted({name for kind in kinds if _is_model(kind) for name in kind.model_fields})
    near = _deeper(kinds, str(loc[-1])) or difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5)
    of = f" of '{loc[-2]}'" if len(loc) > 1 and loc[-2] in _tags(kinds) else ""
    return f"unknown key{of}; " + (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid keys: {', '.join(names)}"
    )


def _deeper(kinds: Iterable[Any], key: str) -> list[str]:
    """Return ``section.key`` for each section of the models ``kinds`` that has a key named ``key``."""
    fields = [item for kind in kinds if _is_model(kind) for item in kind.model_fields.items()]
    sections = [(name, inner) for name, field in fields for inner in _members(field.annotation) if _is_model(inner)]
    return list(dict.fromkeys(f"{name}.{key}" for name, inner in sections if key in inner.model_fields))


def _walk(model: type[BaseModel], loc: Iterable[int | str]) -> tuple[list[str], list[Any], bool]:
    """Follow the path ``loc`` of a pydantic error, starting at ``model``, and find the types allowed at its end.

    Returns:
        The parts of ``loc`` that are keys of the document, the types allowed at the end of the path, and True if the
        last part of ``loc`` is the name of a union member.
    """
    keys: list[str] = []
    kinds: list[Any] = [model]
    in_union = False
    for part in loc:
        in_union = False
        tagged = [kind for kind in kinds if part in _tags([kind])]
        inner = [kind for kind in kinds for kind in _inside(kind, part)]
        if len(kinds) > 1 and tagged:  # tag of a union; a field may have the same name
            kinds = tagged
        elif len(kinds) > 1 and not inner:
            in_union = True  # name of a union member
        else:
            keys.append(str(part))
            kinds = inner
    return keys, kinds, in_union


def _inside(kind: Any, part: int | str) -> list[Any]:
    """Return the types that a value of type ``kind`` may have at the key or index ``part``."""
    if _is_model(kind):
        field = kind.model_fields.get(part)
        return [] if field is None else _members(field.annotation)
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(part, int):
        return [one for arg in args for one in _members(arg)] if origin in (list, tuple, set, frozenset) else []
    return _members(args[1]) if origin is dict else []


def _members(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, except None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [one for arg in get_args(annotation) for one in _members(arg)]
    return [] if annotation in (None, NoneType, Ellipsis) else [annotation]


def _tags(kinds: Iterable[Any]) -> list[str]:
    """Return the values of the discriminator keys ``type`` and ``engine`` of the models in ``kinds``."""
    models = [kind.model_fields for kind in kinds if _is_model(kind)]
    fields = [fields[tag] for fields in models for tag in ("type", "engine") if tag in fields]
    return [tag for field in fields for tag in get_args(field.annotation) if isinstance(tag, str)]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
