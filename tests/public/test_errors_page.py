"""``docs/errors.md`` lists every message of the library, read from the code.

``PYTHONPATH=tests python tests/public/test_errors_page.py`` writes the list into the page.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable, Iterator

import pytest
from pages import Part
from paths import ROOT

import persample
from persample import PersampleWarning
from persample.engines import diagnosis
from persample.inputs.call import NOT_CONNECTED

PART = Part("errors.md", "list", "public/test_errors_page.py")
WARNINGS = (PersampleWarning, *PersampleWarning.__subclasses__())
KINDS = ("ArgumentError", "LossError", "TorchVersionError", *(category.__name__ for category in WARNINGS))
PARTS = {  # the folders of the package, in the order of a call
    "inputs": "Arguments",
    "engines": "Losses and engines",
    "vmap_rules": "Operations under vmap",
    "reductions": "Reductions",
    "curvature.py": "Curvature",
    "clipping.py": "Clipping rules",
    "merge.py": "Results of chunks",
    "pipeline.py": "`out=`",
    "explanation.py": "`explain`",
    "checkup.py": "`check`",
    "factors": "Linear systems",
    "utils": "Backward passes",
    "composite": "Composite gradients",
    "streams": "Streams",
    "processes.py": "Several processes",
    "losses": "Losses",
    "naive.py": "The plain loops",
    "rl": "Reinforcement learning",
    "cli": "The command line",
}
WRITERS = {  # functions that return the text of a message
    "_fault": "FallbackWarning",
    "_not_batchable": "FallbackWarning",
    "_advice": "CompilerWarning",
    "_one_sample": "added to torch's message",
    "_tree": "added to torch's message",
    "wrote": "LossError",
}
GAP = "…"
COMMON = (  # the beginnings of the commonest messages, which the page has in full
    "loss_fn: expected a loss that depends on params",
    "loss_fn: expected to return one real scalar tensor",
    "loss_fn reads values of a sample",
    "loss_fn draws random numbers, which",
    "loss_fn updates the running statistics",
    "loss_fn writes in place into its arguments",
    "loss_fn writes per-sample values in place",
    "… sees one sample, without the batch axis",
    "loss_fn uses an operation that vmap cannot batch",
    "loss_fn mixes dtypes",
    "*the argument*: expected to take params and",
    "*the argument*: expected leaves of one common batch size",
    "*the argument*: expected a batch axis",
    "*the argument*: expected a floating or complex tensor",
    "*the argument*: expected a module, or a tree of tensors",
    "*the argument*: expected a module that does not update running statistics",
    "in_dims: expected (params_dims, batch_dims)",
    "reduce: expected reductions such as Mean()",
    "weights: expected",
    "engine='auto' computed",
)


TEXTS = (ast.Constant, ast.JoinedStr, ast.IfExp, ast.BinOp, ast.Name)


class Reader:
    """Reads the texts of one file. A name is what was last assigned to it before; in several branches, all of that."""

    def __init__(self, source: str, shared: dict[str, ast.expr]) -> None:
        self.tree = ast.parse(source)
        self.constants = {**shared, **dict(assignments(self.tree.body))}
        self.places: dict[int, tuple[list[ast.stmt], int, ast.AST]] = {}
        for parent in ast.walk(self.tree):
            for field in ("body", "orelse", "handlers", "finalbody"):
                block = getattr(parent, field, None)
                for place, statement in enumerate(block if isinstance(block, list) else ()):
                    self.places[id(statement)] = block, place, parent

    def text(self, node: ast.expr, at: ast.AST) -> str:
        """The text of an expression in a statement; what is known only in a call is a gap."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(self.text(part, at) for part in parts)
        if isinstance(node, ast.IfExp):
            return alternatives([self.text(node.body, at), self.text(node.orelse, at)])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, at) + self.text(node.right, at)
        if isinstance(node, ast.Name):
            values = [(value, where) for value, where in self.assigned(node.id, at) if isinstance(value, TEXTS)]
            if not values and isinstance(constant := self.constants.get(node.id), TEXTS):
                return self.text(constant, self.tree)
            return alternatives([self.text(*pair) for pair in values])
        return GAP

    def assigned(self, name: str, at: ast.AST) -> list[tuple[ast.expr, ast.AST]]:
        """The values that a name may have in a statement, and where it was assigned."""
        found: list[tuple[ast.expr, ast.AST]] = []
        while id(at) in self.places and not isinstance(at, ast.FunctionDef):
            block, place, parent = self.places[id(at)]
            for before in reversed(block[:place]):
                direct = [(value, before) for other, value in assignments([before]) if other == name]
                inside = [x for x in ast.walk(before) if isinstance(x, ast.stmt) and x is not before]
                found += direct or [(value, x) for x in inside for other, value in assignments([x]) if other == name]
                if direct and not isinstance(before, ast.AugAssign):
                    return found
            at = parent
        return found


