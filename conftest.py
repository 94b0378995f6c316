"""Runs the Python examples of README and docs as tests, each page in one namespace."""

import gc
import sys

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# Importing the first makes the device that they test, for the whole process; users' code is only checked; the programs
# have no doctests, and import much.
collect_ignore = ["tests/standin.py", "tests/standin_calls.py", "tests/users_code.py", "docs/examples"]
# Notebooks whose trainings take nearly half of the time of all notebooks; `make slow` runs them.
TRAININGS = {"04_reinforce.ipynb", "09_second_order.ipynb", "12_equation_and_wave_function.ipynb"}
pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()


def pytest_collection_modifyitems(items):
    """Mark long notebooks."""
    for item in items:
        if item.path.name in TRAININGS:
            item.add_marker("slow")


def pytest_collection_finish():
    """Leave the modules and the tests out of later collections of garbage; time no guards.

    For a log, torch measures the guards of each capture with an emptied cache: a third of what a small capture takes.
    """
    gc.collect()
    gc.freeze()
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0


def pytest_runtest_teardown(item, nextitem):
    """Leave out what a file has made, too: torch keeps millions of objects, and each collection would visit them."""
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()
