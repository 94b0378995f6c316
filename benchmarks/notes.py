"""Why we lose where we lose: a line for every row of that table, by hand.

``make bench-report`` fails while a row that is lost has no note here, and says which; and while a note is left whose
row is no longer lost. The keys are (workload, quantity, "time" or "memory").
"""

from __future__ import annotations

NOTES: dict[tuple[str, str, str], str] = {}
