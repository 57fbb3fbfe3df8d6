"""Sizes and names that keep the sources readable."""

from __future__ import annotations

import ast
import functools
import gc
import re
import statistics
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("shared", "services", "src/penstock")
    for path in (ROOT / folder).rglob("*.py")
    if "src/penstock/s" not in str(path)
)
TESTS_AND_TOOLS = sorted(
    path
    for folder in ("tests", "benchmarks", "docs", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "node_modules" not in path.parts
)
"""Programs whose docstrings must have the same style; their size is not limited."""
MAX_FILE_LINES, MAX_MEDIAN_LINES, MAX_FUNCTION_LINES = 600, 200, 60
MIN_LINES_OF_ONE_IMPORTER, MAX_FOLDER_FILES = 80, 25
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "v2"}


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Stop garbage collection during these tests, which would traverse the millions of objects of the syntax trees."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 30
    assert len(TESTS_AND_TOOLS) > 300


def test_a_file_holds_one_concept() -> None:
    sizes = {name_of(path): text_of(path).count("\n") for path in SOURCES}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES} == {}, "split it by concept"
    silent = [name_of(path) for path in SOURCES if EMPTY_NAMES & {path.stem, path.parent.name}]
    assert silent == [], "the name says nothing"


def test_the_median_file_is_short() -> None:
    sizes = [n for n in (text_of(path).count("\n") for path in SOURCES) if n > 5]
    assert statistics.median(sizes) <= MAX_MEDIAN_LINES


def test_functions_are_short() -> None:
    found = [
        f"{name_of(path)}: {node.name}: {lines} lines"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert found == []


def public_names(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_public_names_are_declared_and_documented() -> None:
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path))]
    assert silent == [], "a module says in its first line what it is"
    found = [
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        for node in public_names(tree_of(path))
        if not ast.get_docstring(node)
    ]
    assert found == []
    undeclared = [
        name_of(path)
        for path in SOURCES
        if public_names(tree_of(path)) and path.stem not in {"__main__", "cli"} and not has_all(tree_of(path))
    ]
    assert undeclared == [], "a module with public names has an __all__"


def has_all(tree: ast.Module) -> bool:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


VAGUE = re.compile(r"(What|Whether|Who|Whoever|It|Nobody|Somebody)\b")


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, also of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_docstrings_begin_with_their_subject() -> None:
    found = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in [*SOURCES, *TESTS_AND_TOOLS]
        for line, text in _texts(tree_of(path))
        if VAGUE.match(text)
    ]
    assert found == [], "name the thing, or the actor"


_ENTRY = "entry point of a process"
_COMMAND, _ROUTE, _FORMULA = "command of the CLI", "routes of the API", "formula of an algorithm, see docs/python.md"
_SCORER, _SOURCE, _TRACKER = "scorer of the registry", "kind of data source", "tracker of the registry"
SMALL_WITH_ONE_IMPORTER = {
    "cli.__main__": _ENTRY,
    "cli.deployment.audit_log": _COMMAND,
    "cli.deployment.bench": _COMMAND,
    "cli.deployment.record": _COMMAND,
    "cli.jobs.describe": _COMMAND,
    "cli.live.dead_letters": _COMMAND,
    "cli.live.quarantine": _COMMAND,
    "cli.live.users": _COMMAND,
    "services.coordinator.__main__": _ENTRY,
    "services.coordinator.api.audit_log": _ROUTE,
    "services.coordinator.api.jobs.samples": _ROUTE,
    "services.coordinator.api.jobs.scaling": _ROUTE,
    "services.coordinator.trackers.swanlab": _TRACKER,
    "services.coordinator.trackers.tensorboard": _TRACKER,
    "services.coordinator.trackers.wandb": _TRACKER,
    "services.env.__main__": _ENTRY,
    "services.env.tools.python": "tool of the registry",
    "services.env.tools.worker": _ENTRY,
    "services.env.verifiers.penstock_chat": "imported by the library verifiers, by name",
    "services.reward.__main__": _ENTRY,
    "services.reward.scorers.environment": _SCORER,
    "services.reward.scorers.exact": _SCORER,
    "services.reward.scorers.format": _SCORER,
    "services.reward.scorers.function": _SCORER,
    "services.reward.scorers.math": _SCORER,
    "services.reward.service": "the service, which its entry point imports late",
    "services.rollout.__main__": _ENTRY,
    "services.trainer.__main__": _ENTRY,
    "services.trainer.backends.fsdp.frozen": "imported with the backend fsdp only",
    "services.trainer.checkpoint.export": _ENTRY,
    "shared.algorithms.cispo": _FORMULA,
    "shared.algorithms.credit": _FORMULA,
    "shared.algorithms.gspo": _FORMULA,
    "shared.algorithms.importance": _FORMULA,
    "shared.algorithms.kl_control": _FORMULA,
    "shared.algorithms.load_balancing": _FORMULA,
    "shared.algorithms.overlong": _FORMULA,
    "shared.algorithms.returns": _FORMULA,
    "shared.algorithms.sac": _FORMULA,
    "shared.algorithms.supervised": _FORMULA,
    "shared.data.addition": _SOURCE,
    "shared.data.sorting": _SOURCE,
    "shared.data.tasks": _SOURCE,
    "shared.models.distributions": "formulas of distributions, tested against those of torch",
}
"""Modules below 80 lines with at most one importer that stay on their own, with the reason."""


