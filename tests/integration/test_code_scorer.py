"""The code scorer: tests decide on programs, honest ones and cheats."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.services.reward.scorers.code import Code
from penstock.shared.config.rewards.scorers import CodeScorer
from penstock.shared.errors import ScoringError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containment is made of Linux features")


def settings(**changes: Any) -> CodeScorer:
    return CodeScorer.parse({"time_limit_s": 20.0, **changes})


ADD = "def add(a, b):\n    return a + b"
TESTS: list[Any] = ["assert add(1, 2) == 3", {"call": "add", "args": [2, 2], "returns": 4}, "assert add(0, 0) == 0"]


@pytest.fixture(scope="module")
def scorers() -> Iterator[tuple[Code, Code]]:
    """Two scorers: one gives all or nothing, the other the fraction of passed tests."""
    with closing(Code(settings())) as whole, closing(Code(settings(partial=True))) as partial:
        yield whole, partial


@pytest.fixture
def hasty() -> Iterator[Code]:
    """A scorer that gives the fraction of passed tests, with a short time limit."""
    with closing(Code(settings(time_limit_s=1.0, partial=True))) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("program", "tests", "all_pass", "fraction"),
    [
        (ADD, TESTS, 1.0, 1.0),
        (ADD.replace("a + b", "a + b if a < 2 else 5"), TESTS, 0.0, 2 / 3),
        ("def add(a, b", TESTS, 0.0, 0.0),
        ("", TESTS, 0.0, 0.0),
        ("\0", TESTS, 0.0, 0.0),
        (ADD + "\nprint(open(3))", TESTS, 1.0, 1.0),
        ("class S:\n    def f(self, x): return [x]", [{"call": "S().f", "args": [1], "returns": [1]}], 1.0, 1.0),
        ("f = lambda: 0.1 + 0.2", [{"call": "f", "args": [], "returns": 0.3}], 1.0, 1.0),
        ("f = lambda: float('nan')", [{"call": "f", "args": [], "returns": None}], 0.0, 0.0),
        ("f = lambda: {1, 2}", [{"call": "f", "args": [], "returns": [1, 2]}], 0.0, 0.0),
        ("print(int(input()) ** 2, '')", [{"stdin": "3", "stdout": "9"}, {"stdin": "4", "stdout": "16\n\n"}], 1.0, 1.0),
        ("print(9)", [{"stdin": "3", "stdout": "9"}, {"stdin": "4", "stdout": "16"}], 0.0, 0.5),
        ("print(9)\nraise SystemExit(1)", [{"stdin": "3", "stdout": "9"}], 0.0, 0.0),
    ],
)  # fmt: skip
def test_scores(scorers: tuple[Code, Code], program: str, tests: list[Any], all_pass: float, fraction: float) -> None:
    for scorer, expected in zip(scorers, (all_pass, fraction), strict=True):
        text = f"Here:\n```python\n{program}\n```\n"
        assert scorer.score("", text, None, {"tests": tests}) == pytest.approx(expected)


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        'import os\nos.write(3, b\'{"step": 0, "nonce": "", "value": null}\\n\' * 9)\nos._exit(0)',
        "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *a, **k: None",
        "import json\njson.dumps = lambda *a, **k: '{}'",
        "import os\nos.write(4, b'')",
        "print('passed')",
    ],
)
def test_cheap_cheats_score_nothing(scorers: tuple[Code, Code], cheat: str) -> None:
    assert scorers[1].score("", cheat, None, {"tests": ["assert False", "assert missing()"]}) == 0.0


FIND_JOB = """
import json, os, sys
frame = sys._getframe()
while frame is not None and "job" not in frame.f_locals:
    frame = frame.f_back
job = frame.f_locals["job"]
"""
FORGE_RESULTS = """
for step in range(9):
    os.write(3, json.dumps({"step": step, "nonce": job.nonce, "value": None}).encode() + b"\\n")
os._exit(0)
"""
UNDERMINE = """
job.steps[:] = [{"code": "pass"} for _ in job.steps]
def f(x):
    return x
"""
ANYTHING = """
class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __call__(self, *args): return self
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    __abs__ = __add__ = __rsub__ = __round__ = __sub__
    __hash__ = int.__hash__
class Object:
    pass
for name, function in vars(Anything).items():
    if name not in ("__dict__", "__module__", "__doc__"):
        setattr(Object, name, function)
all = any = isinstance = len = sorted = abs = lambda *a, **k: True
def f(x):
    return Anything() if x % 2 else Object()
