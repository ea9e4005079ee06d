"""Known speed-ups, times and costs come back from run folders, by `scaling` and the cells of 08 and 09 that use it."""

import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from run_folders import write_run

from ddp_helpers import ROOT
from ddp_helpers.lessons.find_the_lost_time.figures import draw_assumptions, draw_parts_by_size
from ddp_helpers.records import runs, scaling

ACCURACY = (0.90, 0.95, 0.97)


def write(folder, ranks=1, rate=1000.0, epochs=3, cpus=2, chip="NVIDIA A100", batch=256, kind="strong", **more):
    """A run folder: 10,000 images an epoch, the first at half the rate, a tenth of the time for data."""
    spec = {"batch_size": batch, "seed": 1, "batch_size_per_rank": None if kind == "strong" else batch}
    device = "cpu" if "Xeon" in chip else "cuda:0"
    env = {"world_size": ranks, "cpus": cpus, "dataset": "digits", "train_set": 10_000} | more.get("env", {})
    env["ranks"] = [{"local_rank": rank, "device": device, "chip": chip} for rank in range(ranks)]
    lines = []
    for epoch in range(epochs):
        took = 10_000 / rate * (2 if epoch == 0 else 1)
        line = {"epoch": epoch + 1, "images_per_second": 10_000 / took, "seconds": took, "test_seconds": 1.0}
        line |= {"data_seconds": took / 10, "test_loss": 0.5 / (epoch + 1), "test_accuracy": ACCURACY[min(epoch, 2)]}
        lines.append({name: value for name, value in line.items() if name not in more.get("without", ())})
    write_run(folder, lines, spec=spec, env=env, status={"state": more.get("state", "done")}, job=more.get("job"))


@pytest.fixture
def study(tmp_path):
    """1, 2 and 4 GPUs, three repeats each, at 1,000, 1,800 and 2,000 images a second."""
    for ranks, rate in ((1, 1000), (2, 1800), (4, 2000)):
        for repeat, factor in enumerate((0.9, 1, 1.1)):
            write(tmp_path / f"n{ranks}-{repeat}", ranks, rate * factor)
    return tmp_path


def notebook_09(folder):
    """What 09's cells compute of the runs of a folder."""
    cells = nbformat.read(ROOT / "notebooks" / "09_plot_the_scaling.ipynb", as_version=4).cells
    found = {"display": lambda *tables: None}
    for cell in cells:
        if "def job_rate" in cell.source:
            return found
        if cell.cell_type == "code":
            exec(cell.source, found)
            found["my_runs"] = str(folder)
            plt.close("all")
    raise AssertionError("09 has no exercise any more")


def notebook_08(folder):
    """What 08's plain cells between the sweep and its figure compute of the runs of a folder."""
    cells = nbformat.read(ROOT / "notebooks" / "08_sweep_the_cluster.ipynb", as_version=4).cells
    found = {"runs": runs, "scaling": scaling, "RUNS": folder.parent, "sweep_name": folder.name, "least": 0.8}
    for cell in cells:
        if cell.id in ("n08-23", "n08-advice"):
            exec(cell.source, found)
    return found