def _module_of(path: Path) -> str:
    """Return the name of a product module inside the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[:2] == ("src", "penstock") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, known: Container[str]) -> Iterator[str]:
    """Yield the modules in ``known`` that a file imports, whole or names of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("penstock.") in known else str(node.module) for name in names]
        else:
            continue
        yield from (short for name in names if (short := name.removeprefix("penstock.")) in known)


def lonely_modules(sources: Mapping[str, tuple[int, ast.Module]], packages: Container[str]) -> set[str]:
    """Return the modules below 80 lines that at most one other imports; ``sources`` has lines and syntax by module."""
    importers: dict[str, set[str]] = {name: set() for name in sources}
    for name, (_, tree) in sources.items():
        for found in _imported(tree, sources):
            importers[found] |= {name} - {found}
    return {
        name
        for name, (lines, _) in sources.items()
        if name not in packages and lines < MIN_LINES_OF_ONE_IMPORTER and len(importers[name]) <= 1
    }


def test_a_small_module_with_one_importer_is_part_of_it() -> None:
    sources = {_module_of(path): (text_of(path).count("\n"), tree_of(path)) for path in SOURCES}
    packages = {_module_of(path) for path in SOURCES if path.name == "__init__.py"}
    lonely = lonely_modules(sources, packages)
    assert lonely - SMALL_WITH_ONE_IMPORTER.keys() == set(), "merge it into its importer, or state why it stays"
    assert SMALL_WITH_ONE_IMPORTER.keys() - lonely == set(), "remove the exception"


def test_importers_are_counted() -> None:
    texts = {
        "a": "from penstock.shared import b\nimport penstock.shared.c",
        "shared": "",
        "shared.b": "from penstock.shared.c import name",
        "shared.c": "",
        "shared.d": "from penstock.shared.d import itself",
        "shared.e": "#\n" * 80,
    }
    sources = {name: (text.count("\n"), ast.parse(text)) for name, text in texts.items()}
    assert lonely_modules(sources, {"shared"}) == {"a", "shared.b", "shared.d"}


def test_a_folder_has_few_files() -> None:
    counts = Counter(path.parent for path in SOURCES)
    assert {name_of(folder): n for folder, n in counts.items() if n > MAX_FOLDER_FILES} == {}, "split it by concept"


PRIVATE_WORDS = {
    "beginnings": "prefix index", "book": "store, record", "books": "audit, records", "bury": "store as a dead letter",
    "buried": "dead-lettered", "crew": "rank group", "desk": "service", "desks": "services", "fate": "status, outcome",
    "fates": "statuses", "holdings": "key quota", "letter": "dead letter", "letters": "dead letters",
    "letterbox": "dead-letter queue", "muted": "not served", "nearness": "tolerance, distance",
    "overtaken": "superseded", "soil": "mark dirty", "soiled": "dirty", "story": "audit", "stories": "audits",
    "telling": "publishing", "told": "published, reported", "wish": "desired state", "wishes": "desired states",
}  # fmt: skip
"""Words that had a meaning in this project only, with the words of the field."""
PRIVATE_NAMES = {
    "carrier": "EffectPublisher", "leaderline": "LeaderRpc", "levels": "gauges", "made": "lineage",
    "offers": "off-policy examples", "once": "deduplication", "over": "closed episodes", "parked": "unmatched feedback",
    "pointer": "served version", "recalled": "recovered", "remembered": "recovered",
}  # fmt: skip
"""Common words that say too little, or something else, as the whole name of a class or module."""
PRIVATE_WORDS_ALLOWED = {
    "services/coordinator/api/jobs/deadletters.py": ({"letter"}, "parameter of the routes of dead letters"),
    "services/coordinator/queries/samples.py": ({"letter", "letters"}, "of the alphabet"),
    "services/coordinator/training/run.py": ({"letter"}, "field of Redrawn"),
    "services/reward/scorers/similarity.py": ({"letters"}, "of the alphabet"),
    "shared/config/online/patterns.py": ({"letter"}, "of the alphabet"),
    "shared/protocol/events/training.py": ({"letter"}, "stored field of Redrawn"),
    "shared/transport/kv.py": ({"letters"}, "of the alphabet"),
}
"""By file: the private words that may stand there, and the reason."""


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each class, function, parameter, variable and attribute where it is defined."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


