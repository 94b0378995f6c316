"""What the site adds to its plugins: formulas as MathML, notebooks as pages. And the notebooks as they are stored."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import markdown
import nbformat
import pytest
from mkdocs.config.base import load_config
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "website" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def html(hooks, text):
    extension = {"pymdownx.arithmatex": {"generic": True}}
    return hooks.on_page_content(markdown.markdown(text, extensions=list(extension), extension_configs=extension))


def test_formulas_become_mathml(hooks):
    page = html(hooks, r"Inline $\lVert g_i \rVert < C$ costs \$5." + "\n\n$$\\sum_i g_i$$")
    assert page.count("<math") == 2
    assert 'display="block"' in page
    assert "costs $5." in page
    assert "\\" not in page


@pytest.mark.parametrize("formula", [r"\nonsense x", r"\begin{gathered} a & b \end{gathered}"])
def test_formulas_that_would_show_their_source_are_refused(hooks, formula):
    with pytest.raises(PluginError, match="No MathML for"):
        html(hooks, f"${formula}$")


def test_aligned_formulas_and_bars_of_one_height(hooks):
    page = html(hooks, "$$\\begin{aligned} a &= \\lvert b \\rvert \\\\ c &= d \\end{aligned}$$")
    assert page.count("<mtr>") == 2
    assert page.count('stretchy="false"') == 2


def test_a_bracket_with_an_exponent_is_as_large_as_the_other(hooks):
    page = html(hooks, r"$\big[a\big] \Bigl(\frac{b}{c}\Bigr)^2$")
    assert page.count('stretchy="true"') == 4
    assert "<msup><mrow>" in page


def test_signs_have_room_only_between_two_values(hooks):
    page = html(hooks, r"$a = -1, (-2) - \|{-3}\| - |b| - 4 < \infty$")
    assert page.count('<mo form="prefix">&#x02212;</mo>') == 2
    assert page.count("<mo>&#x02212;</mo>") == 4
    assert "<mi>&#x0221E;</mi>" in page


def test_logarithms_have_room_beside_names(hooks):
    page = html(hooks, r"$\mathrm{Re} \log \psi - \log(x) - \log^2 x$")
    assert page.count('<mspace width="0.167em" />') == 2
    assert '</mrow><mspace width="0.167em" /><mi>log</mi><mspace width="0.167em" /><mi>' in page


def test_notebooks_become_pages(hooks, tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook()
    shown = nbformat.v4.new_output("display_data", {"image/png": "aGk=", "text/plain": "<Figure>"})
    printed = [nbformat.v4.new_output("stream", text=f"{line}\n") for line in ("one", "more")]
    value = nbformat.v4.new_output("execute_result", {"text/plain": "two"}, execution_count=1)
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# Title\n\nSee [concepts](../docs/concepts.md), then [on](02_next.ipynb)."),
        nbformat.v4.new_code_cell("1 + 1", outputs=[*printed, value, shown]),
    ]
    nbformat.write(notebook, tmp_path / "01_title.ipynb")
    monkeypatch.setattr(hooks, "NOTEBOOKS", [tmp_path / "01_title.ipynb"])
    config = load_config(str(ROOT / "mkdocs.yml"))
    config.plugins._current_plugin = "hooks"  # as mkdocs sets it while it calls one
    files = hooks.on_files(Files([]), config=config)
    page, picture = files
    assert page.src_uri == "notebooks/01_title.md"
    assert "[concepts](../concepts.md), then [on](02_next.md)" in page.content_string
    assert page.content_string.count("``` { .text .output }") == 2
    assert f"]({picture.src_uri.removeprefix('notebooks/')})" in page.content_string
    assert picture.content_bytes == b"hi"
    hooks.on_config(config)
    (users,) = [item["For users"] for item in config.nav if "For users" in item]
    assert {"Notebooks": ["notebooks/01_title.md"]} in users


def test_links_to_notebooks_lead_to_their_pages(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/jax.md"), meta={})
    changed = hooks.on_page_markdown("see [it](../../notebooks/03_td0.ipynb)", page=page)
    assert changed == "see [it](../notebooks/03_td0.md)"
    assert page.meta == {"search": {"boost": 1.0}}


def test_the_front_page_ends_at_a_heading_of_readme(hooks):
    assert (ROOT / "README.md").read_text(encoding="utf-8").count(hooks.SECOND_SCREEN) == 1


def test_search_ranks_pages_that_are_there(hooks):
    assert all((ROOT / "docs" / page).is_file() for page in hooks.BOOSTS)
    assert hooks.BOOSTS["errors.md"] > 1 > hooks.BOOSTS["decisions.md"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(path):
    """From top to bottom in a fresh kernel, without warnings, errors, or places on somebody's machine."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert cells[0].source.startswith("# ")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(cells[0].source.split()) <= 80  # what will be seen, then the picture, which a later cell puts there
    assert "image/png" in code[0].outputs[0].data
    assert sum("opening.update(" in cell.source for cell in code) == 1
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    text = path.read_text()
    assert all(place not in text for place in ("/home/", "/work/", "/tmp/", "/root/", "/Users/"))
    assert len(text) < 2**20
