"""Run a script on ranks that the warm server forks, and keep what each of them prints.

It runs in the driver process. Each rank gets its environment variables as from torchrun.
"""

import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_helpers.launch.engine import Processes, wait_for_an_end
from ddp_helpers.launch.launchers import rank_environments
from ddp_helpers.launch.processes import no_interrupt
from ddp_helpers.launch.screen import shorten_paths

# Seconds until all ranks have started, and then for a run that is not meant to hang. On a busy
# machine a short training on one rank was not done after 90.
LIMIT = 180.0
# Seconds that the other ranks have when one has failed; then they get SIGTERM, as from torchrun.
GRACE = 4.0

# Called with a rank, it returns the context in which that rank runs its script.
Around = Callable[[int], AbstractContextManager[None]]


class ForkedScript(Processes):
    """Ranks that run one script, with the output of each in a file.

    exit_statuses: one for each rank, None until it has ended; seconds: how long the run took.
    """

    def __init__(
        self,
        script: Path,
        *arguments: object,
        ranks: int,
        limit: float = LIMIT,
        env: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        logs: Path | None = None,
        around: Around | None = None,
    ) -> None:
        """Start the ranks.

        arguments: the arguments of the script.
        limit: seconds after which all are ended, from the time when each has printed something.
        env: more environment variables; None removes one.
        folder, logs: where the script runs, and where the output goes; if None, a folder that is
        removed with this run.
        around: makes the context in which each rank runs the script.
        """
        super().__init__()
        self.limit, self.seconds = limit, 0.0
        self.exit_statuses: list[int | None] = [None] * ranks
        self.files = TemporaryDirectory()
        self.folder = folder or Path(self.files.name, "work")
        self.folder.mkdir(exist_ok=True)
        self.logs = [Path(logs or self.files.name, f"rank{rank}.log") for rank in range(ranks)]
        try:
            argv = [str(script), *map(str, arguments)]
            for rank, variables in enumerate(self._environments(ranks, env or {})):
                with self.logs[rank].open("wb", buffering=0) as log:
                    self.call(
                        _run_script,
                        rank,
                        argv,
                        int(LIMIT + limit),
                        around,
                        environment=variables,
                        folder=self.folder,
                        files=[None, log.fileno(), log.fileno()],
                    )
        except BaseException:
            self.end()
            raise
        # Only now: the very first start waits until the server has imported torch.
        self.begin = time.monotonic()
        self.until = self.begin + LIMIT

    def _environments(self, ranks: int, env: Mapping[str, str | None]) -> list[dict[str, str]]:
        """Return the environment of each rank.

        It hides the GPUs, so that the messages and the numbers are the same on every machine.
        """
        environments = []
        for variables in rank_environments(ranks, {"CUDA_VISIBLE_DEVICES": ""}):
            values = {**variables, **env}
            environments.append({name: text for name, text in values.items() if text is not None})
        return environments

    def is_over(self) -> bool:
        """Return whether all ranks have ended; it ends those whose time is up.

        Their exit status is None if none failed.
        """
        now, self.exit_statuses = time.monotonic(), self.statuses()
        failed = any(self.exit_statuses)
        if failed:
            self.until = min(self.until, now + GRACE)
        elif all(log.stat().st_size for log in self.logs):
            self.until = min(self.until, now + self.limit)
        if None in self.exit_statuses and now < self.until:
            return False
        self.end(signal.SIGTERM if failed else signal.SIGKILL)
        if failed:
            self.exit_statuses = self.statuses()
        self.seconds = time.monotonic() - self.begin
        return True

    def first_failed(self) -> int | None:
        """Return the rank that failed first, or if none did, one that had to be ended.

        None if all ranks have succeeded.
        """
        # By the time of each rank's last line, usually its error: the server may notice two ends at
        # once.
        last_signs = [(log.stat().st_mtime, rank) for rank, log in enumerate(self.logs)]
        ended = {*self.end_order()}
        order = sorted(last_signs, key=lambda sign: (sign[1] not in ended, sign))
        failed = [rank for _, rank in order if self.exit_statuses[rank] != 0]
        by_themselves = [
            rank for rank in failed if self.exit_statuses[rank] not in (None, -signal.SIGTERM)
        ]
        return next(iter(by_themselves + failed), None)

    def lines_of_rank(self, rank: int) -> list[str]:
        """Return the output lines of a rank."""
        return shorten_paths(self.logs[rank].read_text(errors="replace")).splitlines()


def wait_for_runs(*runs: ForkedScript) -> None:
    """Wait until these runs have ended; an interrupt ends them all."""
    waiting = list(runs)
    try:
        while waiting := [run for run in waiting if not run.is_over()]:
            wait_for_an_end(*waiting, seconds=0.05)
    finally:
        with no_interrupt():
            for run in waiting:
                run.end()


def _run_script(rank: int, argv: Sequence[str], lifetime: int, around: Around | None) -> None:
    """Run the script as a program; each rank calls it.

    argv: the path of the script, and its arguments; lifetime: seconds.
    """
    import torch

    from ddp_helpers.rank.threads import wait_before_fork_and_exit
    from ddp_tools.rendezvous import listen_narrowly

    signal.alarm(lifetime)  # even if no process watches this run
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    torch.set_num_threads(1)
    listen_narrowly()
    wait_before_fork_and_exit()
    with around(rank) if around else nullcontext():
        runpy.run_path(argv[0], run_name="__main__")
