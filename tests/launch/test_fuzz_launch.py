"""Ten thousand odd lines of ranks: each is kept and shown, with the number of its rank or without one."""

from contextlib import redirect_stdout
from io import StringIO

from fuzzing import fuzz

from ddp_helpers import ROOT
from ddp_helpers.jobs.files import RANK
from ddp_helpers.launch.launch import Launch, add_line
from ddp_helpers.launch.launchers import LINE_PATTERNS
from ddp_helpers.launch.screen import Screen

WORDS = ["[rank0]:", "[rank", "]:", "[1,0]<stdout>:", "0: ", "rank", "[rank1]: ", "9" * 5000, "[##..] 3/9", str(ROOT)]
WORDS += ["\x1b[31m", "\\1", "\\g<0>", "Traceback (most recent call last):"]


def test_any_line_of_a_rank_is_kept_and_shown():
    marks = [*LINE_PATTERNS, "log"]

    def line(choices):
        words = [choices.one(WORDS) if choices.below(2) else choices.text() for _ in range(choices.below(6))]
        return choices.one(marks), "".join(words)

    def check(case):
        launcher, text = case
        launch, screen = Launch([], 0.0), Screen()
        with redirect_stdout(StringIO()) as shown:
            if launcher == "log":
                match = RANK.match(text)
                screen.add(f"rank {match[1]}" if match else "", text)
                return
            add_line(text, launcher, launch, screen)
        [(rank, said)] = launch.lines
        assert rank == "" or rank.isdecimal()
        assert said in shown.getvalue() or not screen.shown

    fuzz(line, check)
