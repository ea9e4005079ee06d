"""Diagrams of the notebooks: each is legible, its alt text names its numbers, and it shows itself with that."""

import base64
import re

import pytest
from diagram_checks import must_be_legible
from IPython.core.formatters import DisplayFormatter

from ddp_helpers.draw.drawing import DPI, Picture, canvas, described, write_text
from ddp_helpers.draw.stepped import stepped
from ddp_helpers.lessons.build_it_yourself.figures import life_of_a_layer, ring_step, schedules, two_sums
from ddp_helpers.lessons.find_the_lost_time.large_batches import large_batches
from ddp_helpers.lessons.find_your_local_rank.figures import ranks_on_nodes
from ddp_helpers.lessons.fit_the_model.figures import who_holds
from ddp_helpers.lessons.form_a_process_group.figures import collectives, spmd
from ddp_helpers.lessons.shard_the_data.figures import picture_of_shards, sample_by_epoch
from ddp_helpers.lessons.shard_the_model.figures import choose
from ddp_helpers.lessons.submit_to_slurm.figures import way_of_a_job
from ddp_helpers.lessons.sweep_the_cluster.figures import backfill
from ddp_helpers.lessons.wrap_the_model.figures import BUCKET_MOMENTS, bucket_step

DEALT, MOVED = [[0, 2], [1, 3]], [[3, 2], [0, 1]]
FOLLOWED = {"forgotten": [DEALT, DEALT], "called": [DEALT, MOVED], "sample": 3}
LEARNED = {
    "SGD": {"batch 32": 93.0, "batch 512": 60.0, "4 times lr": 80.0, "16 times lr": 75.0},
    "Adam": {"batch 32": 95.0, "batch 512": 82.0, "4 times lr": 92.0, "16 times lr": 30.0},
}
CASES = [  # function, arguments, and what its alt text must name: what it has counted or computed
    (spmd, {}, "4 processes", "(1 + 3 + 5 + 7) / 4 = 4", "10 to 8"),
    (spmd, {"world_size": 2}, "2 processes", "10 to 9"),
    (ranks_on_nodes, {}, "8 ranks", "4 and 4 GPUs"),
    (ranks_on_nodes, {"gpus_per_node": (4, 4), "use": "rank"}, "ranks 4, 5, 6, 7 would fail"),
    (ranks_on_nodes, {"gpus_per_node": (8, 8), "use": "rank"}, "ranks 8, 9, 10"),
    (picture_of_shards, {"samples": 10, "world_size": 4, "seed": 1}, "2 are repeated", "rank 2 gets 1, 9, 5"),
    (picture_of_shards, {"samples": 3, "world_size": 8, "seed": 1}, "5 are repeated"),
    (picture_of_shards, {"samples": 24, "world_size": 5, "seed": 1}, "24 samples", "1 is repeated"),
    (collectives, {}, "4 ranks", "10, 20, 30, 40"),
    (collectives, {"world_size": 2}, "2 ranks", "3, 6 "),
    (ring_step, {"number": 0}, "0 of 6 pieces"),
    (ring_step, {"number": 3}, "3 of 6 pieces"),
    (ring_step, {"number": 4, "world_size": 3}, "4 of 4 pieces"),
    *[(bucket_step, {"ms": ms}, f"{ms} ms") for ms in BUCKET_MOMENTS],
    (bucket_step, {"ms": 4}, "gradient 5 is ready", "bucket 0 is full"),
    (bucket_step, {"ms": 6}, "gradient 4 is ready", "bucket 0 is under way"),
    (bucket_step, {"ms": 12}, "bucket 2 is full"),
    (bucket_step, {"ms": 15}, "2 ms per layer", "12 + 9 = 21 ms"),
    (sample_by_epoch, FOLLOWED, "Sample 3 stays on rank 1", "rank 1, 0 in epochs 0 to 1"),
    (life_of_a_layer, {}, "2 ranks"),
    (two_sums, {}, "2 ranks"),
    (schedules, {}, "18 units", "33%", "at most 4, 4, 4", "at most 3, 2, 1"),
    (way_of_a_job, {}, "2 nodes", "ranks 0 to 3"),
    (way_of_a_job, {"nodes": 3, "tasks_per_node": 2}, "3 nodes", "ranks 0 to 5"),
    (backfill, {}, "10 min", "10 to 20 min", "1 min"),
    (backfill, {"long": 30, "short": 5}, "30 to 60 min", "5 min"),
    (large_batches, {"accuracy": LEARNED, "factor": 16, "where": "here"}, "4 times lr: 80.0", "20 and 10"),
    (choose, {}, "FSDP2", "ZeroRedundancyOptimizer", "HSDP", "tensor parallel", "PowerSGD", "Join"),
    (who_holds, {"held": {"parameters": 16e6, "optimizer state": 32e6}}, "DDP 48 MB, ZeRO-1 32 MB, FSDP2 24 MB"),
    (who_holds, {"held": {"parameters": 4e9, "gradients": 4e9}}, "DDP 8000 MB, ZeRO-1 8000 MB, FSDP2 4000 MB"),
]


def unreadable():
    """A diagram with one text on another."""
    ax = canvas(2, "a title")
    for x in (3, 3.1):
        write_text(ax, x, 1, "a text")
    return described(ax.figure, "")


def test_every_diagram_is_legible_and_names_its_numbers():
    failures = []
    for draw, arguments, *in_alt in CASES:
        try:
            must_be_legible(draw, arguments, in_alt)
        except (AssertionError, Warning) as problem:
            failures.append(f"{draw.__name__}({arguments}): {problem}")
    assert not failures, "\n".join(failures)
    with pytest.raises(AssertionError, match="a text"):
        must_be_legible(unreadable, {}, [])


def test_a_picture_carries_its_alt_text_into_the_notebook(tmp_path):
    alt = 'a "quoted" <figure>'
    picture = Picture(spmd(2).figure, alt)
    data, metadata = DisplayFormatter().format(picture)
    assert data["text/plain"] == alt and data.keys() == {"text/html", "text/plain"} and metadata == {}
    source, shown, width = re.fullmatch(r'<img src="(.*?)" alt="(.*?)" width="(\d+)">', data["text/html"]).groups()
    png = base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
    assert png.startswith(b"\x89PNG") and shown == "a &quot;quoted&quot; &lt;figure&gt;"
    # More pixels an inch than that, for a sharp screen, are shown as the 96 CSS pixels that an inch has.
    assert int(width) == int.from_bytes(png[16:20], "big") * 96 // DPI > 300
    assert picture.save(tmp_path / "figure.svg").stat().st_size > 0


def test_a_stepped_picture_is_whole_in_its_page():
    frames = [spmd(2), spmd(3)]
    page = stepped(frames).data
    assert "http" not in page and page == stepped(frames).data
    assert page.count("data:image/png;base64,") == 2 + 1  # and the first, where no script runs
    assert all(frame.alt.split(",")[0] in page for frame in frames) and len(page) < 50_000 * (2 + 1)
