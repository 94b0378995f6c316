"""Parts of pages that tests write, between comments that name the command: what they show is what the tests find."""

from __future__ import annotations

from dataclasses import dataclass

from paths import ROOT


@dataclass(frozen=True)
class Part:
    page: str
    kind: str
    script: str

    @property
    def path(self):
        return ROOT / "docs" / self.page

    @property
    def command(self):
        return f"PYTHONPATH=tests python tests/{self.script}"

    def _split(self):
        start, end = f"<!-- {self.kind}: {self.command} -->\n", f"<!-- end of {self.kind} -->\n"
        before, rest = self.path.read_text(encoding="utf-8").split(start)
        shown, after = rest.split(end)
        return before + start, shown, end + after

    def assert_is(self, text):
        assert self._split()[1] == text, f"docs/{self.page} is not what the tests find: run {self.command}"

    def write(self, text):
        before, _, after = self._split()
        self.path.write_text(before + text + after, encoding="utf-8")
