"""Scaling: known speed-ups, times and costs come back from run folders; what must not be compared is refused."""

import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

from ddp_helpers import ROOT, PlainError
from ddp_helpers.draw.curves import curves
from ddp_helpers.lessons.find_the_lost_time import scaling_model as predict
from ddp_helpers.lessons.find_the_lost_time.scaling_model import assumptions, prediction
from ddp_helpers.lessons.plot_the_scaling.advice import extremes, noise, recommend
from ddp_helpers.lessons.plot_the_scaling.figures import parts_by_rank, parts_by_size, speedup, time_cost
from ddp_helpers.records import runs, scaling

PUBLISHED = json.loads((ROOT / "notebooks" / "results" / "published.json").read_text())
CIFAR, MNIST = PUBLISHED["tables"][:2]
ACCURACY = (0.90, 0.95, 0.97)


def write(folder, ranks=1, rate=1000.0, epochs=3, cpus=2, chip="NVIDIA A100", batch=256, **more):
    """A run folder: 10,000 images an epoch, the first at half the rate, a tenth of the time for data."""
    kept = more.get("scaling", "strong") == "strong"
    spec = {"batch_size": batch if kept else batch * ranks, "batch_size_per_rank": None if kept else batch, "seed": 1}
    device = "cpu" if "Xeon" in chip else "cuda:0"
    env = {"launcher": "slurm", "world_size": ranks, "cpus": cpus, "dataset": more.get("dataset", "digits")}
    env["train_set"] = more.get("train_set", 10_000)
    env["ranks"] = [{"rank": rank, "local_rank": rank, "device": device, "chip": chip} for rank in range(ranks)]
    lines = []
    for epoch in range(epochs):
        took = 10_000 / rate * (2 if epoch == 0 else 1)
        line = {"epoch": epoch + 1, "images_per_second": 10_000 / took, "seconds": took, "test_seconds": 1.0}
        line |= {"data_seconds": took / 10, "test_loss": 0.5 / (epoch + 1), "test_accuracy": ACCURACY[min(epoch, 2)]}
        lines.append({name: value for name, value in line.items() if name not in more.get("without", ())})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": more.get("state", "done")}
    for name, content in {"spec": spec, "env": env, "status": status, "job": more.get("job")}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def study(tmp_path):
    """1, 2 and 4 GPUs, three repeats each, at 1,000, 1,800 and 2,000 images a second."""
    for ranks, rate in ((1, 1000), (2, 1800), (4, 2000)):
        for repeat, factor in enumerate((0.9, 1, 1.1)):
            write(tmp_path / f"n{ranks}-{repeat}", ranks, rate * factor)
    return tmp_path


def speedups(folder):
    return scaling.speedup(scaling.per_run(runs.table(folder)))