def numbers(text):
    """The numbers in a text, in their order: what a sentence or a title claims, in whatever words."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*\d|\d", text)]


# ---- what 09 computes


def test_known_speedups_come_back_from_the_cells_of_09(study):
    write(study / "failed", 4, 10, state="failed")
    write(study / "w1", 1, 1000, kind="weak")
    write(study / "w4", 4, 4000, kind="weak")
    write(study / "c4", 4, 3000, cpus=8)  # other CPUs for each rank: not compared
    found = notebook_09(study)
    assert found["rates"].loc["strong"].tolist() == pytest.approx([1000, 1800, 2000]), "the slow first epoch is in it"
    assert found["speedup"].loc["strong"].tolist() == pytest.approx([1, 1.8, 2.0])
    assert found["efficiency"].loc["strong"].tolist() == pytest.approx([1, 0.9, 0.5])
    assert found["speedup"].loc["weak", 4] == pytest.approx(4)


def test_the_base_is_the_median_of_all_its_equal_runs_in_08_and_09(tmp_path, capsys):
    for number, (ranks, rate, kind) in enumerate(
        [(1, 900, "strong"), (1, 1100, "weak"), (2, 1550, "strong"), (2, 1900, "weak")]
    ):
        write(tmp_path / str(number), ranks, rate, kind=kind, batch=256)
    nine = notebook_09(tmp_path)
    for kind, gain in (("strong", 1.55), ("weak", 1.9)):
        assert nine["speedup"].loc[kind, 2] == pytest.approx(gain) and nine["efficiency"].loc[kind, 1] == 1
    capsys.readouterr()
    notebook_08(tmp_path)  # with the strong base alone, 900, the efficiency of two ranks would be 0.86
    assert "ask for 1 of 2 ranks, strong" in capsys.readouterr().out


# The images per second of the runs by ranks; what 08 and 09 answer. With a bar of 80 % the base may lie 25 % apart.
ANSWERS = {
    "quiet": ({1: (900, 1100), 2: (1800,), 4: (2400,)}, "ask for 2 of 4 ranks, strong"),
    "only one is efficient": ({1: (900, 1100), 2: (1500,)}, "ask for 1 of 2 ranks, strong"),
    "no base of one rank": ({2: (900, 1100), 4: (1700,), 8: (2000,)}, "ask for 4 of 8 ranks, strong"),
    "noisy": ({1: (260, 379), 2: (685,), 4: (559,)}, "no answer: equal runs lie 45.8 % apart"),
    "the base ran once": ({1: (1000,), 2: (1900,)}, "no answer: only one run of 1 rank"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_08_and_09_answer_alike_and_not_from_a_base_that_lies_further_apart_than_the_bar(name, tmp_path, capsys):
    rates, told = ANSWERS[name]
    for ranks in rates:
        for number, rate in enumerate(rates[ranks]):
            write(tmp_path / f"{ranks}-{number}", ranks, rate)
    for notebook in (notebook_08, notebook_09):
        notebook(tmp_path)
        [answer] = re.findall("(?:ask for|no answer).*", capsys.readouterr().out)
        assert answer.startswith(told)
        assert ("repeat the base" in answer) != ("ask for" in answer), "a number, or none"


def test_equal_jobs_are_pooled_for_the_noise_of_09(tmp_path):
    for number, (ranks, rate, kind) in enumerate([(1, 1000, "strong"), (1, 1200, "weak"), (2, 1500, "strong")]):
        write(tmp_path / str(number), ranks, rate, kind=kind)
    assert notebook_09(tmp_path)["apart"] == pytest.approx(0.2), "on one rank strong and weak are the same job"


def test_runs_of_one_epoch_and_without_an_accuracy_are_compared(tmp_path):
    for ranks in (1, 2, 4):
        write(tmp_path / f"n{ranks}", ranks, 1000 * ranks**0.8, epochs=1, without=("test_accuracy",))
    found = notebook_09(tmp_path)
    assert found["speedup"].loc["strong", 2] == pytest.approx(2**0.8)


# Of a run among others, what is different; what the line that refuses it names.
UNLIKE = [
    ({"chip": "NVIDIA V100"}, ("machine", "NVIDIA A100", "NVIDIA V100")),
    ({"env": {"dataset": "MNIST"}}, ("dataset", "MNIST", "digits")),
    ({"batch": 512}, ("global_batch, strong", "256", "512")),
    ({"env": {"train_set": 2048}}, ("train_set", "10000", "2048")),
    ({"job": {"site": "della"}}, ("site", "della", "greene")),
    ({"batch": 512, "kind": "weak"}, ("batch_per_rank, weak", "256", "512")),
]


@pytest.mark.parametrize(("more", "words"), UNLIKE, ids=[words[0] for _, words in UNLIKE])
def test_what_cannot_be_compared_is_refused_by_name_in_09(tmp_path, more, words):
    write(tmp_path / "one", 1, job={"site": "greene"} if "job" in more else None)
    write(tmp_path / "weak", 1, kind="weak")
    write(tmp_path / "other", 2, **more)
    with pytest.raises(ValueError, match=f"keep the runs of one {words[0]}") as error:
        notebook_09(tmp_path)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_nothing_to_compare_is_refused_in_09(tmp_path):
    write(tmp_path / "a", state="failed")
    for folder, words in ((tmp_path, "has finished"), (tmp_path / "none", "no record in")):
        with pytest.raises(AssertionError, match=words):
            notebook_09(folder)


# ---- a row for each run


def test_shares_time_to_accuracy_and_cost(tmp_path):
    write(tmp_path / "a", 2, 1000, epochs=2)
    write(tmp_path / "b", 4, 1000, job={"state": "COMPLETED", "seconds": 900, "job": {"cpus_per_rank": 5}})
    write(tmp_path / "c", epochs=1)
    table = runs.table(tmp_path)
    a, b, c = scaling.per_run(table, target=0.95).to_dict("records")
    assert a["data"] == pytest.approx(0.1)
    assert a["seconds"] == pytest.approx(10), "the first epoch is not in it"
    assert a["to_target"] == pytest.approx(20 + 1 + 10 + 1)  # the first epoch took twice as long
    assert a["device_hours"] == pytest.approx(2 * (20 + 10 + 2) / 3600)
    assert (b["device_hours"], b["cpus_per_rank"]) == (pytest.approx(4 * 900 / 3600), 5)
    assert scaling.per_run(table, target=0.98)["to_target"].isna().tolist() == [True] * 3
    assert c["images_per_second"] == 500, "one epoch is better than none"


def test_on_cpus_a_job_holds_the_cpus_of_all_its_ranks(tmp_path):
    write(tmp_path / "a", 2, cpus=3, chip="Intel Xeon")
    each = scaling.per_run(runs.table(tmp_path))
    assert scaling.unit_of_price(each) == "CPU" and each["device_hours"][0] == pytest.approx(2 * 3 * 43 / 3600)
    write(tmp_path / "b", 1, cpus=None, chip="Intel Xeon")  # not all CPUs are known: then ranks count
    each = scaling.per_run(runs.table(tmp_path))
    assert scaling.unit_of_price(each) == "rank"
    assert each["device_hours"].tolist() == pytest.approx([2 * 43 / 3600, 43 / 3600])


def test_runs_that_did_not_end_well_are_left_out_and_said(study):
    before = scaling.per_run(runs.table(study))["run"].tolist()
    write(study / "a", 4, 10, state="failed")
    for name, state in (("b", "CANCELLED"), ("c", "TIMEOUT"), ("d", "TIMEOUT")):
        write(study / name, 4, 10, state="running", job={"state": state, "job": {"cpus_per_rank": 2}})
    write(study / "e", 4, epochs=0)
    write(study / "f", 4, state="running")
    table = runs.table(study)
    assert scaling.per_run(table)["run"].tolist() == before
    told = scaling.left_out(table)
    assert numbers(told)[0] == 6
    for part in ("2 timed out", "1 failed", "1 cancelled", "1 without an epoch", "1 running or killed"):
        assert part in told
    assert scaling.left_out(table[table["run"].str.startswith("n")]) == ""


# ---- figures of 12 and 12b


def test_the_titles_name_the_numbers_of_the_figures():
    by_size = draw_parts_by_size({1: (2.0, 0.0, 0.0), 2: (1.0, 0.2, 0.5)}, "20 steps")
    assert numbers(by_size.figure.get_suptitle()) == [2, 1.0, 0.7]  # ranks; saved; wait and exchange
    assert {"2.00", "1.00", "0.50"} <= {text.get_text() for text in by_size.figure.findobj(plt.Text)}
    assumed = draw_assumptions({"overlap": (1, 0.9), "published": (np.nan, 0.97), "none": (0.9, 0.2)}, 24, 1536)
    assert numbers(assumed.alt)[:3] == [20, 90, 1536]  # the published one is not among the computed
