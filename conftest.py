"""Runs the Python examples of README and docs as tests, each page in one namespace."""

import gc

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# Importing these makes the device that they test, for the whole process;
# the programs have no doctests, and import much.
collect_ignore = ["tests/standin.py", "tests/standin_calls.py", "docs/examples"]
pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()


def pytest_collection_finish():
    """Leave the modules and the tests out of later collections of garbage, a third of a second each."""
    gc.collect()
    gc.freeze()
