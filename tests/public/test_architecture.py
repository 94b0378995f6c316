"""Imports inside persample/ follow the table of docs/architecture.md, which lists every folder and file."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
from paths import ROOT

import persample

PACKAGE = ROOT / "persample"
TABLE = re.search(r"\| path \|.*\n\| -.*\n((?:\|.*\n)+)", (ROOT / "docs" / "architecture.md").read_text())
# What ``import persample`` imports: the public names.
PUBLIC = "persample"


def named(cell: str) -> list[str]:
    """Return the dotted names of the paths in a cell: "engines.layers" for `engines/layers/`."""
    return [path.removesuffix(".py").strip("/").replace("/", ".") for path in re.findall(r"`(.*?)`", cell)]


def rules(rows: list[tuple[str, str]]) -> dict[str, tuple[str, set[str]]]:
    """Return for each entry, top down, its rule in words and the entries that it may import."""
    listed = {name: rule for path, rule in rows for name in named(path)}
    entries, last = list(listed), ""
    bottom = [name for name, rule in listed.items() if rule == "nothing of ours"]
    downwards = [name for name, rule in listed.items() if rule != "everything above"]
    found: dict[str, tuple[str, set[str]]] = {}
    for name, words in listed.items():
        last = rule = last if words == "the same" else words
        allowed = {name, *named(rule)} | (set(bottom) if name not in bottom else set())
        if rule == "everything above":
            allowed |= {PUBLIC, *entries[: entries.index(name)]}
        elif rule == "everything below":
            allowed |= set(downwards[downwards.index(name) :])
        elif rule.endswith(" and below"):
            allowed |= set(downwards[downwards.index(named(rule)[-1]) :])
        found[name] = rule, allowed
    return found


def entry_of(module: str, entries: dict[str, object]) -> str:
    """Return the innermost entry that a module belongs to, given without "persample."."""
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in entries), PUBLIC)


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of all that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def violations(path: str, source: str, table: dict[str, tuple[str, set[str]]]) -> list[str]:
    """Return a line for each import of a file that the table does not allow."""
    own = entry_of(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), table)
    if own == PUBLIC:  # persample/__init__.py, or a file that is not in the table
        return []
    rule, allowed = table[own]
    found = []
    for line, name in imported(source):
        top, _, module = name.partition(".")
        if top in {"", "benchmarks", "tests", "website"}:
            found.append(f"persample/{path}:{line} imports {name}, but the package imports itself by full names only")
        elif top == "persample" and entry_of(module, table) not in allowed:
            found.append(f"persample/{path}:{line} imports {name}, but `{own}` may import: {rule}")
    return found


@pytest.fixture(scope="module")
def table():
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in TABLE[1].splitlines()]
    return rules([(path, rule) for path, _, rule in rows])


def test_every_import_follows_the_table(table):
    files = sorted(PACKAGE.rglob("*.py"))
    found = [violations(str(file.relative_to(PACKAGE)), file.read_text(), table) for file in files]
    assert len(files) > 50
    assert not any(found), "\n" + "\n".join(line for lines in found for line in lines)


def test_the_table_lists_every_folder_and_file(table):
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries - {"__init__"} == {name.partition(".")[0] for name in table}
    missing = [name for name in table if not list(PACKAGE.glob(f"{name.replace('.', '/')}*"))]
    assert not missing, "in docs/architecture.md, but not in persample/"


def test_the_words_of_the_table_are_rules(table):
    phrases = r"everything (above|below)|nothing of ours|(`\w+(/\w+)*`(, )?)+( and below)?"
    assert not [rule for rule, _ in table.values() if not re.fullmatch(phrases, rule)]
    assert not [name for rule, _ in table.values() for name in named(rule) if name not in table]


SMALL = [
    ("`top.py`", "everything below"),
    ("`make/`", "`utils` and below"),
    ("`make/fast/`", "the same"),
    ("`utils/`", "`low`"),
    ("`low.py`, `errors.py`", "nothing of ours"),
    ("`losses/`, `cli/`", "everything above"),
]


@pytest.mark.parametrize(
    ("path", "line", "allowed"),
    [
        ("top.py", "from persample.make import a", True),
        ("top.py", "from persample.cli import app", False),
        ("make/a.py", "from persample.make.b import c", True),
        ("make/a.py", "from persample import utils", True),
        ("make/a.py", "import persample.top", False),
        ("make/__init__.py", "def f():\n    from persample.make.fast import a", False),
        ("make/fast/a.py", "from persample.make import b", False),
        ("utils/a.py", "from persample.errors import E", True),
        ("utils/a.py", "import persample", False),
        ("utils/a.py", "from persample import Mean", False),
        ("utils/a.py", "from . import b", False),
        ("low.py", "from persample.errors import E", False),
        ("losses/a.py", "from persample.cli import app", False),
        ("cli/a.py", "from persample import Mean, losses", True),
        ("cli/a.py", "from benchmarks.report import page", False),
        ("cli/a.py", "import torch", True),
    ],
)
def test_reading_the_table(path, line, allowed):
    found = violations(path, line, rules(SMALL))
    assert bool(found) is not allowed
    assert all(f"persample/{path}:" in message for message in found)


def test_the_files_of_make_quick_are_there():
    (names,) = re.findall(r"^QUICK := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not [name for name in names.split() if not list((ROOT / "tests").rglob(f"test_{name}.py"))]


def test_no_module_is_hidden_by_what_its_package_imports_and_no_name_comes_twice():
    found = [module.name for module in pkgutil.walk_packages(persample.__path__, "persample.")]
    names = [name for name in found if not name.endswith("__main__")]
    assert len(names) > 100
    for name in names:
        package, _, last = name.rpartition(".")
        assert importlib.import_module(name) is getattr(importlib.import_module(package), last)
    assert len({name.rpartition(".")[2] for name in names}) == len(names)