def numbers(text):
    """The numbers in a text, in their order: what a sentence or a title claims, in whatever words."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*\d|\d", text)]


def advice(folder, least=0.8):
    return recommend(speedups(folder), scaling.per_run(runs.table(folder)), least)


# ---- numbers


def test_known_speedups_and_their_spread_come_back(study):
    table = speedups(study).set_index("world_size")
    assert table["images_per_second"].tolist() == pytest.approx([1000, 1800, 2000])  # the slow first epoch is not in it
    assert table["speedup"].tolist() == pytest.approx([1, 1.8, 2.0])
    assert table["efficiency"].tolist() == pytest.approx([1, 0.9, 0.5])
    assert table.loc[2, ["speedup_low", "speedup_high"]].tolist() == pytest.approx([1.62, 1.98])
    assert table["repeats"].tolist() == [3, 3, 3]


def test_strong_and_weak_and_cpus_are_compared_each_with_its_own(study):
    write(study / "w1", 1, 500, scaling="weak")
    write(study / "w4", 4, 2000, scaling="weak")
    write(study / "c4", 4, 3000, cpus=8)
    table = speedups(study).set_index(["scaling", "cpus_per_task", "world_size"])
    assert table.loc[("weak", 2, 4), "speedup"] == pytest.approx(4)
    assert table.loc[("strong", 2, 4), "speedup"] == pytest.approx(2)
    assert table.loc[("strong", 8, 4), ["speedup", "base"]].tolist() == [1, 4]  # nothing smaller with 8 CPUs


def test_shares_time_to_accuracy_and_cost(tmp_path):
    write(tmp_path / "a", 2, 1000)
    write(tmp_path / "b", 4, 1000, job={"state": "COMPLETED", "seconds": 900, "job": {"cpus_per_task": 5}})
    table = runs.table(tmp_path)
    a, b = scaling.per_run(table, target=0.95).to_dict("records")
    assert a["data"] == pytest.approx(0.1)
    assert a["seconds"] == pytest.approx(10)
    assert a["to_target"] == pytest.approx(20 + 1 + 10 + 1)  # the first epoch took twice as long
    assert a["device_hours"] == pytest.approx(2 * (20 + 10 + 10 + 3) / 3600)
    assert (b["device_hours"], b["cpus_per_task"]) == (pytest.approx(4 * 900 / 3600), 5)
    assert scaling.time_to_accuracy(table[table["run"] == "a"], 0.98) is None


def test_one_epoch_is_better_than_none(tmp_path):
    write(tmp_path / "a", epochs=1)
    assert scaling.per_run(runs.table(tmp_path))["images_per_second"].tolist() == [500]


def test_on_cpus_a_job_holds_the_cpus_of_all_its_ranks(tmp_path):
    write(tmp_path / "a", 2, 1000, cpus=3, chip="Intel Xeon")
    assert scaling.per_run(runs.table(tmp_path))["device_hours"].tolist() == pytest.approx([2 * 3 * 43 / 3600])
    assert scaling.unit_of_price(scaling.per_run(runs.table(tmp_path))) == "CPU"
    write(tmp_path / "b", 1, 1000, cpus=None, chip="Intel Xeon")  # not all CPUs are known: then ranks count
    each = scaling.per_run(runs.table(tmp_path))
    assert each["device_hours"].tolist() == pytest.approx([2 * 43 / 3600, 43 / 3600])
    assert scaling.unit_of_price(each) == "rank"


def test_the_parts_of_the_seconds_are_drawn():
    by_size = parts_by_size({1: (0.1, 2.0, 0.0, 0.0), 2: (0.1, 1.0, 0.2, 0.5)}, "20 steps")
    assert numbers(by_size.figure.get_suptitle()) == [1, 2, 2.0, 1.0, 0.0, 0.5]  # ranks, computing, exchange
    assert {"2.00", "1.00", "0.50"} <= {text.get_text() for text in by_size.figure.findobj(plt.Text)}
    even, late = [(0.1, 1, 0.1, 0.5)] * 2, [(0.1, 1, 0.9, 0.5), (1.0, 1, 0.0, 0.5)]
    title = parts_by_rank({"both are fast": even, "rank 1 is late": late}, "20 steps").figure.get_suptitle()
    assert numbers(title) == [1, 0, 0.9, 1, 0.0] and title.startswith("rank 1 is late")


def test_runs_of_one_name_in_two_folders_stay_two(tmp_path):
    write(tmp_path / "one" / "n1", 1, 1000)
    write(tmp_path / "two" / "n1", 2, 1500)
    table = runs.table(tmp_path / "one", tmp_path / "two")
    assert scaling.per_run(table)["world_size"].tolist() == [1, 2]


# ---- what is left out, and said


def test_runs_that_did_not_end_well_are_left_out_and_said(study, capsys):
    before = speedups(study)
    write(study / "a", 4, 10, state="failed")
    for name, state in (("b", "CANCELLED"), ("c", "TIMEOUT"), ("d", "TIMEOUT")):
        write(study / name, 4, 10, state="running", job={"state": state, "job": {"cpus_per_task": 2}})
    write(study / "e", 4, epochs=0)
    write(study / "f", 4, state="running")
    table = runs.table(study)
    assert speedups(study).equals(before)
    told = scaling.left_out(table)
    assert numbers(told)[0] == 6
    for part in ("2 timed out", "1 failed", "1 cancelled", "1 without an epoch", "1 running or killed"):
        assert part in told
    assert scaling.left_out(table[table["run"].str.startswith("n")]) == ""
    drawn = curves(table).figure.get_supxlabel().replace("\n", " ")
    assert "5 runs not done: " in drawn and "1 run without an epoch left out" in drawn
    alone = scaling.left_out(table[table["run"] == "a"])
    assert numbers(alone) == [1, 1] and alone.endswith("1 failed")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"chip": "NVIDIA V100"}, ("machine", "NVIDIA A100 and NVIDIA V100")),
        ({"dataset": "MNIST"}, ("dataset", "MNIST and digits")),
        ({"batch": 512}, ("global_batch", "256 and 512")),
        ({"train_set": 2048}, ("train_set", "10000 and 2048")),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(study, more, words):
    write(study / "other", 2, **more)
    with pytest.raises(PlainError) as error:
        speedups(study)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_nothing_to_compare_is_refused(tmp_path):
    write(tmp_path / "a", state="failed")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(PlainError, match="finished"):
            speedups(folder)


# ---- the recommendation


def test_recommend_the_largest_that_is_efficient_enough(study):
    first, rests_on, all_settings = advice(study).splitlines()
    # For each: ranks, times the speed of the fewest, efficiency and GPU-seconds; and the bar that 4 GPUs do not pass.
    assert numbers(first) == [2, 1.8, 1, 90, 50, 4, 2.0, 1, 50, 92, 80]
    assert first.count("GPU-seconds") == 2
    assert numbers(rests_on) == [2, 1, 2, 4, 3] and "strong" in rests_on  # CPUs a rank, the sizes, runs of each
    # For each: ranks, CPUs, seconds to the target, GPU-seconds; between the first two the noise.
    assert numbers(all_settings) == [4, 2, 17, 92, 22, 2, 2, 18.7, 50, 1, 2, 32, 43, 22, 2, 2, 18.7, 50]


def test_a_winner_is_named_alone_only_beyond_what_equal_jobs_lie_apart(tmp_path):
    for ranks, rates in {1: (1000, 1100), 2: (1400, 2000), 4: (2900, 2900)}.items():
        for repeat, rate in enumerate(rates):
            write(tmp_path / f"n{ranks}-{repeat}", ranks, rate)
    each = scaling.per_run(runs.table(tmp_path))
    fastest, cheapest = extremes(each)
    assert noise(each) == pytest.approx(2000 / 1400 - 1)
    assert fastest["world_size"].tolist() == [4], "1.7 times as fast as 2 GPUs, and equal jobs 1.43 times"
    assert cheapest["world_size"].tolist() == [1, 2], "4 GPUs cost 1.6 times as much as 1, 2 less than 1.43 times"
    assert cheapest["device_hours"].iloc[0] == pytest.approx(scaling.speedup(each)["device_hours"].iloc[0]), "a median"


def test_equal_jobs_are_pooled_and_one_run_each_has_no_noise(tmp_path):
    write(tmp_path / "s1", 1, 1000)
    write(tmp_path / "s2", 2, 1500)
    assert np.isnan(noise(scaling.per_run(runs.table(tmp_path))))
    write(tmp_path / "w1", 1, 1200, scaling="weak")  # on one rank weak is strong
    each = scaling.per_run(runs.table(tmp_path))
    assert noise(each) == pytest.approx(0.2)
    assert "strong" not in extremes(each)[1]["name"].iloc[0] and "strong" in extremes(each)[0]["name"].iloc[0]


def test_recommend_the_fewest_if_none_is_efficient_enough(study):
    first, *_ = advice(study, least=0.95).splitlines()
    assert numbers(first) == [1, 43, 2, 1.8, 1, 90, 50, 95, 4, 2.0, 1, 50, 92, 95]


def test_recommend_says_that_more_ranks_were_no_faster(study):
    write(study / "n8", 8, 700)
    first, *_ = advice(study, least=0.01).splitlines()  # a bar that the slow run passes, and so it is not named
    assert numbers(first) == [4, 2.0, 1, 50, 92, 8, 0.13] and "faster" in first


def test_recommend_with_one_number_of_ranks_or_none_larger(tmp_path):
    write(tmp_path / "a", 2, chip="Intel Xeon")
    first, rests_on, _ = advice(tmp_path).splitlines()
    assert numbers(first) == [2, 172] and "measure" in first, "no larger size was measured"
    assert "CPU-seconds" in first and "GPU" not in first
    assert numbers(rests_on) == [2, 2, 1]
    write(tmp_path / "b", 4, 1900, chip="Intel Xeon")
    first, *_ = advice(tmp_path).splitlines()
    assert numbers(first) == [4, 1.9, 2, 95, 192] and "measure" in first


def test_recommend_mixes_neither_cpus_nor_kinds_of_scaling_and_says_so(study):
    alone = advice(study).splitlines()[:2]
    write(study / "c1", 1, 9000, cpus=8)  # the fastest of all, but no more ranks were measured with 8 CPUs
    for ranks in (1, 2, 4):
        write(study / f"w{ranks}", ranks, 1500 * ranks, scaling="weak")  # an ideal line, above any bar
    *told, all_settings, left_out = advice(study).splitlines()
    assert told == alone
    named = [1, 8, 5.33, 7]  # rank, CPUs, seconds to the target, GPU-seconds: not compared, but named
    assert numbers(all_settings) == [*named, 67, 4, 2, 7, 39, *named], "fastest, within the noise of it, cheapest"
    assert numbers(left_out) == [1, 8, 3, 2] and "1 strong" in left_out and "3 weak" in left_out


def test_recommend_from_weak_runs_where_there_are_no_others(tmp_path):
    for ranks in (1, 2):
        write(tmp_path / f"w{ranks}", ranks, 1000 * ranks, scaling="weak", cpus=None)
    first, rests_on, _ = advice(tmp_path).splitlines()
    assert numbers(first) == [2, 2.0, 1, 100, 46]
    assert numbers(rests_on) == [1, 2, 1] and "weak" in rests_on


# ---- the communication model


def test_the_model_recovers_what_made_the_times():
    n = np.array([1, 2, 4, 8, 16, 32])
    for terms in ([20, 0.3, 0.01], [20, 0, 0.02], [5, 0.4, 0]):
        model = predict.fit(n, predict.term_factors(n) @ terms)
        assert list(model.terms.values()) == pytest.approx(terms, abs=1e-6)
        assert abs(model.error(256, predict.term_factors(256) @ terms)) < 1e-6
    once = predict.fit(n, 20 / n + 0.5)  # a fixed part needs no term: it is a little more work and more waiting
    assert list(once.terms.values()) == pytest.approx([20.5, 0.25, 0], abs=1e-6)


def test_the_band_holds_what_came_and_widens_where_nothing_was_measured():
    n = np.repeat([1, 2, 4], 3)
    truth = predict.term_factors(n) @ [20, 0.4, 0]
    model = predict.fit(n, truth * np.tile([0.97, 1, 1.03], 3))
    low, high = model.band([4, 16, 1536])
    assert (low < high).all()
    assert low[1] < predict.term_factors(16) @ [20, 0.4, 0] < high[1]
    assert (np.diff(high / low) > 0).all()


@pytest.mark.parametrize(("table", "errors"), [(CIFAR, (-0.112, -0.272)), (MNIST, (-0.138, -0.296))])
def test_held_out_error_on_the_published_table_is_what_it_is(table, errors):
    """From 1 to 4 GPUs those tables are superlinear, so on 1, 4, 8 no waiting shows, and larger runs are too fast."""
    n, seconds = np.array(table["ranks"]), np.array(table["seconds"])
    model = predict.fit(n[:3], seconds[:3])
    assert model.error(n[3:], seconds[3:]) == pytest.approx(errors, abs=0.001)
    assert [name for name, value in model.terms.items() if value] == ["work"]
    low, high = model.band(n[3:])
    assert ((low < seconds[3:]) & (seconds[3:] < high)).all()  # the band is honest where the curve is wrong


def test_control_without_communication_the_error_is_larger():
    """On 4, 8, 16 GPUs waiting shows: the work alone is 28 % too fast on 32."""
    n, seconds = np.array(CIFAR["ranks"]), np.array(CIFAR["seconds"])
    alone = np.mean(1 / (n[1:4] * seconds[1:4])) / np.mean(1 / (n[1:4] * seconds[1:4]) ** 2)
    assert alone / 32 / seconds[4] - 1 == pytest.approx(-0.277, abs=0.001)
    assert predict.fit(n[1:4], seconds[1:4]).error(32, seconds[4]) == pytest.approx(0.026, abs=0.001)


@pytest.mark.parametrize(
    ("ranks", "seconds", "words"),
    [
        ([4, 4], [1.0, 1.1], "1 number of ranks"),
        ([1, 2], [1.0, 0.0], "above 0"),
        ([1, 2], [1.0, float("nan")], "above 0"),
        ([0, 2], [1.0, 0.5], "above 0"),
        ([1, 2, 4], [1.0, 0.5], "3 numbers of ranks but 2 times"),
        ([], [], "0 number"),
    ],
)
def test_the_model_refuses_what_it_cannot_fit(ranks, seconds, words):
    with pytest.raises(PlainError, match=words):
        predict.fit(ranks, seconds)


# ---- figures


def all_figures(folder):
    """Every figure of a study."""
    table = runs.table(folder)
    speeds, each, out = speedups(folder), scaling.per_run(table), scaling.left_out(table)
    figures = [curves(table), speedup(speeds, PUBLISHED["tables"], out), time_cost(each, 0.95, out)]
    if len(sizes := sorted(each["world_size"].unique())) > 2:
        fitted = each[each["world_size"] < sizes[-1]]
        rest = each[each["world_size"] == sizes[-1]]
        model = predict.fit(fitted["world_size"], fitted["seconds"])
        held_out = rest["world_size"].tolist(), rest["seconds"].tolist()
        figures.append(prediction(model, held_out, "here", scaling.unit_of_ranks(each), out))
    return figures


def test_every_figure_draws_and_says_where_its_runs_were_made(study, tmp_path_factory):
    write(study / "x", 4, state="failed")
    others = [assumptions({"overlap": (1, 0.9), "published": (np.nan, 0.97), "none": (0.9, 0.2)}, 24, 1536)]
    figures = [*all_figures(study), *others]
    for number, picture in enumerate(figures):
        assert picture.save(tmp_path_factory.mktemp("figures") / f"{number}.png").stat().st_size > 10_000
        assert all(text.get_fontsize() >= 10 for text in picture.figure.findobj(plt.Text) if text.get_text())
    alts = [picture.alt for picture in figures]
    assert numbers(alts[0])[:2] == [3, 97.0]  # epochs, and the accuracy after them
    assert all("digits on NVIDIA A100" in alt for alt in alts[:3])
    failed = scaling.left_out(runs.table(study))
    assert all(failed in picture.figure.get_supxlabel() for picture in figures[1:4])
    assert "1 run not done: 1 failed" in figures[0].figure.get_supxlabel()


def test_the_titles_say_what_was_found(study):
    write(study / "w1", 1, 1000, scaling="weak")
    write(study / "w2", 2, 1500, scaling="weak", epochs=1)
    titles = [picture.figure.get_suptitle().replace("\n", " ") for picture in all_figures(study)]
    assert numbers(titles[0])[-3:] == [97.0, 90.0, 97.0]  # accuracy with one global batch; from, to with one per rank
    # Times as fast, on so many GPUs: strong, weak, and published.
    assert numbers(titles[1]) == [2.0, 4, 1.0, 1, 27, 32]
    assert numbers(titles[2]) == [95, 4, 2, 2, 2, 1, 2, 2, 2] and "noise" in titles[2]  # target; fastest; cheapest
    assert numbers(titles[3])[:2] == [1, 2] and numbers(titles[3])[-1] == 4, titles[3]  # fitted on; held out
    never = time_cost(scaling.per_run(runs.table(study), 0.99), 0.99).figure
    assert numbers(never.get_suptitle()) == [99]


def test_a_regression_has_every_figure_and_its_cost_asks_for_no_accuracy(tmp_path, tmp_path_factory):
    for ranks in (1, 2, 4):
        write(tmp_path / f"n{ranks}", ranks, 1000 * ranks**0.8, without=("test_accuracy",))
    assert scaling.reason_for_no_study(runs.table(tmp_path)) == "" and numbers(advice(tmp_path))[:2] == [2, 1.7]
    pictures = all_figures(tmp_path)
    for number, picture in enumerate(pictures):
        picture.save(tmp_path_factory.mktemp("figures") / f"{number}.png")
        assert "nan" not in picture.alt and "accuracy" not in picture.alt
    assert numbers(pictures[2].figure.get_suptitle())[:2] == [4, 2]  # the fastest, and its CPUs: no target
    assert pictures[2].figure.axes[0].get_title(loc="left").startswith("seconds")


def test_figures_of_one_old_cpu_run_say_ranks(tmp_path, tmp_path_factory):
    write(tmp_path / "a", 2, epochs=1, cpus=None, chip="Intel Xeon", without=("test_seconds",))
    for number, picture in enumerate(all_figures(tmp_path)):
        picture.save(tmp_path_factory.mktemp("figures") / f"{number}.png")
        assert "GPU" not in picture.alt.replace("32 GPUs", "")
        assert "CPU (Intel Xeon)" in picture.alt


def test_a_hundred_runs_make_a_table_and_figures(tmp_path, tmp_path_factory):
    for number in range(100):
        ranks = 2 ** (number % 4)
        write(tmp_path / f"run-{number}", ranks, 900 * ranks**0.9 + number, cpus=1 + number % 3)
    assert scaling.per_run(runs.table(tmp_path))["run"].nunique() == 100
    for number, picture in enumerate(all_figures(tmp_path)):
        picture.save(tmp_path_factory.mktemp("figures") / f"{number}.png")
