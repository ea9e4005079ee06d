"""Ranks that stay: variables, errors, hangs and interrupts in a real kernel."""

import os
import re
import signal
import time

import psutil
import pytest
from real import LIMIT, until

STILL = "new ones"  # the next cell starts them


def gone(pids):
    """Whether these processes end by themselves."""
    return not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LIMIT)[1]


def test_variables_functions_and_the_group_stay(kernel):
    first = kernel.run(
        "%%ranks 2\nimport torch\nimport torch.distributed as dist\n\nmine = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(mine)\n\n\ndef double(x):\n    return 2 * x\n\n\nprint('sum', mine.item())\nprint('done')"
    )
    assert first == "[rank 0] sum 3.0\n[rank 0] done\n[rank 1] sum 3.0\n[rank 1] done", "a block for each rank"
    before = kernel.pids()
    assert kernel.run("%%ranks 2\ndouble(mine.item()) + dist.get_rank()") == "[rank 0] 6.0\n[rank 1] 7.0"
    assert kernel.run("pull('mine')") == "[tensor([3.]), tensor([3.])]"
    assert kernel.run("%%ranks 2 here\nname = 'both'") == "" and kernel.run("name") == "'both'"
    assert kernel.run("%%ranks 2\nname") == "[rank 0] 'both'\n[rank 1] 'both'"
    kernel.run("start(2, lr=0.5, words=['a', 'b'])")
    assert kernel.run("%%ranks 2\nlr, words") == "[rank 0] (0.5, ['a', 'b'])\n[rank 1] (0.5, ['a', 'b'])"
    assert kernel.pids() == before and len(set(before)) == 2
    assert "NameError: name 'other' is not defined" in kernel.run("pull('other')")


def test_unseeded_numbers_are_others_on_each_rank_as_in_two_new_pythons(kernel):
    draw = "print(torch.randint(2**62, (4,)).tolist(), numpy.random.randint(2**62, size=4).tolist())"
    said = kernel.run(f"%%ranks 2\nimport numpy\nimport torch\n{draw}")
    ranks = [re.findall(r"\d{3,}", line) for line in said.splitlines()]
    assert len(ranks) == 2 and len(ranks[0]) == len(ranks[1]) == 8 and not {*ranks[0]} & {*ranks[1]}


def test_an_error_is_shown_once_and_the_variables_stay_where_all_came_to_the_end(kernel):
    before = kernel.pids()
    kernel.run("%%ranks 2\nimport torch.distributed as dist\n\nkept = 5")
    said = kernel.run("%%ranks 2\nif dist.get_rank() == 1:\n    raise ValueError('mine')")
    assert said.startswith("rank 1: Traceback") and said.count("ValueError: mine") == 1 and "line 3" in said
    said = kernel.run("%%ranks 2\n1 / 0")
    assert said.startswith("rank 0, 1: Traceback") and said.count("ZeroDivisionError") == 1
    assert "line 2: invalid syntax" in kernel.run("%%ranks 2\n1 +* 1")
    assert "line 3: invalid syntax" in kernel.run("%%ranks 2\n1\n!ls")
    assert kernel.run("%%ranks 2\nkept") == "[rank 0] 5\n[rank 1] 5" and kernel.pids() == before


ERROR = """import os
import time
import torch.distributed as dist
while dist.get_rank() and not os.path.exists("waits"):
    time.sleep(0.01)
if dist.get_rank() == 0:
    os.mkdir('waits'); dist.barrier()
raise ValueError("mine")"""


def test_an_error_leaves_no_other_rank_waiting(kernel):
    before = kernel.pids()
    said = kernel.run(f"%%ranks 2 limit={10 * LIMIT}\n{ERROR}")  # this test would not wait for that
    assert "ValueError: mine" in said and STILL in said
    assert "rank 0 in line 8, `os.mkdir('waits'); dist.barrier()`" in said
    assert gone(before) and not set(kernel.pids()) & set(before)


HANGS = """while dist.get_rank():
    print('on and on')
dist.barrier()"""


def test_a_hang_is_ended_and_its_line_named_also_of_a_rank_that_prints_for_ever(kernel):
    kernel.run("%%ranks 2\nimport torch.distributed as dist")
    before = kernel.pids()
    said = kernel.run(f"%%ranks 2 limit=5\n{HANGS}")
    assert "after 5 s" in said and said.count("[rank 1] on and on") == 1000  # and no more is shown
    assert re.search(r"rank 0 in line 4, `dist.barrier\(\)`\nrank 1 in line [23], `", said) and STILL in said
    assert gone(before) and kernel.run("%%ranks 2\n1 + 1") == "[rank 0] 2\n[rank 1] 2"