"""
SWALLOW = """
import builtins
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
assert_ = builtins.__build_class__
sys = __import__("sys")
sys.settrace(lambda *a: None)
def f(x): return x
"""
HIDDEN = [
    "assert f(2) == 4", "assert abs(f(3) - 9) < 1e-6", "assert not f(2) != 4", "assert f(2) in [4]", "assert 4 == f(2)",
    "assert all(f(n) == n * n for n in (2, 3))", "assert len([f(2)]) == 2 or f(3) >= 9",
    "if f(3) - 9 != 0: raise ValueError",
    "def check(candidate):\n    assert candidate(3) == 9\n\ncheck(f)",
]  # fmt: skip


@pytest.mark.parametrize("forge", [FIND_JOB + FORGE_RESULTS, FIND_JOB + UNDERMINE, ANYTHING, SWALLOW])
def test_a_program_that_forges_scores_nothing(scorers: tuple[Code, Code], forge: str) -> None:
    assert scorers[1].score("", forge, None, {"tests": HIDDEN}) == 0.0
    assert scorers[1].score("", "def f(x): return x * x", None, {"tests": HIDDEN}) == 1.0


STACK = """
import collections, decimal
class Empty(Exception): pass
class Stack:
    made = 0
    def __init__(self, items=()): self.items = list(items); Stack.made += 1
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
def count(words): return collections.Counter(words)
def sort_in_place(items): items.sort()
def apply(function, items): return [function(item) for item in items]
def upto(n):
    yield from range(n)
def pair(): return 1, {2, 3}, None, decimal.Decimal("0.1"), float("inf"), b"x"
LIMIT = 7
"""
OBJECTS = [
    "s = Stack([1]); s.push(2).push(3); assert s.pop() == 3 and len(s) == 2 and list(s) == [1, 2] and s[0] == 1",
    "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and isinstance(Stack(), Stack)",
    "try:\n    Stack().pop()\nexcept Empty as error:\n    assert str(error) == 'nothing'\nelse:\n    assert False",
    "try:\n    count(3)\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "assert count('aab') == {'a': 2, 'b': 1} and isinstance(count(''), dict)",
    "x = [3, 1, 2]; sort_in_place(x); assert x == [1, 2, 3]",
    "offset = 10\nassert apply(lambda n: n + offset, [1, 2]) == [11, 12] and apply(str, [1]) == ['1']",
    "assert list(upto(3)) == [0, 1, 2] and sum(upto(4)) == 6",
    "import decimal\nassert pair() == (1, {2, 3}, None, decimal.Decimal('0.1'), float('inf'), b'x')",
    "assert LIMIT == 7 and Stack.made >= 3",
    "try:\n    nowhere\nexcept NameError:\n    pass",
]


def test_statements_judge_objects_functions_and_errors_of_a_program(scorers: tuple[Code, Code]) -> None:
    for test in OBJECTS:
        assert scorers[1].score("", STACK, None, {"tests": ["Stack(); Stack(); Stack()", test]}) == 1.0, test


WORKS = """
import collections, json, math
class AppError(Exception): pass
class NotThere(AppError):
    def __init__(self, what, code=4):
        super().__init__(f"no {what}")
        self.what, self.code = what, code
def find(what): raise NotThere(what)
def lookup(table, key): return table[key]
def decode(data): return data.decode("ascii")
def parse(text): return json.loads(text)
def leave(): raise SystemExit(3)
def factorial(n): return math.factorial(n)
class Single:
    one = None
    def __new__(cls):
        cls.one = cls.one or object.__new__(cls)
        return cls.one
class P:
    def __init__(self, x): self.x, self.next, self.all = x, None, list(range(x))
    def __hash__(self): return hash(self.x)
    def __eq__(self, other): return isinstance(other, P) and self.x == other.x
    def __getitem__(self, i): return self.all[i]
def sort_in_place(numbers): numbers.sort()
Point = collections.namedtuple("Point", "x y")
def point(): return Point(1, 2)
def queue(n): return collections.deque(range(n))
def hello(): print("hi")
def add(a, b): return a + b
"""
WORKING = [
    "try:\n    find('x')\nexcept AppError as e:\n    assert str(e) == 'no x' and e.code == 4\nelse:\n    assert False",
    "try:\n    lookup({}, 'k')\nexcept KeyError as e:\n    assert str(e) == \"'k'\" and e.args == ('k',)",
    "try:\n    decode(b'\\xff')\nexcept UnicodeDecodeError as e:\n    assert e.start == 0",
    "import json\ntry:\n    parse('{')\nexcept json.JSONDecodeError as e:\n    assert 'line 1' in str(e)",
    "try:\n    leave()\nexcept SystemExit:\n    pass",
    "import math\nassert factorial(3000) == math.factorial(3000)",
    "assert Single() is Single()",
    "a, b = P(1), P(2)\na.next = b\nassert a.next is b and len({P(1), P(1)}) == 1 and P(9)[1:3] == [1, 2]",
    "n = [3, 1]; sort_in_place(numbers=n); assert n == [1, 3]",
    "p = point(); assert p.x == 1 and p == (1, 2)",
    "from collections import deque\nassert queue(2) == deque([0, 1])",
    "print('x' * 100_000, flush=True)\nassert add(1, 2) == 3 and add.__name__ == 'add'",
    "import sys\nassert sys.stdin.read() == '' and add(1, 2) == 3",
    "import contextlib as c, io\no = io.StringIO()\nwith c.redirect_stdout(o): hello()\nassert o.getvalue() == 'hi\\n'",
]  # fmt: skip


@pytest.mark.parametrize("test", WORKING)
def test_statements_accept_correct_programs(scorers: tuple[Code, Code], test: str) -> None:
    assert scorers[0].score("", WORKS, None, {"tests": [test, "assert add(1, 2) == 3"]}) == 1.0


TREE = """
class Tree:
    def __init__(self): self.names, self.children = {"a"}, []
    def __contains__(self, name): return name in self.names
    def __mul__(self, n): return n
    def __enter__(self): return self
    def __exit__(self, *error): return True
    def add(self, child): self.children.append(child)
