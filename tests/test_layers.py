"""The import rules: which room (folder or file of infd/) may import which, and no circles of imports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import infd

PACKAGE = Path(infd.__file__).parent
LEAVES = {
    "apart",
    "commandline",
    "config",
    "constraint",
    "request",
    "errors",
    "files",
    "frames",
    "memory",
    "telemetry",
    "offload",
}
LEAVES |= {"gguf", "groups", "input_scheme"}
LEAVES |= {"embedded", "pooling", "rounding", "untrusted", "unixhttp", "sockets", "version", ""}
ALL = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
# Which rooms each room may import, besides itself and the leaves. "scheduler.plan" allows that one module.
TABLE: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES if leaf},
    "cli": ALL,
    "llm": ALL,
    "daemon": ALL,
    "__main__": {"cli"},
    "http": {"engine", "text", "mcp"},
    "mcp": set(),
    "admin": {"engine", "text", "loadgen"},
    "loadgen": set(),
    "chat": set(),
    "batch": set(),
    "text": set(),
    "grammar": set(),
    "drafting": set(),
    "engine": {"scheduler", "adapters.registry", "grammar", "drafting"},
    "scheduler": {"drafting"},
    "runner": {
        "models",
        "weights",
        "kernels",
        "adapters",
        "scheduler.plan",
        "scheduler.layout",
    },
    "executors": {"runner", "scheduler.plan", "scheduler.layout", "engine.executor", "adapters", "weights.checkpoint"},
    "models": {"kernels", "scheduler.layout"},
    "adapters": {"weights", "kernels.families"},
    "weights": set(),
    "quantize": {"models", "weights", "kernels"},
    "hub": {"weights.checkpoint"},
    "kernels": set(),
    # The program that trains the embedded model. The daemon never imports it.
    "embedded.recipe": {"text"},
}
# Libraries that a room must not import.
FORBIDDEN = {
    "text": {"torch", "aiohttp"},
    "grammar": {"torch", "aiohttp"},
    "drafting": {"torch", "aiohttp", "asyncio", "time"},
    "scheduler": {"torch", "asyncio", "time", "aiohttp", "datetime", "random"},
    "http": {"torch"},
    "mcp": {"torch"},
    "admin": {"torch"},
    "engine": {"torch", "aiohttp"},
    "apart": {"torch", "aiohttp", "asyncio"},
    "config": {"torch", "aiohttp", "asyncio"},
    "constraint": {"torch"},
    "request": {"torch"},
    "pooling": {"torch", "aiohttp", "asyncio"},
    "hub": {"torch", "aiohttp", "asyncio"},
    "chat": {"torch", "aiohttp", "asyncio"},
    "batch": {"torch"},
    "telemetry": {"torch", "aiohttp"},
    "cli": {"torch", "aiohttp", "transformers"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    first, *rest = path.relative_to(PACKAGE).parts
    if first == "embedded" and rest[0] == "recipe":
        return "embedded.recipe"
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Return the dotted names that a module imports, typing-only imports included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def allowed(name: str, here: str) -> bool:
    parts = name.split(".")[1:]
    if not parts or parts[0] not in ALL:  # `from infd.version import __version__`
        return True
    if parts[:2] == ["embedded", "recipe"]:
        return here == "embedded.recipe"
    return parts[0] in {here, *LEAVES} or any(
        parts[: entry.count(".") + 1] == entry.split(".") for entry in TABLE[here]
    )


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_rooms_that_its_own_may(path: Path):
    here = room(path)
    assert here == "" or here in TABLE, f"{here} is a new room: give it a line in the table"
    wrong = {name for name in imports(path) if name.split(".")[0] == "infd" and not allowed(name, here or "cli")}
    assert not wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_no_library_that_it_must_not(path: Path):
    wrong = {name.split(".")[0] for name in imports(path)} & FORBIDDEN.get(room(path), set())
    assert not wrong


# The modules that answer requests without HTTP, for batch runs and callers in the process.
WITHOUT_HTTP = [
    PACKAGE / "http/generate.py",
    *(PACKAGE / "http/formats").glob("*.py"),
    *(PACKAGE / "http/apis").glob("*.py"),
]


@pytest.mark.parametrize("path", WITHOUT_HTTP, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_generation_is_answered_without_aiohttp(path: Path):
    assert not [str(each) for each in reached(path) if "aiohttp" in {name.split(".")[0] for name in imports(each)}]


def reached(path: Path) -> set[Path]:
    """Return a module and all modules of infd that it imports, directly or indirectly, typing-only imports included."""
    found, todo = set(), [path]
    while todo:
        each = todo.pop()
        if each in found:
            continue
        found.add(each)
        for name in imports(each):
            parts = name.split(".")
            if parts[0] == "infd":
                whole, module = PACKAGE.joinpath(*parts[1:]), PACKAGE.joinpath(*parts[1:-1])
                todo += [file for file in (whole.with_suffix(".py"), module.with_suffix(".py")) if file.is_file()]
                todo += [file for file in (whole / "__init__.py", module / "__init__.py") if file.is_file()]
    return found


def test_the_check_sees_a_wrong_import(tmp_path: Path):
    module = tmp_path / "scheduler.py"
    module.write_text("from infd.engine import core\nimport infd.http.app\nfrom infd.request import Request\n")

    assert {name for name in imports(module) if not allowed(name, "scheduler")} == {"infd.engine.core", "infd.http.app"}


# Modules that execute data as code. multiprocessing's queues pickle; only the recipe, no part of the daemon, uses them.
EXECUTES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing", "runpy"}


def test_nothing_that_serves_makes_code_of_data():
    """No module unpickles, evaluates source text, or trusts a repository's code."""
    for path in modules():
        if room(path) == "embedded.recipe":
            continue
        assert not {name.split(".")[0] for name in imports(path)} & EXECUTES, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "numpy.load", "yaml.load"), path
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", path