def test_after_a_hang_one_line_runs_again_what_had_come_to_its_end(kernel):
    kernel.run("%%ranks 1\n1")  # another number of ranks: what ran before is forgotten
    kernel.run("%%ranks 2\nimport torch.distributed as dist\n\nwords = ['first']")
    kernel.run("%%ranks 2\nwords += ['second']\nprint('seen')")
    kernel.run("%%ranks 2\nwords += ['failed']\n1 / 0")
    said = kernel.run(f"%%ranks 2 limit=5\n{HANGS}")
    assert said.endswith("run `%ranks again`: new ranks then run the 2 cells that these had run")
    assert "NameError" in kernel.run("%%ranks 2\nwords"), "the control: these are new"
    assert kernel.run("%ranks again") == "2 new ranks have run 2 cells, as the ranks before them had\n"
    assert kernel.run("%%ranks 2\nwords") == "\n".join(f"[rank {rank}] ['first', 'second']" for rank in (0, 1))
    assert "`%ranks again`, or a cell" in kernel.run("%ranks anew")


def test_what_a_cell_prints_or_forks_or_closes_is_not_taken_for_its_end(kernel):
    before = kernel.pids()
    shows = "import os\nimport subprocess\nprint(dict(os.environ))\nsubprocess.run('env')\nprint('behind', 'it')"
    said = kernel.run(f"%%ranks 2\n{shows}")
    assert said.count("behind it") == 2 and "LOCAL_RANK=1" in said
    assert kernel.run("%%ranks 2\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\npid > 0").count("True") == 2
    assert kernel.run("%%ranks 2\nimport sys\nsys.stdout.close()\nsys.stdout = open(1, 'w', closefd=False)") == ""
    assert kernel.run("%%ranks 2\nfor i in range(3):\n    print(f'{i} of 3', end='\\r')\nprint()").count("2 of 3") == 2
    assert kernel.run("%%ranks 2\n1 + 1") == "[rank 0] 2\n[rank 1] 2" and kernel.pids() == before


def test_what_a_cell_closes_is_open_again_for_the_next(kernel):
    before = kernel.pids()
    said = kernel.run("%%ranks 2\nimport os\nos.close(1)\nos.close(2)")
    assert said.count("\n") == 1 and len(re.findall(r"descriptor 1\b.*descriptor 2\b", said)) == 2
    assert kernel.run("%%ranks 2\nprint('out')\nos.system('echo child >&2')").count("child") == 2
    assert kernel.run("%%ranks 2\nimport sys\nsys.stdout.close()").count("sys.stdout") == 2
    assert kernel.run("%%ranks 2\nprint('out')") == "[rank 0] out\n[rank 1] out" and kernel.pids() == before


def test_long_lines_and_long_texts_are_cut(kernel):
    said = kernel.run("%%ranks 2\nimport os\nprint('x' * 10_000_000 if os.environ['RANK'] == '0' else 'y')")
    cut, whole = said.splitlines()
    assert cut.startswith(f"[rank 0] {'x' * 2000} ") and cut.count("x") == 2000 and "9,998,000" in cut
    assert whole == "[rank 1] y"
    assert kernel.letters < 20_000, "drawn twice, maybe three times"
    said = kernel.run("%%ranks 1\nfor i in range(900):\n    print('x' * 1000)")
    assert said.count("x" * 1000) == 201 and " 699 more " in said
    said = kernel.run("%%ranks 1\nraise ValueError('x' * 10_000_000)")
    assert len(said) < 5000 and kernel.letters < 50_000 and "ValueError" in said


def test_a_line_is_shown_while_its_rank_waits(kernel):
    cell = "import os, time\nprint('one')\nprint('two')\nwhile not os.path.exists('go'):\n    time.sleep(0.1)"
    sent = kernel.start(f"%%ranks 1 limit={LIMIT}\n{cell}")
    until(lambda: "two" in str(kernel.client.get_iopub_msg(timeout=LIMIT)["content"].get("data")), "it is drawn")
    (kernel.folder / "go").touch()
    assert kernel.finish(sent).count("two") <= 1


def test_a_rank_that_ignores_all_signals_is_not_said_to_be_elsewhere(kernel):
    kernel.run("from ddp_helpers.launch import resident\nwaited, resident.ANSWER = resident.ANSWER, 1")
    cell = "import signal, time\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\ntime.sleep(10000)"
    said = kernel.run(f"%%ranks 1 limit=5\n{cell}")
    kernel.run("resident.ANSWER = waited")
    assert "rank 0 " in said and " in line " not in said and STILL in said


def test_a_rank_that_leaves_the_group_is_ended(kernel):
    before = kernel.pids()
    said = kernel.run("%%ranks 2\nimport torch.distributed as dist\ndist.destroy_process_group()")
    assert "destroy_process_group()" in said and "exit status 1" in said and STILL in said
    assert gone(before) and "%%ranks" in kernel.run("pull('kept')")
    assert kernel.run("%%ranks 2\n1 + 1") == "[rank 0] 2\n[rank 1] 2"


