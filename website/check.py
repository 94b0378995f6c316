"""Opens every page of the built site in a headless browser, and says what is wrong with it.

    pip install playwright
    python website/check.py .site --browser /usr/bin/chromium --screenshots shots

Wrong is: an error in the console, a request that fails or leaves the machine, a link or an anchor that leads nowhere, a
picture that does not load, a formula that was not rendered, a page wider than the screen, a search without results.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from playwright.sync_api import Browser, Page, sync_playwright

SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
# What a page says about itself.
FACTS = """() => ({
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    anchors: [...document.querySelectorAll('[id]')].map(e => e.id),
    unloaded: [...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src),
    raw: [...document.querySelectorAll('.arithmatex, merror')].map(e => e.textContent),
    empty: [...document.querySelectorAll('math')].filter(m => !m.getBoundingClientRect().height).length,
    overflow: document.documentElement.scrollWidth - innerWidth,
})"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing for every file that is served."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port meanwhile; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def watched(browser: Browser, root: str, look: tuple[str, str]) -> tuple[Page, list[str]]:
    """Open a tab of one screen and colour; return it, and the list that its problems will be added to."""
    screen, colour = look
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colour)  # type: ignore[arg-type]
    found: list[str] = []
    page.on("console", lambda m: found.append(f"console: {m.text}") if m.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on("response", lambda r: found.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on("request", lambda r: None if r.url.startswith((root, "data:")) else found.append(f"leaves: {r.url}"))
    return page, found


def visit(page: Page, url: str, found: list[str]) -> Any:
    """Open a page; return its facts, and add its problems to those found."""
    page.goto(url, wait_until="load")
    page.wait_for_timeout(200)
    facts = page.evaluate(FACTS)
    found += [f"no picture: {source}" for source in facts["unloaded"]]
    found += [f"no formula: {text}" for text in facts["raw"]] + ["an empty formula"] * facts["empty"]
    found += [f"{facts['overflow']} pixels wider than the screen"] * (facts["overflow"] > 0)
    return facts


def dead_links(root: str, pages: dict[str, Any]) -> Iterator[str]:
    """Yield the links within the site that lead to no page, or to no place in it."""
    for path, facts in pages.items():
        for link in sorted({link for link in facts["links"] if link.startswith(root)}):
            target, anchor = urldefrag(link.removeprefix(root))
            if target not in pages:
                yield f"{path or 'index'}: no page {link}"
            elif anchor and anchor not in pages[target]["anchors"]:
                yield f"{path or 'index'}: no such place {link}"


def search(page: Page, root: str) -> list[str]:
    """Return what is wrong with the search."""
    page.goto(root, wait_until="load")
    page.click("input[name=query]")
    page.keyboard.type("ClippedMean")
    try:
        page.wait_for_selector(".md-search-result__item", timeout=10_000)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is no result)
        return [f"search: {error}"]
    return []


def main() -> int:
    """Check the site that was built into a folder; return how many problems there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--screenshots", type=Path)
    options = parser.parse_args()
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    paths = sorted(
        f"{page.parent.relative_to(options.site).as_posix()}/".removeprefix("./")
        for page in options.site.rglob("index.html")
    )
    found: list[str] = []
    with served(options.site) as root, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser)
        pages: dict[str, Any] = {}
        for look in [(screen, colour) for screen in SCREENS for colour in ("light", "dark")]:
            page, problems = watched(browser, root, look)
            for path in paths:
                pages[path] = visit(page, root + path, problems)
                found += [f"{path or 'index'} ({', '.join(look)}): {problem}" for problem in problems]
                problems.clear()
                if options.screenshots:
                    name = "-".join([path.strip("/").replace("/", "-") or "index", *look])
                    page.screenshot(path=options.screenshots / f"{name}.png")
        found += [*dead_links(root, pages), *search(browser.new_page(), root)]
        browser.close()
    print(*found, f"{len(paths)} pages, {len(found)} problems", sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
