import base64
import warnings
from itertools import combinations

import pytest
from torch.utils.data import DistributedSampler

from ddp_helpers.lessons.find_your_local_rank import ranks_on_nodes, signal_path
from ddp_helpers.lessons.form_a_process_group import collectives, spmd
from ddp_helpers.lessons.shard_the_data.figures import deals_by_epoch, global_batch, picture_of_shards, shard_indices
from ddp_helpers.lessons.submit_to_slurm.figures import backfill, way_of_a_job
from ddp_helpers.lessons.wrap_the_model.figures import data_parallel_vs_ddp, ddp_buckets, memory_of_gradients
from ddp_helpers.notebook.drawing import DPI, Picture

CASES = [  # function, arguments, and what its alt text must name
    (spmd, {}, ["4 processes", "mean, (1 + 3 + 5 + 7) / 4 = 4", "weight 10 to 8"]),
    (spmd, {"world_size": 2}, ["2 processes", "= 2", "weight 10 to 9"]),
    (spmd, {"world_size": 8}, ["8 processes", "weight 10 to 6"]),
    (ranks_on_nodes, {}, ["8 ranks", "4 and 4 GPUs", "every rank has its own GPU"]),
    (ranks_on_nodes, {"use": "rank"}, ["cuda:rank", "ranks 4, 5, 6, 7 would fail"]),
    (ranks_on_nodes, {"gpus_per_node": (4, 2)}, ["6 ranks", "4 and 2 GPUs"]),
    (ranks_on_nodes, {"gpus_per_node": (4, 2), "use": "rank"}, ["ranks 4, 5 would fail"]),
    (ranks_on_nodes, {"gpus_per_node": (2, 4), "use": "rank"}, ["ranks 4, 5 would fail"]),
    (ranks_on_nodes, {"gpus_per_node": (8, 8)}, ["16 ranks"]),
    (ranks_on_nodes, {"gpus_per_node": (8, 8), "use": "rank"}, ["ranks 8, 9, 10"]),
    (ranks_on_nodes, {"gpus_per_node": (1, 1), "use": "rank"}, ["rank 1 would fail"]),
    (picture_of_shards, {}, ["10 samples", "4 ranks", "rank 2 gets 2, 6, 0", "2 repeated"]),
    (picture_of_shards, {"drop_last": True}, ["rank 3 gets 3, 7", "2 dropped"]),
    (picture_of_shards, {"samples": 12}, ["rank 0 gets 0, 4, 8"]),
    (picture_of_shards, {"samples": 3, "world_size": 8}, ["5 repeated"]),
    (picture_of_shards, {"samples": 5, "world_size": 2, "order": [3, 1, 4, 0, 2]}, ["rank 1 gets 1, 0, 3"]),
    (picture_of_shards, {"samples": 24, "world_size": 5}, ["24 samples", "1 repeated"]),
    (collectives, {}, ["4 ranks", "10, 20, 30, 40"]),
    (collectives, {"world_size": 2}, ["sums 3, 6"]),
    (collectives, {"world_size": 8}, ["8 ranks", "36, 72"]),
    (ddp_buckets, {}, ["6 layers", "3 buckets", "takes 17 ms", "takes 23 ms"]),
    (ddp_buckets, {"layers": 8, "per_bucket": 3, "all_reduce_ms": 5}, ["8 layers", "5 ms"]),
    (ddp_buckets, {"layers": 16, "per_bucket": 2, "all_reduce_ms": 1}, ["8 buckets"]),
    (
        deals_by_epoch,
        {"forgotten": [[[0, 2], [1, 3]]] * 2, "told": [[[0, 2], [1, 3]], [[3, 2], [0, 1]]]},
        ["0 of 4", "2 do"],
    ),
    (global_batch, {}, ["64 samples", "256 samples"]),
    (global_batch, {"per_rank": 100, "world_size": 8}, ["800 samples"]),
    (data_parallel_vs_ddp, {}, ["4 threads", "4 processes"]),
    (data_parallel_vs_ddp, {"gpus": 2}, ["2 processes"]),
    (data_parallel_vs_ddp, {"gpus": 8}, ["other 7"]),
    (signal_path, {}, ["LOCAL_RANK=2", "cuda:2", "4 GPUs"]),
    (signal_path, {"local_rank": 0, "gpus": 8}, ["SLURM_LOCALID=0", "8 GPUs"]),
    (way_of_a_job, {}, ["2 nodes", "starts 2 tasks on each", "ranks 0 to 3"]),
    (way_of_a_job, {"nodes": 2, "tasks_per_node": 4}, ["ranks 0 to 7"]),
    (way_of_a_job, {"nodes": 3, "tasks_per_node": 2}, ["3 nodes", "ranks 0 to 5"]),
    (backfill, {}, ["A runs on node 1 for 10 min", "from 10 to 20 min", "for 1 min"]),
    (backfill, {"long": 30, "short": 5}, ["from 30 to 60 min", "for 5 min"]),
    (memory_of_gradients, {}, ["300 MB", "200 MB"]),
    (memory_of_gradients, {"parameters_mb": 44.7}, ["44.7 MB", "134.1 MB", "89.4 MB"]),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def drawn(request):
    draw, arguments, in_alt = request.param
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = draw(**arguments)
        picture.figure.draw_without_rendering()
    return picture, in_alt


def texts_of(picture):
    texts = [text for text in picture.figure.axes[0].texts if text.get_text()]
    return [(text.get_text(), text.get_window_extent(), text.get_fontsize()) for text in texts]


def holds(outer, inner):
    return outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


def test_alt_text_names_the_numbers(drawn):
    picture, in_alt = drawn
    for part in in_alt:
        assert part in picture.alt
    assert picture.figure.get_label() == picture.alt


def test_texts_are_legible_and_on_the_page(drawn):
    for text, extent, size in texts_of(drawn[0]):
        assert holds(drawn[0].figure.bbox, extent), text
        assert size >= 10, text


def test_texts_do_not_overlap(drawn):
    for (one, here, _), (other, there, _) in combinations(texts_of(drawn[0]), 2):
        assert not here.overlaps(there), (one, other)


def test_texts_do_not_cross_the_edges_of_boxes(drawn):
    ax = drawn[0].figure.axes[0]
    boxes = [patch.get_window_extent() for patch in ax.patches if hasattr(patch, "get_boxstyle")]
    for text, extent, _ in texts_of(drawn[0]):
        under = [box for box in boxes if box.overlaps(extent)]
        assert not under or holds(under[-1], extent), text  # the last drawn one lies on top


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "world_size"), [(10, 4), (12, 4), (7, 2), (1, 1), (3, 8), (100, 7)])
def test_shards_are_those_of_distributed_sampler(samples, world_size, drop_last):
    ours = shard_indices(list(range(samples)), world_size, drop_last)
    for rank in range(world_size):
        sampler = DistributedSampler(range(samples), world_size, rank, shuffle=False, drop_last=drop_last)
        assert ours[rank] == list(sampler)


def test_a_shuffled_order_is_dealt_as_distributed_sampler_deals_it():
    samplers = [DistributedSampler(range(11), 3, rank, shuffle=True, seed=5) for rank in range(3)]
    whole = DistributedSampler(range(11), 1, 0, shuffle=True, seed=5)
    assert shard_indices(list(whole), 3) == [list(sampler) for sampler in samplers]


def test_a_picture_carries_its_alt_text_into_the_notebook(tmp_path):
    alt = 'a "quoted" <figure>'
    picture = Picture(global_batch().figure, alt)
    data, metadata = picture._repr_mimebundle_()
    png = base64.b64decode(data["image/png"], validate=True)
    assert png.startswith(b"\x89PNG") and data.keys() == {"image/png", "text/plain"}
    assert data["text/plain"] == repr(picture) == alt
    # More pixels an inch than that, for a sharp screen, are shown as the 96 CSS pixels that an inch has.
    width = int.from_bytes(png[16:20], "big") * 96 // DPI
    assert metadata == {"image/png": {"alt": alt, "width": width}} and width > 300
    assert picture.save(tmp_path / "figure.svg").stat().st_size > 0
