"""The story of a run in several attempts, read back and drawn."""

import json
import re

import pytest

from ddp_helpers.lessons.survive_preemption import attempts, figures


def line(at, event, *step):
    return json.dumps({"time": at, "event": event, **dict(zip(["step"], step, strict=False))})


START = line(100.0, "started", 0)
KILLED = [START, line(101.0, "saved", 5), line(102.5, "saved", 8)]
AGAIN = [line(120.0, "started", 8), line(121.0, "saved", 13), line(121.5, "saved", 16), line(122.0, "done")]


@pytest.fixture
def story(tmp_path):
    def write(*lines):
        (tmp_path / "attempts.jsonl").write_text("\n".join(lines))
        return attempts.read_events(tmp_path)

    return write


def test_events_are_counted_into_attempts_and_timed_from_the_first(story):
    table = story(*KILLED, *AGAIN)
    assert table["attempt"].tolist() == [1] * 3 + [2] * 4
    assert table["seconds"].tolist() == [0, 1, 2.5, 20, 21, 21.5, 22]
    assert table["step"].tolist() == [0, 5, 8, 8, 13, 16, 16], "an end has the step of the event before"


@pytest.mark.parametrize(
    ("end", "ended", "to_step", "lost"),
    [
        ([], "unknown", 8, 0),
        ([line(103.25, "failed")], "failed", 8, 0.75),
        ([line(103.0, "saved", 9), line(103.5, "preempted")], "preempted", 9, 0),
    ],
)
def test_each_attempt_has_a_row_that_says_how_it_ended_and_what_was_lost(story, end, ended, to_step, lost):
    first, second = attempts.list_attempts(story(*KILLED, *end, *AGAIN))
    assert (first.ended, first.to_step, first.lost_seconds) == (ended, to_step, lost)
    assert (second.ended, second.from_step, second.to_step) == ("done", 8, 16)


def test_without_a_checkpoint_all_of_the_attempt_is_lost(story):
    [one] = attempts.list_attempts(story(START, line(101.5, "failed")))
    assert (one.lost_seconds, one.saves, one.to_step) == (1.5, 0, 0)


def test_a_line_that_was_cut_off_is_left_out(story):
    assert len(story(START, '{"time": 10', *AGAIN)) == 5


def hatched(picture):
    return [patch for ax in picture.figure.axes for patch in ax.patches if patch.get_hatch()]


def test_the_figure_shows_each_attempt_and_hatches_only_what_was_lost(story):
    lost = figures.attempts_timeline({"killed": story(*KILLED, line(103.5, "failed"), *AGAIN)})
    [one] = hatched(lost)
    assert one.get_x() == 2.5 and one.get_width() == 1
    assert re.findall(r"killed|\d.\d s", lost.figure.get_suptitle().lower()) == ["killed", "1.0 s"]
    told = figures.attempts_timeline({"warned": story(*KILLED, line(102.6, "preempted"), *AGAIN)})
    assert hatched(told) == [] and told.alt.startswith("Warned: nothing lost")


def test_a_figure_says_its_finding():
    survives = figures.survival(16_384 * 54 * 24 / 419).alt
    assert re.search(r"\b64 GPUs\b.*\b81%.*\b1,024\b.*\b3%", survives), survives
    curve = figures.u_curve(0.05, {"day": 86_400}, "here").alt
    assert re.search(r"\bday\b.*\b93 s\b.*\b0\.11%", curve), curve
