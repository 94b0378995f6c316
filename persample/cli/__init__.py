"""The command line. It needs the extra ``persample[cli]``; everything else in the library works without it."""

import sys

_EXTRAS = ("typer", "rich", "matplotlib", "PIL", "gymnasium")


def main() -> None:
    """Run the command line, or say in one line which extra is missing.

    Raises:
        SystemExit: always; its code is 2 where an extra is missing.
        ImportError: if anything but an extra cannot be imported.
    """
    try:
        from persample.cli.app import app
    except ImportError as error:
        # persample.rl replaces the error of a missing gymnasium by its own, which keeps it as the cause.
        missing = error.name or getattr(error.__cause__, "name", None) or ""
        if missing.partition(".")[0] not in _EXTRAS:
            raise
        sys.stderr.write("persample's command line needs the extra: pip install 'persample[cli]'\n")
        raise SystemExit(2) from None
    app(prog_name="persample")
