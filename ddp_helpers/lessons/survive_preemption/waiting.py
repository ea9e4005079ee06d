"""Wait for an event of a job, and query its state.

Notebooks 11 and 11b call it, in their kernel, while the job runs.
"""

import time
from collections.abc import Callable

from ddp_helpers.jobs.queue import states_of_job

_LIMIT = 600  # seconds


def wait_until(happened: Callable[[], object], event: str) -> None:
    """Check ten times per second whether something has happened, for ten minutes at most.

    Raises TimeoutError, which names the event, if it has not.
    """
    end = time.monotonic() + _LIMIT
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"no {event} after {_LIMIT} seconds: look at the job's log")
        time.sleep(0.1)


def wait_for_state(number: str, state: str) -> None:
    """Wait until a job has this state, such as PENDING. Raises TimeoutError as wait_until does."""
    wait_until(lambda: states_of_job(number)[0].state == state, f"job that is {state}")
