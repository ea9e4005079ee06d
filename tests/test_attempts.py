"""The story of a run in several attempts, read back and drawn."""

import json

import pytest

from ddp_helpers.lessons import survive_preemption
from ddp_helpers.lessons.survive_preemption import attempts_timeline


def line(time, event, step, **more):
    return json.dumps({"time": time, "event": event, "step": step, **more})


START = line(100.0, "started", 0, world_size=2)
KILLED = [START, line(101.0, "saved", 5), line(102.0, "epoch", 8, epoch=1, weights="a"), line(102.5, "saved", 8)]
AGAIN = [
    line(120.0, "started", 8, world_size=1),
    line(121.0, "epoch", 16, epoch=2, weights="b"),
    line(121.5, "saved", 16),
    line(122.0, "done", 16),
]


@pytest.fixture
def story(tmp_path):
    def write(*lines):
        (tmp_path / "attempts.jsonl").write_text("\n".join(lines))
        return survive_preemption.events(tmp_path)

    return write


def test_events_are_counted_into_attempts_and_timed_from_the_first(story):
    table = story(*KILLED, *AGAIN)
    assert table["attempt"].tolist() == [1] * 4 + [2] * 4
    assert table["seconds"].tolist() == [0, 1, 2, 2.5, 20, 21, 21.5, 22]


@pytest.mark.parametrize(
    ("end", "ended", "to_step", "lost"),
    [
        ([], "unknown", 8, 0),
        ([line(103.0, "killed", 11)], "killed", 11, 3),
        ([line(103.0, "killed", 11), line(103.2, "failed", 10, why="a peer is gone")], "killed", 11, 3),
        ([line(103.2, "failed", 10, why="a peer is gone")], "failed", 10, 2),
        ([line(103.0, "saved", 9), line(103.1, "preempted", 9)], "preempted", 9, 0),
    ],
)
def test_each_attempt_has_a_row_that_says_how_it_ended_and_what_was_lost(story, end, ended, to_step, lost):
    first, second = survive_preemption.attempts(story(*KILLED, *end, *AGAIN)).to_dict("records")
    assert (first["ended"], first["to_step"], first["lost_steps"], first["ranks"]) == (ended, to_step, lost, 2)
    assert (second["ended"], second["from_step"], second["to_step"], second["ranks"]) == ("done", 8, 16, 1)


def test_without_a_checkpoint_every_step_of_the_attempt_is_lost(story):
    [row] = survive_preemption.attempts(story(START, line(101.0, "killed", 4))).to_dict("records")
    assert row["lost_steps"] == 4 and row["saves"] == 0


def test_the_weights_of_an_epoch_are_those_of_the_attempt_that_did_it_last(story):
    redone = line(121.0, "epoch", 8, epoch=1, weights="c")
    assert survive_preemption.digests(story(*KILLED)) == {1: "a"}
    assert survive_preemption.digests(story(*KILLED, line(120.0, "started", 5, world_size=2), redone)) == {1: "c"}
    assert survive_preemption.digests(story(START)) == {}


@pytest.mark.parametrize(
    "bad",
    [
        '{"time": 10',
        "[]",
        "{}",
        line("noon", "saved", 3),
        line(101.0, ["saved"], 3),
        line(101.0, "saved", None),
        line(101.0, "started", 3),
        line(101.0, "epoch", 3, epoch=1),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_left_out(story, capsys, bad):
    table = story(START, bad, *AGAIN)
    assert len(table) == 5 and "line 2: half-written, left out" in capsys.readouterr().err
    story(START, *AGAIN)
    assert capsys.readouterr().err == ""


def test_no_story_is_an_empty_table_and_a_figure_all_the_same(tmp_path, capsys):
    table = survive_preemption.events(tmp_path)
    assert len(table) == len(survive_preemption.attempts(table)) == len(survive_preemption.digests(table)) == 0
    assert "no attempts (FileNotFoundError)" in capsys.readouterr().err
    assert "1 run" in attempts_timeline({"none": table}).alt


def hatched(picture):
    return [patch for ax in picture.figure.axes for patch in ax.patches if patch.get_hatch()]


def test_the_figure_shows_each_attempt_and_hatches_only_what_was_lost(story):
    lost = attempts_timeline({"killed": story(*KILLED, line(103.5, "killed", 11), *AGAIN)})
    [one] = hatched(lost)
    assert one.get_x() == 2.5 and one.get_width() == 1
    assert "killed in step 11, 3 steps lost, then attempt 2" in lost.alt
    labels = [label.get_text() for label in lost.figure.axes[0].get_yticklabels()]
    assert labels == ["attempt 1\n2 ranks", "attempt 2\n1 rank"]
    told = attempts_timeline({"warned": story(*KILLED, line(102.6, "preempted", 8), *AGAIN)})
    assert hatched(told) == [] and "preempted after step 8, 0 steps lost" in told.alt


def test_labels_do_not_leave_the_figure(story, tmp_path):
    picture = attempts_timeline({"a": story(*KILLED, *AGAIN), "b": story(*KILLED, line(103.0, "killed", 11), *AGAIN)})
    picture.figure.canvas.draw()
    box = picture.figure.bbox
    for ax in picture.figure.axes:
        for text in ax.texts:
            where = text.get_window_extent()
            assert where.x0 >= 0 and where.x1 <= box.x1, text.get_text()