def assignments(block: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in block:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.BinOp(ast.Name(node.target.id), node.op, node.value)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def alternatives(texts: Iterable[str]) -> str:
    return " / ".join(text for text in dict.fromkeys(texts) if text) or GAP


def kind_of(call: ast.Call) -> str:
    """The class of the error that a call makes, or nothing."""
    names = [ast.unparse(call.func), *(ast.unparse(x) for x in call.args[1:2])]
    if names[0] == "warnings.warn":
        return next((kind for kind in KINDS if kind in names[1:]), "")
    return next((kind for kind in KINDS if names[0] in {kind, f"{kind}.about"}), "")


def messages_of(source: str, shared: dict[str, ast.expr]) -> Iterator[tuple[str, str, str]]:
    """The class of every error in a file, what it says is wrong, and the rest of its text, in order."""
    reader = Reader(source, shared)
    simple = (x for x in ast.walk(reader.tree) if isinstance(x, ast.stmt) and not hasattr(x, "body"))
    for statement in sorted(simple, key=lambda x: x.lineno):
        for call in (x for x in ast.walk(statement) if isinstance(x, ast.Call) and kind_of(x)):
            first, rest = reader.text(call.args[0], statement) if call.args else GAP, ""
            fields = {x.arg: reader.text(x.value, statement) for x in call.keywords}
            if "expected" in fields:
                name = "*the argument*" if first == GAP else first
                first, rest = (
                    f"{name}: expected {fields['expected']}",
                    f", received {fields['received']}. {fields['fix']}",
                )
            if len(re.findall(r"\w", first + rest)) > 12:  # else all of it comes from elsewhere
                yield kind_of(call), *((first, rest) if rest else in_two(first))
    for writer in (x for x in ast.walk(reader.tree) if isinstance(x, ast.FunctionDef) and x.name in WRITERS):
        returned = [x for x in ast.walk(writer) if isinstance(x, ast.Return) and isinstance(x.value, ast.JoinedStr)]
        yield from ((WRITERS[writer.name], *in_two(reader.text(x.value, x))) for x in returned)


def in_two(text: str) -> tuple[str, str]:
    """The first sentence, and the rest."""
    first = re.match(r".*?\.(?= |$)", text, re.DOTALL)
    return (first[0], text[first.end() :]) if first else (text, "")


def written() -> str:
    errors = ast.parse((ROOT / "persample" / "errors.py").read_text())
    shared = dict(assignments(errors.body))
    common, lines = dict.fromkeys(COMMON, ""), []
    for part, title in PARTS.items():
        place = ROOT / "persample" / part
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        found = [message for file in files for message in messages_of(file.read_text(), shared)]
        if part == "engines":
            causes = [*diagnosis._VMAP_CAUSES, *diagnosis._CAUSES]
            found += [("LossError", *in_two(NOT_CONNECTED))]
            found += [("LossError", f"loss_fn {did}, in *your line*.", f" {fix}") for _, did, fix in causes]
        short = []
        for kind, first, rest in dict.fromkeys(found):
            beginning = next((x for x in COMMON if first.strip().startswith(x)), None)
            if beginning is None:
                short.append(f"- `{kind}`: {plain(first)}")
            else:
                common[beginning] = common[beginning] or f"- `{kind}`: {plain(first + rest)}"
        lines += ["", f"### {title}", "", *dict.fromkeys(short)] if short else []
    assert all(common.values()), [beginning for beginning, text in common.items() if not text]
    return "\n".join(["## The commonest", "", *common.values(), "", "## All others", *lines]).strip() + "\n"


def plain(text: str) -> str:
    """A message as Markdown: gaps for what a call fills in, and no markup by accident."""
    text = re.sub(r"\{\w+\}", GAP, text)
    return re.sub(r"([<>_\[\]|])", r"\\\1", " ".join(text.split()))


def test_the_page_lists_every_message():
    PART.assert_is(written())


def test_every_part_that_raises_is_listed():
    raising = [file for file in (ROOT / "persample").rglob("*.py") if list(messages_of(file.read_text(), {}))]
    parts = {file.relative_to(ROOT / "persample").parts[0] for file in raising}
    assert parts - set(PARTS) - {"errors.py"} == set()


def test_every_warning_is_of_the_family():
    """One line silences each, or all of them."""
    for file in (ROOT / "persample").rglob("*.py"):
        calls = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) in {"warnings.warn", "warn", "warnings.warn_explicit"}:
                made = ast.unparse(call.args[0]).partition("(")[0]
                assert kind_of(call) or made in {*KINDS, "warning"}, f"{file}:{call.lineno}"


@pytest.mark.parametrize("category", WARNINGS, ids=lambda category: category.__name__)
def test_the_page_says_what_silences_a_warning(category):
    (line,) = re.findall(
        rf"\| `(warnings.filterwarnings.*persample\.{category.__name__}\))` \|\n", PART.path.read_text()
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exec(line, {"warnings": warnings, "persample": persample})
        warnings.warn("this", category, stacklevel=1)
    assert not said
    assert category.__name__ in persample.__all__


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('raise LossError(f"loss_fn returned nothing: {x}. Do that.")', "loss_fn returned nothing: …. Do that."),
        ('fix = "Do." if x else "Leave."\n raise LossError(f"it must not. {fix}")', "it must not. Do. / Leave."),
        ('if x:\n  y = "Do this now."\n else:\n  y = "Leave that."\n raise LossError(y)', "Do this now. / Leave that."),
        ('if x:\n  y = "Do this now."\n y = "Leave that as it is."\n raise LossError(y)', "Leave that as it is."),
        (
            'raise ArgumentError.about("out", expected="none", received=x, fix="Do.")',
            "out: expected none, received …. Do.",
        ),
        ('warnings.warn("this call is slow", FallbackWarning)', "this call is slow"),
    ],
)
def test_messages_are_read_from_code(source, text):
    found = [first + rest for _, first, rest in messages_of(f"def f(x):\n {source}", {})]
    assert found[0] == text


if __name__ == "__main__":
    PART.write(written())
    sys.stdout.write(f"{PART.path}: written\n")
