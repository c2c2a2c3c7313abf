"""The command line's door: parses, runs one command, turns an error of our tree into its message and exit code."""

import sys
import warnings
from collections.abc import Sequence

from weighbridge.errors import WeighbridgeError
from weighbridge.visible import visible


def main(tokens: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code: 0, an error's own (see `weighbridge.errors`), 130 on Ctrl-C."""
    from weighbridge.cli.app import app

    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # libraries' warnings are for developers, who set PYTHONWARNINGS

    try:
        code = app(tokens, result_action="return_int_as_exit_code_else_zero")
    except WeighbridgeError as error:
        print(f"weighbridge: {visible(str(error), lines=True)}", file=sys.stderr)  # noqa: T201
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Whoever read our output went away (`| head`); that is their right, and not a fault.
        sys.stderr.close()
        code = 0
    sys.exit(code)
