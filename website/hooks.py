"""What the documentation site needs beyond its plugins: notebooks as pages, and formulas that need no script."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))
# What pymdownx.arithmatex leaves of a formula, inline and displayed.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Bars that latex2mathml lets grow with the whole line, and an environment that it does not know.
SPELLINGS = {
    r"\lVert": r"\|", r"\rVert": r"\|", r"\lvert": "|", r"\rvert": "|", "{aligned}": "{align*}",
}  # fmt: skip
BIG = re.compile(r"\\[bB]ig[lr]?\s*([\[\]()])")  # of which an exponent would shrink one
UNKNOWN = re.compile(r">(\\\w|&(amp;)?<)")  # commands and separators that became text
# A minus after an operator or an opening bracket has no room around it; nor has a sign that is a value or a function.
SIGN = re.compile(r"(<mo[^>]*>(?!&#x00029;|&#x02016;|[])|]|&#x0007C;)[^<]+</mo>)<mo>&#x02212;</mo>")
VALUE = re.compile(r"<mo>(&#x0221E;|&#x022A5;)</mo>")
# A logarithm needs room beside other names: after one, and before its argument without brackets.
LOG, THIN = re.compile(r"(</mi>|</mrow>)?(<mi>log</mi>)(?=(<m[^on])?)"), '<mspace width="0.167em" />'
# How pages link to notebooks in the repository, notebooks to each other, and notebooks to pages.
TO_NOTEBOOK = re.compile(r"\]\((?:\.\./)+notebooks/(\w+)\.ipynb")
TO_NEXT = re.compile(r"\]\((\w+)\.ipynb")
TO_DOCS = "](../docs/"
# The front page begins as README does, up to a heading.
FIRST_SCREEN, SECOND_SCREEN = "<!-- README, first screen -->", "\n## What you can ask for"
# What search finds first and last, if words are equal: pages for errors, and pages for builders.
BOOSTS = dict.fromkeys(["errors.md", "faq.md", "sharp-edges.md"], 2.0) | dict.fromkeys(
    ["architecture.md", "decisions.md", "decision-figures.md", "benchmarks.md", "benchmark-tables.md"], 0.3
)
# Every output is a block of its own: indented ones that follow each other would be one.
OUTPUTS = """{% extends 'markdown/index.md.j2' %}
{% macro fenced(text) %}

``` { .text .output }
{{ text | strip_ansi | trim('\n') }}
```

{% endmacro %}
{% block stream %}{{ fenced(output.text) }}{% endblock %}
{% block data_text %}{{ fenced(output.data['text/plain']) }}{% endblock %}
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the notebooks in the menu, in the order of their numbers."""
    (section,) = _sections(config.nav or [], "Notebooks")
    section += [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]
    return config


def _sections(items: list[Any], name: str) -> list[list[str]]:
    """Return the lists of the sections of a name, wherever they are in the menu."""
    named = [pair for item in items if isinstance(item, dict) for pair in item.items() if isinstance(pair[1], list)]
    return [found for title, content in named for found in ([content] if title == name else _sections(content, name))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, with its stored outputs and figures."""
    exporter = MarkdownExporter(raw_template=OUTPUTS)
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)  # what one cell prints is one block
    for path in NOTEBOOKS:
        where = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        text, found = exporter.from_notebook_node(nbformat.read(path, as_version=4), where)
        text = TO_NEXT.sub(r"](\1.md", text).replace(TO_DOCS, "](../")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, data in found["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put README's first screen on the front page, lead links to notebooks to their pages, and rank pages in search."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri, 0.5 if "notebooks/" in page.file.src_uri else 1.0)}
    if FIRST_SCREEN in markdown:
        screen = (NOTEBOOKS[0].parents[1] / "README.md").read_text(encoding="utf-8").split(SECOND_SCREEN)[0]
        markdown = markdown.replace(FIRST_SCREEN, screen.replace("](docs/", "]("))
    up = "../" * page.file.src_uri.count("/")
    return TO_NOTEBOOK.sub(rf"]({up}notebooks/\1.md", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers render by themselves."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    tex = html.unescape(match[2])
    for known, meant in SPELLINGS.items():
        tex = tex.replace(known, meant)
    tex = BIG.sub(lambda bracket: (r"\left" if bracket[1] in "([" else r"\right") + bracket[1], tex)
    formula = convert(tex, display="inline" if match[1] == "span" else "block")
    formula = VALUE.sub(r"<mi>\1</mi>", SIGN.sub(r'\1<mo form="prefix">&#x02212;</mo>', formula))
    formula = LOG.sub(lambda m: f"{m[1]}{THIN}" * bool(m[1]) + m[2] + THIN * bool(m[3]), formula)
    if UNKNOWN.search(formula):
        raise PluginError(f"No MathML for {match[2]!r}: spell it with other commands.")
    return f'<{match[1]} class="formula">{formula}</{match[1]}>'