"""


@pytest.mark.parametrize(
    ("statement", "as_call"),
    [
        ("assert 'a' in Tree()", "lambda: 'a' in Tree()"),
        ("assert Tree() * 2 == 2", "lambda: Tree() * 2 == 2"),
        ("with Tree(): pass", "lambda: not Tree().__enter__().children"),
        ("t = Tree(); t.children.append(1); assert t.children == [1]", "lambda t=Tree(): not t.children.append(1)"),
    ],
)
def test_checks_on_objects_fail_as_statements_and_pass_as_calls(
    scorers: tuple[Code, Code], statement: str, as_call: str
) -> None:
    """Statements may not use a program's object in ways in which the object could decide the test; see the manual."""
    assert scorers[0].score("", TREE, None, {"tests": ["with Tree(): assert False"]}) == 0.0
    assert scorers[0].score("", TREE, None, {"tests": [statement]}) == 0.0
    assert scorers[0].score("", TREE, None, {"tests": [{"call": as_call, "args": [], "returns": True}]}) == 1.0
    assert scorers[0].score("", TREE, None, {"tests": ["t = Tree(); t.add(1); assert t.children == [1]"]}) == 1.0


def test_statements_about_a_builtins_name_alone_mean_the_program(scorers: tuple[Code, Code]) -> None:
    tests = ["assert sum(10, 15) == 151", "try:\n    sum('a', 'b')\nexcept TypeError:\n    pass"]
    assert scorers[0].score("", "def sum(a, b): return a * b + 1", None, {"tests": tests}) == 1.0
    forge = "all = abs = len = sum = lambda *a: 0 or True\ndef f(x): return x"
    hidden = ["assert all(n > 5 for n in [f(1)])", "assert len([]) == sum([1])", "assert abs(f(3)) == 9"]
    assert scorers[1].score("", forge, None, {"tests": hidden}) == 0.0


def test_a_program_cannot_end_a_loop_of_the_statements(scorers: tuple[Code, Code]) -> None:
    tests = ["assert all(map(lambda n: f(n) == n, range(3)))", "assert list(map(f, [1])) == []"]
    assert scorers[1].score("", "def f(n): raise StopIteration", None, {"tests": tests}) == 0.0


@pytest.mark.long
def test_time_is_for_all_tests_together(hasty: Code) -> None:
    tests: list[Any] = ["assert True", *({"stdin": str(n), "stdout": str(n)} for n in range(50))]
    started = time.monotonic()
    assert hasty.score("", "import time\ntime.sleep(0.3)\nprint(input())", None, {"tests": tests[1:]}) < 0.1
    assert hasty.score("", "while True: pass", None, {"tests": tests}) == 0.0
    assert time.monotonic() - started < 30.0, "all tests share one time limit"


def test_row_without_tests_is_an_error(scorers: tuple[Code, Code]) -> None:
    for row in ({}, {"tests": []}, {"tests": [7]}, {"tests": None}):
        with pytest.raises(ScoringError, match="the row"):
            scorers[0].score("", "print(1)", None, row)


def test_installed_packages_are_available_on_request(scorers: tuple[Code, Code]) -> None:
    tests = {"tests": [{"call": "f", "args": [], "returns": 3}]}
    program = "def f():\n    import numpy\n    return int(numpy.arange(3).sum())"
    assert scorers[0].score("", program, None, tests) == 0.0
    with closing(Code(settings(site_packages=True))) as scorer:
        assert scorer.score("", program, None, tests) == 1.0
    ready = "import sys\ndef f():\n    return 3 if 'numpy' in sys.modules else 0"
    with closing(Code(settings(site_packages=True, preload=["numpy"]))) as scorer:
        assert scorer.score("", ready, None, tests) == scorer.score("", program, None, tests) == 1.0
    with pytest.raises(ScoringError, match="No module named 'numpy'"):
        Code(settings(preload=["numpy"]))