@pytest.mark.parametrize("gaps", [[0.0], [0.05, 0.1, 0.3]], ids=["one", "three"])
def test_an_interrupt_ends_what_hangs_and_a_second_one_changes_nothing(kernel, gaps):
    here = f"here{len(gaps)}-"
    kernel.run(f"%%ranks 2\nimport os\nimport time\n\nhere = {here!r} + os.environ['RANK']")
    before = kernel.pids()
    sent = kernel.start("%%ranks 2 fails\nos.mkdir(here); time.sleep(10000)")
    until(lambda: len([*kernel.folder.glob(f"{here}*")]) == 2, "both ranks are in that line")
    for seconds in gaps:  # while it ends them
        kernel.manager.interrupt_kernel()
        time.sleep(seconds)
    said = kernel.finish(sent)
    assert said.startswith("rank 0, 1 in line 2, `os.mkdir(here); time.sleep(10000)`\n") and STILL in said
    assert gone(before) and not kernel.children()
    assert kernel.run("%%ranks 2\n1 + 1") == "[rank 0] 2\n[rank 1] 2"


def test_a_second_interrupt_does_not_take_the_place_of_the_message(kernel):
    kernel.run("import os, signal\nfrom ddp_helpers.launch.processes import one_interrupt")
    press = "os.kill(os.getpid(), signal.SIGINT)"
    again = (
        f"try:\n    with one_interrupt():\n        {press}\nexcept KeyboardInterrupt:\n    {press}\n    print('shown')"
    )
    assert kernel.run(again) == "shown\n"
    assert "KeyboardInterrupt" in kernel.run(f"{press}\nprint('shown')"), "the next cell can be stopped"
    assert kernel.run(again) == "shown\n"


def test_a_second_interrupt_of_a_launch_changes_nothing(kernel):
    assert kernel.run("%load_ext ddp_helpers.launch.launch") == ""
    before = kernel.children()
    cell = "import os, time\nos.mkdir('launched' + os.environ['RANK'])\ntime.sleep(10000)"
    sent = kernel.start(f"%%launch 2\nimport os\nos.chdir({str(kernel.folder)!r})\n{cell}")
    until(lambda: len([*kernel.folder.glob("launched*")]) == 2, "both ranks are there")
    for _ in range(3):
        kernel.manager.interrupt_kernel()
        time.sleep(0.1)
    assert "stopped" in kernel.finish(sent)
    assert {*kernel.children()} == {*before}


def test_a_rank_that_dies_in_a_cell_or_between_two_is_told_of(kernel):
    kernel.run("%%ranks 2\nimport os\nimport signal\nimport torch.distributed as dist")
    said = kernel.run("%%ranks 2\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert re.match(r"rank 1\b.*\bSIGKILL\n.*\b2 ranks\b", said) and STILL in said
    between = kernel.pids()[1]
    os.kill(between, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(between), "it is gone")
    said = kernel.run("%%ranks 2\n1 + 1")
    assert said.startswith("[rank 0] 2\n[rank 1] 2") and "since the last cell" in said
    assert "exit status 3" in kernel.run("%%ranks 2\nimport os\nos._exit(3)")


def test_another_number_of_ranks_starts_new_ones(kernel):
    before = kernel.pids(2)
    said = kernel.run("%%ranks 4\nimport torch.distributed as dist\ndist.get_rank(), dist.get_world_size()")
    assert said.splitlines() == [f"[rank {rank}] ({rank}, 4)" for rank in range(4)]
    assert gone(before)


def test_a_first_line_that_nobody_understands_says_what_would(kernel):
    for line in ("", "x", "0", "2 limit=x", "2 limit=0", "2 limit=0.0", "2 fails here", "-1"):
        said = kernel.run(f"%%ranks {line}\n1")
        assert "%%ranks" in said and "limit=" in said and "\n" not in said.strip(), "how it is written"


def test_a_cell_that_is_meant_to_fail(kernel):
    assert "ZeroDivisionError" in kernel.run("%%ranks 2 fails\n1 / 0")
    said = kernel.run("%%ranks 2 fails\n1")
    assert said.startswith("[rank 0] 1\n[rank 1] 1") and "meant to fail" in said


def test_a_cell_that_is_meant_to_fail_does_not_do_so_by_a_name_that_new_ranks_do_not_know(kernel):
    """After *stop* or a restart the text below would explain a failure that nobody has seen."""
    of_all, of_one = (f"import os\nif os.environ['RANK'] in {ranks!r}: lost\n1 / 0" for ranks in ("01", "0"))
    said = kernel.run(f"%%ranks 2 fails\n{of_all}")
    assert said.startswith("rank 0, 1: Traceback") and "NameError: name 'lost'" in said
    assert said.endswith("it was not meant to fail so: run the cells from the first with `%%ranks` on")
    said = kernel.run(f"%%ranks 2 fails\n{of_one}")
    assert "NameError: name 'lost'" in said and "ZeroDivisionError" in said and "from the first" not in said, "control"
