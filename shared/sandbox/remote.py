"""Statements that judge a program, in another process than the program.

Both processes run in sandboxes of their own, joined by two pipes. The judge executes the statements; a name that they
use and neither they nor Python's builtins define is looked up in the program. Only data crosses: numbers, text and
containers by value, everything else as a ``Remote`` whose operations are asked of the program. So a program can say
what its functions return, and nothing about whether that passes.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

__all__ = ["Gone", "Remote", "RemoteNames", "serve"]

MAX_BYTES = 64 << 20
"""Longest message between the two."""
_PLAIN = (str, int, float)
_BY_TEXT: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda z: [z.real, z.imag], lambda v: complex(*v)),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda v: range(*v)),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, lambda f: [f.numerator, f.denominator], lambda v: fractions.Fraction(*v)),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda v: datetime.timedelta(*v)),
}
_BUILTIN_TYPES: frozenset[Any] = frozenset(each for each in vars(builtins).values() if type(each) is type)
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_UNARY = (
    "neg", "pos", "abs", "invert", "index", "len", "iter", "next", "str", "repr", "bool", "int", "float", "reversed",
    "round",
)  # fmt: skip
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
_ITEMS = ("getitem", "setitem", "delitem")
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
_MIXED = frozenset({*_BINARY, *_COMPARISONS})
_MUST_BE = {"len": int, "index": int, "int": int, "bool": bool, "str": str, "repr": str, "float": float}


class Gone(Exception):  # noqa: N818  no error of the judge
    """The other process ended, or does not speak as agreed."""


class _Peer:
    """One end. ``objects`` are what the other end has handles of."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), write
        self._objects: list[Any] = []

    def ask(self, *message: Any) -> Any:
        """Send a request and return its answer; serves requests that come meanwhile."""
        self._send(message)
        return self.wait()

    def wait(self) -> Any:
        """Serve requests until there is an answer. Raises Gone, or what the other end raised."""
        while True:
            message = self._receive()
            kind, rest = message[0], message[1:]
            if kind == "ok":
                return self.decode(rest[0])
            if kind == "raised":
                self.raise_error(*rest)
            self.serve(kind, rest)

    def serve(self, kind: Any, rest: list[Any]) -> None:
        """Answer one request."""
        try:
            answer = ["ok", self.encode(self.carry_out(kind, rest))]
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever a program or a test raises
            answer = ["raised", *_described(error)]
        self._send(answer)

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        raise NotImplementedError

    def raise_error(self, name: str, base: str, text: str) -> NoReturn:
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """As JSON. What is no data is kept, and named."""
        if value is None or type(value) in (bool, *_PLAIN):
            return value
        if type(value) is type and value in _BUILTIN_TYPES:
            return {"t": "builtin", "v": value.__name__}
        for name, (kind, plain, _) in _BY_TEXT.items():
            if type(value) is kind:
                return {"t": name, "v": plain(value)}
        return self._encode_like(value)

    def _encode_like(self, value: Any) -> Any:
        """Containers, and of what is like a number or text its value, without what its class can do."""
        found: Any = None
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__pos__(value)
        if isinstance(value, float):
            return float.__pos__(value)
        for name, container in _CONTAINERS.items():
            if isinstance(value, container):
                found = {"t": name, "v": [self.encode(each) for each in container.__iter__(value)]}  # type: ignore[attr-defined]
        if isinstance(value, dict):
            found = {"t": "dict", "v": [[self.encode(key), self.encode(each)] for key, each in dict.items(value)]}
        elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            is_array = type(value).__name__ == "ndarray"
            found = {"t": "numpy", "v": self.encode(value.tolist()), "d": str(value.dtype), "a": is_array}
        return self.encode_object(value) if found is None else found

    def encode_object(self, value: Any) -> Any:
        raise NotImplementedError

    def keep(self, value: Any) -> int:
        """A number by which the other end names an object."""
        self._objects.append(value)
        return len(self._objects) - 1

    def kept(self, number: Any) -> Any:
        """The object of that number."""
        if type(number) is not int or number < 0:
            raise Gone("no such object")
        return self._objects[number]

    def decode(self, value: Any) -> Any:
        """The value of JSON. Raises Gone for what neither end sends."""
        if not isinstance(value, dict):
            if value is None or isinstance(value, bool | int | float | str):
                return value
            raise Gone(f"no value: {value!r:.50}")
        kind, held = value.get("t"), value.get("v")
        if kind in _BY_TEXT:
            return _BY_TEXT[kind][2](held)
        if kind in _CONTAINERS or kind == "dict":
            items = [self.decode_pair(each) if kind == "dict" else self.decode(each) for each in held or ()]
            return _CONTAINERS.get(kind, dict)(items)
        if kind == "numpy":
            made = __import__("numpy").array(self.decode(held), dtype=value["d"])
            return made if value["a"] else made[()]
        found = getattr(builtins, str(held), None) if kind == "builtin" else None
        return found if type(found) is type else self.decode_object(kind, held, value)

    def decode_pair(self, pair: Any) -> tuple[Any, Any]:
        """Key and value of a dict."""
        key, each = pair
        return self.decode(key), self.decode(each)

    def decode_object(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def _send(self, message: Iterable[Any]) -> None:
        data = json.dumps(list(message)).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    def _receive(self) -> list[Any]:
        line = self._read.readline(MAX_BYTES)
        if not line.endswith(b"\n"):
            raise Gone("the other process ended")
        message = json.loads(line)
        if not isinstance(message, list) or not message:
            raise Gone("no message")
        return message


def _described(error: BaseException) -> list[str]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    return [type(error).__name__, kinds[0], str(error)[:1000]]


# -- the judge


class Remote:
    """An object of the program. Its operations are the program's, among its own objects.

    It equals no data, and other operations with data raise TypeError: an object could claim to be any number, and would
    learn which one is wanted.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: _Judge, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.call(self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols by which libraries take what an object is for granted
            raise AttributeError(name)
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, self._peer.encode(value))

    def __hash__(self) -> int:
        return int(self._number)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._peer.operate("isinstance", instance, self) is True


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *others: Any) -> Any:
        if name in _MIXED and not isinstance(others[0], Remote):
            if name == "eq":
                return False
            raise TypeError("an object of the program and data have no operations with each other")
        found = self._peer.operate(name, self, *others)
        if name in _COMPARISONS and type(found) is not bool:
            raise TypeError(f"'{name}' of an object of the program is no bool")
        if name in _MUST_BE and type(found) is not _MUST_BE[name]:
            raise TypeError(f"'{name}' of an object of the program is a {type(found).__name__}")
        return found

    return operate


for _name in (*_UNARY, *_BINARY, *_ITEMS, *_COMPARISONS):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operation(_name))


class _Judge(_Peer):
    """The end that asks. It lets the program call functions that the tests gave it, and nothing else."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self._errors: dict[str, type[BaseException]] = {}

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Value of a function of the program; its changes of the lists, dicts and sets given to it are carried over."""
        given = {key: self.encode(each) for key, each in kwargs.items()}
        value, changed = self.ask("call", number, [self.encode(each) for each in args], given)
        for place, new in changed:
            _replace(args[place], new)
        return value

    def operate(self, name: str, *operands: Any) -> Any:
        """An operation on objects of the program."""
        return self.ask("op", name, [self.encode(each) for each in operands])

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        """A function of a test, called by the program."""
        if kind != "back":
            raise Gone(f"a program cannot ask for '{kind!r:.20}'")
        number, args, kwargs = rest
        function = self.kept(number)
        return function(*map(self.decode, args), **{str(key): self.decode(each) for key, each in kwargs.items()})

    def encode_object(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"t": "own", "v": value._number}
        if isinstance(value, _FUNCTIONS):
            return {"t": "back", "v": self.keep(value)}
        raise TypeError(f"a program can be given data and functions, not a {type(value).__name__}")

    def decode_object(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        if kind == "object" and type(held) is int:
            return Remote(self, held)
        if kind == "given":
            return self.kept(held)
        if kind == "error":
            return self._error(str(held), str(value["b"]))
        raise Gone(f"no value of kind {kind!r:.20}")

    def raise_error(self, name: str, base: str, text: str) -> NoReturn:
        raise self._error(name, base)(text)

    def _error(self, name: str, base: str) -> type[BaseException]:
        """The exception class of that name: Python's, or one like the program's."""
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        parent = getattr(builtins, base, None)
        if not (isinstance(parent, type) and issubclass(parent, Exception)):
            parent = RuntimeError
        return self._errors.setdefault(name, type(str(name), (parent,), {}))


def _replace(target: Any, new: Any) -> None:
    if isinstance(target, list):
        target[:] = new
    elif isinstance(target, dict | set):
        target.clear()
        target.update(new)


class RemoteNames(dict[str, Any]):
    """The names in which statements run. Python's builtins come before names of the program."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._judge = _Judge(read, write)
        self._judge.wait()  # for the program to come to its end

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        found, value = self._judge.ask("name", name)
        if not found:
            raise KeyError(name)
        return value


# -- the program


class _Program(_Peer):
    """The end that answers."""

    def __init__(self, read: int, write: int, names: dict[str, Any]) -> None:
        super().__init__(read, write)
        self._names = names

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        """Requests of the judge."""
        if kind == "name":
            return rest[0] in self._names, self._names.get(rest[0])
        if kind == "call":
            function, args = self.kept(rest[0]), [self.decode(each) for each in rest[1]]
            value = function(*args, **{key: self.decode(each) for key, each in rest[2].items()})
            changed = [(place, each) for place, each in enumerate(args) if type(each) in (list, dict, set)]
            return value, changed
        if kind == "get":
            return getattr(self.kept(rest[0]), rest[1])
        if kind == "set":
            return setattr(self.kept(rest[0]), rest[1], self.decode(rest[2]))
        operands = [self.decode(each) for each in rest[1]]
        return getattr(operator if hasattr(operator, rest[0]) else builtins, rest[0])(*operands)

    def encode_object(self, value: Any) -> Any:
        if isinstance(value, _Given):
            return {"t": "given", "v": value.number}
        if isinstance(value, type) and issubclass(value, Exception):
            name, base, _ = _described(value.__new__(value))
            return {"t": "error", "v": name, "b": base}
        return {"t": "object", "v": self.keep(value)}

    def decode_object(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        if kind == "own":
            return self.kept(held)
        return _Given(self, held)

    def raise_error(self, name: str, base: str, text: str) -> NoReturn:
        found = getattr(builtins, name, None)
        raise (found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError)(text)

    def answer_all(self) -> None:
        """Until the judge ends."""
        self._send(["ok", None])
        while True:
            message = self._receive()
            self.serve(message[0], message[1:])


class _Given:
    """A function of a test, in the program."""

    def __init__(self, peer: _Program, number: int) -> None:
        self.peer, self.number = peer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encode = self.peer.encode
        given = {key: encode(each) for key, each in kwargs.items()}
        return self.peer.ask("back", self.number, [encode(each) for each in args], given)


def serve(program: str, names: dict[str, Any], read: int, write: int) -> int:
    """Execute a program, then answer the judge until it ends; returns the exit status.

    ``read`` and ``write`` are the pipes; what the program itself reads and writes is nothing.
    """
    private = [os.dup(read), os.dup(write)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (read, write):
        os.dup2(nowhere, number)
    peer = _Program(private[0], private[1], names)
    exec(compile(program, "program.py", "exec"), names)
    try:
        peer.answer_all()
    except Gone:
        sys.stdout.flush()
    return 0
