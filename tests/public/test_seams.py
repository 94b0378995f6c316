"""Tests see persample by its public names: few files replace internal ones."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

# Files that may, and what for. A sixth needs a reason as good as these.
REPLACING = {
    "tests/seams.py": "thresholds made small, and what the layers engine answers",
    "tests/compiler.py": "what stands in for Inductor",
    "tests/engines/test_fallback_answers.py": "optimizations that fail",
    "tests/public/test_torch.py": "names of torch that are missing, or have changed",
}


def internals(tree):
    """Return the names that a file gives to modules, classes and functions of persample; the package itself is none."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "persample":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("persample.")}
        elif isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call):
            imports = "import_module('persample." in ast.unparse(call)
            found |= {ast.unparse(target) for target in node.targets if imports}
    return found


def replaced(source):
    """Return the names of persample that a file replaces: by an assignment, ``setattr``, ``mock.patch`` or the like."""
    tree = ast.parse(source)
    own, found = internals(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found += [target.value for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"setattr", "setitem", "delattr", "delitem", "object", "patch", "dict"}:
                found.append(node.args[0])
    names = map(ast.unparse, found)
    return [name for name in names if name.startswith("'persample.") or _is_internal(*name.split(".")[:2], own=own)]


def _is_internal(root, inner="", *, own):
    return root in own or (root in {"ps", "persample"} and inner)


def test_few_files_replace_internals():
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    found = {file for file, source in sources.items() if replaced(source)}
    assert found - {"tests/public/test_seams.py"} == REPLACING.keys()
    assert len(REPLACING) <= 5


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from persample.factors import cost_model\nm.setattr(cost_model, 'BLOCK', 1)", ["cost_model"]),
        ("from persample.factors import Conv\nm.setattr(Conv, 'gram', 1)", ["Conv"]),
        ("m.setattr('persample.per_sample.empty', None)", ["'persample.per_sample.empty'"]),
        ("import persample as ps\nm.setattr(ps.reductions.Norm, 'lift', None)", ["ps.reductions.Norm"]),
        ("from persample import vmap_rules\nm.setitem(vmap_rules._RULES, 1, 2)", ["vmap_rules._RULES"]),
        ("import persample.merge as m\nmock.patch.object(m, 'one', 1)", ["m"]),
        ("lower = importlib.import_module('persample.a.b')\nm.setattr(lower, 'x', 1)", ["lower"]),
        ("from persample.engines import program\nprogram.lower = wrong", ["program"]),
        ("import persample as ps\nm.setattr(ps, 'per_sample_grads', wrong)", []),
        ("from torch import nn\nm.setattr(nn.Linear, 'forward', wrong)", []),
        ("setattr(config, 'rate', 2)", []),
    ],
)
def test_what_replaces(source, names):
    assert replaced(source) == names
