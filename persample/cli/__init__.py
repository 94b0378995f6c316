"""The command line, which needs the extra ``persample[cli]``; the rest of the library does not import it."""

import sys

_EXTRAS = ("typer", "rich", "matplotlib", "PIL", "gymnasium")


def main() -> None:
    """Run the command line, or report a missing extra in one line."""
    try:
        from persample.cli.app import app
    except ImportError as error:
        # persample.rl raises an error of its own for a missing gymnasium, with the original error as its cause.
        missing = error.name or getattr(error.__cause__, "name", None) or ""
        if missing.partition(".")[0] not in _EXTRAS:
            raise
        sys.stderr.write("persample's command line needs the extra: pip install '.[cli]' in a checkout\n")
        raise SystemExit(2) from None
    app(prog_name="persample")
