"""The command line of lm-evaluation-harness, with the model `lookahead`. In: its arguments. Out: what it prints.

lm-eval finds models in a registry of its own, which a package can only fill by being imported before.
"""

from __future__ import annotations

import sys

from lookahead.errors import LookaheadError
from lookahead.extras import require
from lookahead.printable import in_one_line


def main() -> int:
    """Run lm-eval's command line; returns the exit code."""
    try:
        require("lm_eval", "python -m lookahead.harness")
        from lm_eval.__main__ import cli_evaluate

        import lookahead.harness.model  # noqa: F401  (registers itself)

        cli_evaluate()
    except LookaheadError as error:
        print(f"error: {in_one_line(str(error), sys.stderr.encoding)}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
