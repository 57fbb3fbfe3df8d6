"""Executes the test statements that judge a program in a different process than the program.

Both processes run in sandboxes of their own, joined by two pipes. The judge executes the statements; a name that
neither they nor Python's builtins define is looked up in the program. Only data crosses the pipes: numbers, text and
containers by value, all else as a ``Remote`` whose operations are requests to the program. So a program determines what
its functions return, but not the verdict.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import io
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

__all__ = ["Gone", "Remote", "RemoteNames", "serve"]

MAX_BYTES = 64 << 20
"""Longest message between judge and program (bytes)."""
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
_CONTAINERS: dict[str, type] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_LONG_BITS = 8192
"""Longest integer in bits that is sent as a JSON number; Python refuses to parse decimal numbers of many digits."""
_LIBRARY = sys.stdlib_module_names - {"unittest", "doctest", "bdb"}
"""Modules whose exceptions the judge recognises. The modules left out define exceptions that skip a test."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_UNARY = (
    "neg", "pos", "abs", "invert", "index", "len", "iter", "next", "str", "repr", "bool", "int", "float", "reversed",
    "round", "hash",
)  # fmt: skip
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
_ITEMS = ("getitem", "setitem", "delitem")
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
_MIXED = frozenset({*_BINARY, *_COMPARISONS})
_MUST_BE = {"hash": int, "len": int, "index": int, "int": int, "bool": bool, "str": str, "repr": str, "float": float}


class Gone(Exception):  # noqa: N818  no error of the judge
    """The other process ended, or violated the protocol."""


