"""Runs the Python examples of README and docs as tests, each page in one namespace."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# Importing these makes the device that they test, for the whole process.
collect_ignore = ["tests/standin.py", "tests/standin_calls.py"]
pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()
