"""Arguments, checks and waits of test scripts."""

import argparse
import time


def parse_arguments(*required, **optional):
    """Returns the values of the options of these names, `optional` with their defaults, and the names of `cases`."""
    parser = argparse.ArgumentParser()
    for name in required:
        parser.add_argument(f"--{name}", required=True)
    for name, default in optional.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("cases", nargs="*")
    return parser.parse_args()


def check(good, text):
    """Prints the result of a check. Exits with an error unless `good`."""
    print(("ok: " if good else "FAILED: ") + text, flush=True)
    if not good:
        raise SystemExit(1)


def wait_until(condition, what, limit_s=30.0):
    """Polls until `condition()` returns a true value, and returns that value. `what` explains a RuntimeError."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise RuntimeError(f"after {limit_s} s: {what}")
        time.sleep(0.01)
    return found
