"""Scaling: known speed-ups, times and costs come back from run folders; what must not be compared is refused."""

import json
import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest

from ddp_helpers import ROOT
from ddp_helpers.draw.curves import curves
from ddp_helpers.lessons.find_the_lost_time.figures import draw_assumptions
from ddp_helpers.lessons.plot_the_scaling.figures import parts_by_rank, parts_by_size
from ddp_helpers.records import runs, scaling

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


def notebook_09(folder):
    """What 09's plain cells compute of the runs of a folder: those without ranks, in their order."""
    cells = nbformat.read(ROOT / "notebooks" / "09_plot_the_scaling.ipynb", as_version=4).cells
    found = {"display": lambda *tables: None}
    for cell in cells:
        if "def job_rate" in cell.source:
            return found
        if cell.cell_type == "code" and "%%ranks" not in cell.source and "ranks.pull" not in cell.source:
            exec(cell.source.replace("%load_ext", "# %load_ext"), found)
            found["my_runs"] = str(folder)
            plt.close("all")
    raise AssertionError("09 has no exercise any more")


def numbers(text):
    """The numbers in a text, in their order: what a sentence or a title claims, in whatever words."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*\d|\d", text)]


# ---- numbers


def test_known_speedups_come_back_from_the_cells_of_09(study):
    write(study / "failed", 4, 10, state="failed")
    write(study / "w1", 1, 500, scaling="weak")
    write(study / "w4", 4, 2000, scaling="weak")
    write(study / "c4", 4, 3000, cpus=8)  # other CPUs for each rank: not compared
    found = notebook_09(study)
    assert found["rates"].loc["strong"].tolist() == pytest.approx([1000, 1800, 2000]), "the slow first epoch is in it"
    assert found["speedup"].loc["strong"].tolist() == pytest.approx([1, 1.8, 2.0])
    assert found["efficiency"].loc["strong"].tolist() == pytest.approx([1, 0.9, 0.5])
    assert found["speedup"].loc["weak", 4] == pytest.approx(4)
    assert found["ask_for"] == 2, "the fastest of those with an efficiency of 0.8"


def test_equal_jobs_are_pooled_for_the_noise_of_09(tmp_path):
    for number, (ranks, rate, kind) in enumerate([(1, 1000, "strong"), (1, 1200, "weak"), (2, 1500, "strong")]):
        write(tmp_path / str(number), ranks, rate, scaling=kind)
    assert notebook_09(tmp_path)["apart"] == pytest.approx(0.2), "on one rank strong and weak are the same job"


def test_runs_of_one_epoch_and_without_an_accuracy_are_compared(tmp_path):
    for ranks in (1, 2, 4):
        write(tmp_path / f"n{ranks}", ranks, 1000 * ranks**0.8, epochs=1, without=("test_accuracy",))
    found = notebook_09(tmp_path)
    assert found["speedup"].loc["strong", 2] == pytest.approx(2**0.8) and found["costs"].empty


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
    assert numbers(by_size.figure.get_suptitle()) == [2, 1.0, 0.7]  # ranks; saved; wait and exchange
    assert {"2.00", "1.00", "0.50"} <= {text.get_text() for text in by_size.figure.findobj(plt.Text)}
    even, late = [(0.1, 1, 0.1, 0.5)] * 2, [(0.1, 1, 0.9, 0.5), (1.0, 1, 0.0, 0.5)]
    title = parts_by_rank({"both are fast": even, "rank 1 is late": late}, "20 steps").figure.get_suptitle()
    assert numbers(title) == [1, 0, 0.9, 1, 0.0] and title.startswith("Rank 1 is late")


def test_runs_of_one_name_in_two_folders_stay_two(tmp_path):
    write(tmp_path / "one" / "n1", 1, 1000)
    write(tmp_path / "two" / "n1", 2, 1500)
    table = runs.table(tmp_path / "one", tmp_path / "two")
    assert scaling.per_run(table)["world_size"].tolist() == [1, 2]


# ---- what is left out, and said


def test_runs_that_did_not_end_well_are_left_out_and_said(study, capsys):
    before = scaling.per_run(runs.table(study))["run"].tolist()
    write(study / "a", 4, 10, state="failed")
    for name, state in (("b", "CANCELLED"), ("c", "TIMEOUT"), ("d", "TIMEOUT")):
        write(study / name, 4, 10, state="running", job={"state": state, "job": {"cpus_per_task": 2}})
    write(study / "e", 4, epochs=0)
    write(study / "f", 4, state="running")
    table = runs.table(study)
    assert scaling.per_run(table)["run"].tolist() == before
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
        ({"chip": "NVIDIA V100"}, ("machine", "NVIDIA A100", "NVIDIA V100")),
        ({"dataset": "MNIST"}, ("dataset", "MNIST", "digits")),
        ({"batch": 512}, ("global_batch, strong", "256", "512")),
        ({"train_set": 2048}, ("train_set", "10000", "2048")),
        ({"job": {"site": "della"}}, ("site", "della", "greene")),
        ({"batch": 512, "scaling": "weak"}, ("batch_per_rank, weak", "256", "512")),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name_in_09(study, more, words):
    write(study / "one", 1, job={"site": "greene"} if "job" in more else None)
    write(study / "weak", 1, scaling="weak")
    write(study / "other", 2, **more)
    with pytest.raises(AssertionError, match=f"keep the runs of one {words[0]}") as error:
        notebook_09(study)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_nothing_to_compare_is_refused(tmp_path):
    write(tmp_path / "a", state="failed")
    for folder, words in ((tmp_path, "has finished"), (tmp_path / "none", "no record in")):
        with pytest.raises(AssertionError, match=words):
            notebook_09(folder)


# ---- figures


def test_every_figure_draws_and_says_where_its_runs_were_made(study, tmp_path):
    write(study / "x", 4, state="failed")
    rows = {"overlap": (1, 0.9), "published": (np.nan, 0.97), "none": (0.9, 0.2)}
    drawn, assumed = curves(runs.table(study)), draw_assumptions(rows, 24, 1536)
    for number, picture in enumerate((drawn, assumed)):
        assert picture.save(tmp_path / f"{number}.png").stat().st_size > 10_000
        assert all(text.get_fontsize() >= 10 for text in picture.figure.findobj(plt.Text) if text.get_text())
    assert numbers(drawn.alt)[:2] == [3, 97.0]  # epochs, and the accuracy after them
    assert "digits on NVIDIA A100" in drawn.alt
    assert "1 run not done: 1 failed" in drawn.figure.get_supxlabel()
    assert numbers(assumed.alt)[:3] == [20, 90, 1536]  # the published one is not among the computed


def test_the_title_says_what_was_found(study):
    write(study / "w1", 1, 1000, scaling="weak")
    write(study / "w2", 2, 1500, scaling="weak", epochs=1)
    title = curves(runs.table(study)).figure.get_suptitle().replace("\n", " ")
    assert numbers(title)[-3:] == [97.0, 90.0, 97.0]  # accuracy with one global batch; from, to with one per rank


def test_runs_without_an_accuracy_have_a_figure(tmp_path):
    for ranks in (1, 2, 4):
        write(tmp_path / f"n{ranks}", ranks, 1000 * ranks**0.8, without=("test_accuracy",))
    picture = curves(runs.table(tmp_path))
    picture.figure.draw_without_rendering()
    assert "nan" not in picture.alt and "accuracy" not in picture.alt


def test_the_figure_of_one_old_cpu_run_says_ranks(tmp_path):
    write(tmp_path / "a", 2, epochs=1, cpus=None, chip="Intel Xeon", without=("test_seconds",))
    picture = curves(runs.table(tmp_path))
    picture.figure.draw_without_rendering()
    assert "GPU" not in picture.alt and "CPU (Intel Xeon)" in picture.alt


def test_a_hundred_runs_make_a_table_and_a_figure(tmp_path):
    for number in range(100):
        ranks = 2 ** (number % 4)
        write(tmp_path / f"run-{number}", ranks, 900 * ranks**0.9 + number, cpus=1 + number % 3)
    assert scaling.per_run(runs.table(tmp_path))["run"].nunique() == 100
    curves(runs.table(tmp_path)).figure.draw_without_rendering()
