"""Run a script on ranks that a server with torch forks, and keep what each of them prints.

Lessons and tests call it, in the learner's process. Each rank is given its numbers as by torchrun.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_helpers.launch.forked import ForkedRanks, wait_for_an_end
from ddp_helpers.launch.launchers import rank_environments
from ddp_helpers.launch.processes import MARK, no_interrupt
from ddp_helpers.launch.screen import shorten_paths

# Seconds until all ranks have begun, and then for a run that is not meant to hang. Beside many busy
# processes a short training on one rank was not done after 90.
LIMIT = 180.0
# Seconds that the others have when a rank has failed; then they get SIGTERM, as from torchrun.
GRACE = 4.0

# What the server imports, before it forks: DDP needs the last.
PRELOADED = [__name__, "torchvision.datasets", "torch._dynamo"]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)

# Called with the number of a rank, it returns the context in which that rank runs its script.
Around = Callable[[int], AbstractContextManager[None]]


class ForkedScript(ForkedRanks):
    """Ranks that run one script, with the output of each in a file.

    ends: the exit status of each rank, None until it has ended; seconds: how long the run took.
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

        arguments: the script's.
        limit: seconds until all are ended, counted from when each has printed something.
        env: more variables of the environment; one that is None is left out.
        folder, logs: where the script runs, and where the output goes; if None, in a folder that is
        removed with this run.
        around: makes the context in which each rank runs the script; pickled, so no lambda.
        """
        super().__init__("forkserver")
        self.limit, self.seconds = limit, 0.0
        self.exit_statuses: list[int | None] = [None] * ranks
        self.files = TemporaryDirectory()
        self.folder = folder or Path(self.files.name, "work")
        self.folder.mkdir(exist_ok=True)
        self.logs = [Path(logs or self.files.name, f"rank{rank}.log") for rank in range(ranks)]
        try:
            argv = [str(script), *map(str, arguments)]
            for rank, variables in enumerate(self._environments(ranks, env or {})):
                log = self.logs[rank]
                log.write_text("")
                lifetime = int(LIMIT + limit)
                self.start(_run_script, rank, argv, self.folder, log, variables, lifetime, around)
        except BaseException:
            self.end()
            raise
        # Only now: the first start of all waits until the server has imported torch.
        self.begin = time.monotonic()
        self.until = self.begin + LIMIT

    def _environments(self, ranks: int, env: Mapping[str, str | None]) -> list[dict[str, str]]:
        """Return the environment of each rank.

        It hides the GPUs, so that the messages and the numbers are the same on every machine.
        """
        environments = []
        for variables in rank_environments(ranks, {MARK: self.mark, "CUDA_VISIBLE_DEVICES": ""}):
            values = {**variables, **env}
            environments.append({name: text for name, text in values.items() if text is not None})
        return environments

    def is_over(self) -> bool:
        """Say whether all ranks have ended; those whose time is up are ended here.

        Their status in `ends` is None if none failed.
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

    def _last_sign(self, rank: int) -> float:
        """Return when a rank last printed something: for most errors, how it ended."""
        return self.logs[rank].stat().st_mtime

    def first_failed(self) -> int | None:
        """Return the rank that failed first, or if none did, one that had to be ended.

        None if all ranks have ended well.
        """
        late = [rank for rank in range(len(self.exit_statuses)) if rank not in self.end_order]
        failed = [rank for rank in [*self.end_order, *late] if self.exit_statuses[rank] != 0]
        by_themselves = [
            rank for rank in failed if self.exit_statuses[rank] not in (None, -signal.SIGTERM)
        ]
        return next(iter(by_themselves + failed), None)

    def lines_of_rank(self, rank: int) -> list[str]:
        """Return the lines of a rank."""
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


def _run_script(
    rank: int,
    argv: Sequence[str],
    folder: Path,
    log: Path,
    env: Mapping[str, str],
    lifetime: int,
    around: Around | None,
) -> None:
    """Run the script in this folder, with its output in the log; each rank calls it.

    argv: the path of the script, and its arguments; lifetime: seconds.
    """
    import torch
    import torch.distributed as dist

    from ddp_helpers.rank.meeting import listen_narrowly
    from ddp_helpers.rank.threads import wait_before_fork_and_exit

    signal.alarm(lifetime)  # also where nobody attends to this run any more
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    listen_narrowly()
    wait_before_fork_and_exit()
    try:
        with around(rank) if around else nullcontext():
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