def test_only_the_settings_read_the_environment():
    readers = set()
    for path in modules():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        # Assigning a variable, for a library that reads it, is permitted.
        stored = [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
        if any(isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") and n not in stored for n in nodes):
            readers.add(str(path.relative_to(PACKAGE)))
    assert {name.split("/")[0] for name in readers} <= {"config", "cli.py", "llm.py", "admin"}, readers


# Files of infd/ that more than thirty others import, each with its one idea.
HUBS = {
    "errors.py": "every deliberate error, with its HTTP status or exit code",
    "config/__init__.py": "the settings",
    "models/blueprint.py": "what a model under construction declares",
    "models/config.py": "config.json, every value checked",
    "constraint.py": "the constraints of an answer's text",
    "request.py": "a request, and what is wanted of its prompt",
    "grammar/protocol.py": "what a library that compiles grammars offers, and what it is given",
    "rounding.py": "quotients and multiples, rounded up",
    "scheduler/plan.py": "what a step computes, and its results",
}


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the strongly connected components of more than one node, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.add(frozenset(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in order:
            visit(node)
    return found


def file_imports() -> dict[str, set[str]]:
    """Return the files that each file of infd/ imports; paths are relative to infd/."""
    files = {".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts): path for path in modules()}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    names = {path: str(path.relative_to(PACKAGE)) for path in files.values()}
    edges: dict[str, set[str]] = {}
    for path in files.values():
        # `from module import name` gives module.name: `name` is a module itself or defined in `module`.
        targets = {files.get(name) or files.get(name.rpartition(".")[0]) for name in imports(path)}
        edges[names[path]] = {names[target] for target in targets if target is not None and target != path}
    return edges


def test_no_files_import_each_other_in_a_circle():
    """Typing-only and local imports count too."""
    assert not circles(file_imports())


def test_a_file_that_more_than_thirty_others_import_is_listed_with_its_one_idea():
    importers = Counter(target for targets in file_imports().values() for target in targets)

    assert {name for name, count in importers.items() if count > 30} == set(HUBS)


def test_the_check_sees_a_circle():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}

    assert circles(edges) == {frozenset("abc"), frozenset("de")}


# Lines of tests/ that read or call a private name of ours. This number may only shrink.
PRIVATE_LOOKS = 53
NOT_OURS = {"_replace", "_asdict", "_exit", "_request_id"}  # NamedTuple's, os's, openai's


def private_looks(source: str) -> set[int]:
    """Return the lines that name a private attribute of another object than the one whose code they are."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in NOT_OURS
        and not re.match(r"(self|cls|super\(\)|torch\b.*|_aten)$", ast.unparse(node.value))
    }


def test_tests_look_at_few_private_names():
    found = [
        f"{path.name}:{line}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in private_looks(path.read_text())
    ]
    assert len(found) <= PRIVATE_LOOKS, found


def test_the_check_sees_a_private_name():
    source = "a.b._c = 1\nself._d = cls._e\nx = f()._g, y._h\ntorch._C._i()\nz._replace()\nw.__doc__\nself.v._u"

    assert private_looks(source) == {1, 3, 7}


TOUR = (PACKAGE / "README.md").read_text()


def test_every_path_that_the_tour_names_exists():
    paths = {name for name in re.findall(r"`([^`\s]+)`", TOUR) if re.fullmatch(r"[\w./]+(\.py|\w/)", name)}
    assert len(paths) > 100
    assert not {path for path in paths if not (PACKAGE / path).exists() and not (PACKAGE.parent / path).exists()}


def test_the_tour_states_the_import_rules_of_the_table():
    *rooms, leaves = re.search(r"```\n(cli .*?)```", TOUR, re.DOTALL)[1].splitlines()
    told = {}
    for line in rooms:
        names, _, rest = line.partition("  ")
        imported = rest.strip().partition(";")[0]
        told |= {
            name: {"everything": ALL, "leaves only": set()}.get(imported, set(imported.split(", ")))
            for name in names.split()
        }

    assert told | {leaf: set() for leaf in leaves.split()[1:]} == TABLE