class _Peer:
    """One end of the connection between judge and program. It stores the objects to which the other end refers by
    number."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), write
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def ask(self, *message: Any) -> Any:
        """Send a request and return the reply. While waiting, serve requests of the other end."""
        self._send(message)
        return self.wait()

    def wait(self) -> Any:
        """Serve requests until the reply arrives; return it. Raises Gone, or the exception raised at the other end."""
        while True:
            message = self._receive()
            kind, rest = message[0], message[1:]
            if kind == "ok":
                return self.decode(rest[0])
            if kind == "raised":
                self.raise_error(*rest)
            if kind == "printed":
                sys.stdout.write(str(rest[0]))
            else:
                self.serve(kind, rest)

    def serve(self, kind: Any, rest: list[Any]) -> None:
        """Execute a request of the other end by ``carry_out``, and send back the result or the exception."""
        try:
            answer = ["ok", self.encode(self.carry_out(kind, rest))]
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # any exception of a program or a test
            answer = ["raised", *self.describe(error)]
        self._send(answer)

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        raise NotImplementedError

    def describe(self, error: BaseException) -> list[Any]:
        """Return class, text, arguments and number of an exception, for ``raise_error`` of the other end."""
        args: list[Any] = []
        text = ""
        with contextlib.suppress(Exception):
            text = str(error)[:1000]
            args = [self.encode(each) for each in error.args]
        return [self.encode_error(type(error)), text, args, self.keep(error)]

    def encode_error(self, kind: type[BaseException]) -> dict[str, Any]:
        """Encode an exception class with its bases."""
        bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
        is_builtin = getattr(builtins, kind.__name__, None) is kind
        return {
            "t": "error",
            "v": kind.__name__,
            "m": "builtins" if is_builtin else str(kind.__module__),
            "n": self.keep(kind),
            "b": [] if is_builtin else [self.encode_error(base) for base in bases],
        }

    def raise_error(self, kind: Any, text: str, args: list[Any], number: Any) -> NoReturn:
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return ``value`` in JSON form. For an object that is not plain data, store the object at this end and return
        its number."""
        if type(value) is int and value.bit_length() > _LONG_BITS:
            return {"t": "int", "v": hex(value)}
        if value is None or type(value) in (bool, *_PLAIN):
            return value
        if type(value) is type and value in _BUILTIN_TYPES:
            return {"t": "builtin", "v": value.__name__}
        for name, (kind, plain, _) in _BY_TEXT.items():
            if type(value) is kind:
                return {"t": name, "v": plain(value)}
        return self._encode_like(value)

    def _encode_like(self, value: Any) -> Any:
        """Encode containers, and instances of subclasses of numbers and text, by value; their class is lost. Encode
        other objects with ``encode_object``."""
        found: Any = None
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return self.encode(int.__pos__(value))
        if isinstance(value, float):
            return float.__pos__(value)
        for name, container in _CONTAINERS.items():
            if isinstance(value, container):
                found = {"t": name, "v": [self.encode(each) for each in container.__iter__(value)]}  # type: ignore[attr-defined]
        if isinstance(value, tuple) and (fields := getattr(type(value), "_fields", None)):
            found |= {"t": "named", "n": type(value).__name__, "f": [str(name) for name in fields]}
        elif type(value) is slice:
            found = {"t": "slice", "v": [self.encode(each) for each in (value.start, value.stop, value.step)]}
        elif isinstance(value, dict):
            found = {"t": "dict", "v": [[self.encode(key), self.encode(each)] for key, each in dict.items(value)]}
        elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            is_array = type(value).__name__ == "ndarray"
            found = {"t": "numpy", "v": self.encode(value.tolist()), "d": str(value.dtype), "a": is_array}
        return self.encode_object(value) if found is None else found

    def encode_object(self, value: Any) -> Any:
        raise NotImplementedError

    def keep(self, value: Any) -> int:
        """Store an object at this end, and return the number by which the other end refers to it."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def kept(self, number: Any) -> Any:
        """Return the stored object with this number. Raises Gone if ``number`` is not a valid number."""
        if type(number) is not int or number < 0:
            raise Gone("no such object")
        return self._objects[number]

    def decode(self, value: Any) -> Any:
        """Decode a value that the other end encoded. Raises Gone if ``encode`` cannot have produced it."""
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
        return found if type(found) is type else self._decode_rare(kind, held, value)

    def _decode_rare(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        if kind == "int":
            return int(held, 16)
        if kind == "named":
            fields = [str(name) for name in value["f"]]
            return collections.namedtuple(str(value["n"]), fields, rename=True)(*map(self.decode, held))
        if kind == "slice":
            return slice(*map(self.decode, held))
        return self.decode_object(kind, held, value)

    def decode_pair(self, pair: Any) -> tuple[Any, Any]:
        """Decode key and value of a dict."""
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


def _private(read: int, write: int) -> tuple[int, int]:
    """Duplicate two pipe ends to new descriptors, and return the new descriptors. Reads from the old ones then return
    end of file, and writes to them are discarded."""
    private = os.dup(read), os.dup(write)
    nothing, closed = os.pipe()
    os.close(closed)
    os.dup2(nothing, read)
    os.dup2(2, write)  # standard error of a run is discarded
    os.close(nothing)
    return private


# -- the judge


class Remote:
    """The judge's handle of an object of the program. The program executes operations between such objects.

    A ``Remote`` never equals data, and other operations of it with data raise TypeError. Otherwise the object could
    pretend to be any number, and the program would learn the expected number.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: _Judge, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.call(self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # protocols that libraries trust without checks
            raise AttributeError(name)
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, self._peer.encode(value))

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
    """The judge's end of the connection. The program may call only functions that tests passed to it."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self._errors: dict[int, type[BaseException]] = {}
        self._remotes: dict[int, Remote] = {}

    def ask(self, *message: Any) -> Any:
        """Send a request. A StopIteration of the program becomes RuntimeError, unless the request is ``next``."""
        try:
            return super().ask(*message)
        except StopIteration as error:
            if message[:2] == ("op", "next"):
                raise
            raise RuntimeError("the program raised StopIteration") from error

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the program and return its result. If the function changes lists, dicts or sets among its
        arguments, the judge's own objects change, too."""
        given = {key: self.encode(each) for key, each in kwargs.items()}
        value, changed = self.ask("call", number, [self.encode(each) for each in args], given)
        for place, new in changed:
            _replace(kwargs[place] if isinstance(place, str) else args[place], new)
        return value

    def operate(self, name: str, *operands: Any) -> Any:
        """Have the program apply the operator or builtin ``name`` to ``operands``, and return the result."""
        return self.ask("op", name, [self.encode(each) for each in operands])

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        """Call a function of a test because the program requested it, and return its result; refuse any other
        request."""
        if kind != "back":
            raise Gone(f"a program cannot ask for '{kind!r:.20}'")
        number, args, kwargs = rest
        function = self.kept(number)
        return function(*map(self.decode, args), **{str(key): self.decode(each) for key, each in kwargs.items()})

    def encode_object(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"t": "own", "v": value._number}
        for number, kind in self._errors.items():
            if value is kind:
                return {"t": "own", "v": number}
        if isinstance(value, BaseException) and isinstance(of := vars(value).get("_of"), Remote):
            return self.encode_object(of)
        if isinstance(value, _FUNCTIONS):
            return {"t": "back", "v": self.keep(value)}
        raise TypeError(f"a program can be given data and functions, not a {type(value).__name__}")

    def decode_object(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        if kind == "object" and type(held) is int:
            return self._remotes.setdefault(held, Remote(self, held))
        if kind == "given":
            return self.kept(held)
        if kind == "error":
            return self._error(value)
        raise Gone(f"no value of kind {kind!r:.20}")

    def raise_error(self, kind: Any, text: str, args: list[Any], number: Any) -> NoReturn:
        made = self._error(kind)
        values = tuple(self.decode(each) for each in args)
        try:
            error = made(*values)
        except (AttributeError, TypeError, ValueError):  # its constructor takes other arguments
            error = made.__new__(made)
        error.args = values
        if made in self._errors.values():
            vars(error).update(_text=str(text), _of=self.decode_object("object", number, {}))
        raise error

    def _error(self, named: Mapping[str, Any]) -> type[BaseException]:
        """Return the exception class that a program names: Python's own, or a new class with this name and bases."""
        module, name, number = str(named["m"]), str(named["v"]), named["n"]
        found = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in _LIBRARY else None
        if isinstance(found, type) and issubclass(found, Exception | SystemExit):
            return found
        if number not in self._errors:
            bases = tuple(self._error(base) for base in named["b"])
            self._errors[number] = type(name, bases or (RuntimeError,), {"__str__": _text, "__getattr__": _attribute})
        return self._errors[number]


def _text(error: BaseException) -> str:
    """Return the text of an exception of the program, as the program reported it."""
    return str(vars(error).get("_text", BaseException.__str__(error)))


def _attribute(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception of the program."""
    if name.startswith("__") or "_of" not in vars(error):
        raise AttributeError(name)
    return getattr(vars(error)["_of"], name)


def _replace(target: Any, new: Any) -> None:
    if isinstance(target, list):
        target[:] = new
    elif isinstance(target, dict | set):
        target.clear()
        target.update(new)


class RemoteNames(dict[str, Any]):
    """Namespace of test statements, which looks up unknown names in the program. A builtin of Python takes precedence
    over a name of the program, unless the name is in ``own``.

    ``read`` and ``write`` are the pipes; reads and writes of the statements by these numbers have no effect.
    """

    def __init__(self, read: int, write: int, own: Iterable[str] = ()) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._judge, self._own = _Judge(*_private(read, write)), frozenset(own)
        self._judge.wait()  # until the program has been executed

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self._own:
            raise KeyError(name)
        found, value = self._judge.ask("name", name)
        if not found:
            raise KeyError(name)
        return value


# -- the program


class _Program(_Peer):
    """The program's end of the connection; runs in the program's process."""

    def __init__(self, read: int, write: int, names: dict[str, Any]) -> None:
        super().__init__(read, write)
        self._names = names

    def carry_out(self, kind: Any, rest: list[Any]) -> Any:
        """Execute a request of the judge and return the result."""
        if kind == "name":
            return rest[0] in self._names, self._names.get(rest[0])
        if kind == "call":
            function, args = self.kept(rest[0]), [self.decode(each) for each in rest[1]]
            given = {key: self.decode(each) for key, each in rest[2].items()}
            value = function(*args, **given)
            places: list[tuple[Any, Any]] = [*enumerate(args), *given.items()]
            changed = [(place, each) for place, each in places if type(each) in (list, dict, set)]
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
            return self.encode_error(value)
        return {"t": "object", "v": self.keep(value)}

    def decode_object(self, kind: Any, held: Any, value: Mapping[str, Any]) -> Any:
        if kind == "own":
            return self.kept(held)
        return _Given(self, held)

    def raise_error(self, kind: Any, text: str, args: list[Any], number: Any) -> NoReturn:
        found = getattr(builtins, kind["v"], None)
        raise (found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError)(text)

    def answer_all(self) -> None:
        """Answer the judge's requests until the judge ends. Text that the program's functions print appears in the
        judge's output."""
        self._send(["ok", None])
        sys.stdout.flush()
        sys.stdout = io.StringIO()
        while True:
            message = self._receive()
            self.serve(message[0], message[1:])

    def _send(self, message: Iterable[Any]) -> None:
        if isinstance(sys.stdout, io.StringIO) and (text := sys.stdout.getvalue()):
            sys.stdout.seek(0)
            sys.stdout.truncate()
            super()._send(["printed", text])
        super()._send(message)


class _Given:
    """The program's handle of a function that a test passed to it; calling the handle sends a request to the judge."""

    def __init__(self, peer: _Program, number: int) -> None:
        self.peer, self.number = peer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encode = self.peer.encode
        given = {key: encode(each) for key, each in kwargs.items()}
        return self.peer.ask("back", self.number, [encode(each) for each in args], given)


def serve(program: str, names: dict[str, Any], read: int, write: int) -> int:
    """Execute a program, then answer the judge's requests until the judge ends; return the exit status.

    ``read`` and ``write`` are the pipes; reads and writes of the program by these numbers have no effect.
    """
    peer = _Program(*_private(read, write), names)
    exec(compile(program, "program.py", "exec"), names)
    try:
        peer.answer_all()
    except Gone:
        sys.stdout.flush()
    return 0
