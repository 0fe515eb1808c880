"""Check, plan, measure and compare fine-tuning runs, and work with their results."""

import os
import sys

from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.run_end import RunFailed, print_ending
from zero_recipes.engine.warnings import quieten_loggers
from zero_recipes.tools.arguments import parse_arguments


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0 done, 1 a run or a check failed, 2 refused."""
    quieten_loggers()
    with_traceback = "--traceback" in (argv or sys.argv)
    arguments = parse_arguments(argv, __doc__)
    try:
        return arguments.func(arguments)
    except (Refusal, RunFailed, KeyboardInterrupt) as ending:
        return print_ending(ending, with_traceback)
    except BrokenPipeError:  # a pager or `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
        return 1
    except OSError as error:  # a path of the command line: no such file, no folder, not to be read or written
        return print_ending(refusal("ZR352", error=error), with_traceback)


if __name__ == "__main__":
    sys.exit(main())