_SUSPECT = re.compile("|".join(PRIVATE_WORDS), re.IGNORECASE)
"""Rules out most texts quickly: without a match they have no private word."""


def _private_words(text: str) -> set[str]:
    """Return the private words of a name or sentence; `dead letter` is a term of the field."""
    if not _SUSPECT.search(text):
        return set()
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]
    return {
        word
        for before, word in zip(["", *words], words, strict=False)
        if word in PRIVATE_WORDS and not (before == "dead" and word in {"letter", "letters"})
    }


def _private_names(tree: ast.Module, stem: str) -> set[str]:
    names = {stem, *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
    return {name for name in names if name.replace("_", "").lower() in PRIVATE_NAMES}


def private_words_of(name: str, tree: ast.Module) -> list[str]:
    """Return the places in a file whose names or docstrings use a private word."""
    allowed = PRIVATE_WORDS_ALLOWED.get(name, (set[str](), ""))[0]
    texts = [(0, Path(name).stem), *_defined(tree), *_texts(tree)]
    found = [
        f"{name}:{line}: '{word}': say {PRIVATE_WORDS[word]}"
        for line, text in texts
        for word in sorted(_private_words(text) - allowed)
    ]
    vague = sorted(_private_names(tree, Path(name).stem))
    return found + [f"{name}: {each}: say {PRIVATE_NAMES[each.replace('_', '').lower()]}" for each in vague]


def test_names_and_docstrings_use_the_words_of_the_field() -> None:
    assert [line for path in SOURCES for line in private_words_of(name_of(path), tree_of(path))] == []
    stale = [
        (name, word)
        for name, (words, _) in PRIVATE_WORDS_ALLOWED.items()
        for word in words
        if word not in text_of(ROOT / name).lower()
    ]
    assert stale == [], "remove the exception"


@pytest.mark.parametrize(
    "source",
    [
        "def _soil() -> None: ...",
        "def send(letter: int) -> None: ...",
        "class LetterRow: ...",
        "class KeyDesk: ...",
        "class Made: ...",
        "self.fate = 1",
        "for wishes in (): ...",
        "def f() -> None:\n    'Return the nearness of two weights.'",
        "'Letters that nobody read.'",
    ],
)
def test_private_words_are_found(source: str) -> None:
    assert private_words_of("x.py", ast.parse(source)) != []


@pytest.mark.parametrize(
    "source", ["class DeadLetterRow: ...", "dead_letters = []", "'Dead letters of a job.'", "made = 1", "told_off()"]
)
def test_words_of_the_field_are_allowed(source: str) -> None:
    assert private_words_of("x.py", ast.parse(source)) == []


def test_names_of_tests_are_short() -> None:
    named = re.compile(r"^ *(?:async )?def (test_\w{76,})", re.MULTILINE)
    found = {name for path in (ROOT / "tests").rglob("test_*.py") for name in named.findall(text_of(path))}
    assert found == set(), "at most 80 characters"


def test_no_swallowed_errors() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            )
            raises = isinstance(node.body[-1], ast.Raise)
            silent = isinstance(node.body[0], ast.Pass)
            if broad and not raises and (silent or "runtime" not in path.parts):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_float_tensors_name_their_dtype() -> None:
    """A job that loads a bf16 model changes torch's default dtype in the whole process, also for other jobs."""
    makers = {"torch.zeros", "torch.ones", "torch.empty", "torch.full", "torch.rand", "torch.randn", "torch.linspace"}
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
        if not {"dtype", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == [], "say dtype=torch.float32"
