"""The hang lab: each run ends, its evidence says who is at fault, and the checker refuses what merely sounds right."""

import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from real import LIMIT, THOROUGH, python
from refusals import one_line, refused

from ddp_helpers.cli import main
from ddp_helpers.lessons.break_it_and_fix_it import hang, mutations
from ddp_helpers.lessons.run_script import wait_for_runs
from ddp_tools import watched, who_hangs

SEEDS = [*range(100), 135, 145] if THOROUGH else [0, 1, 5, 6, 17, 19]
AT_ONCE = 4  # runs, which mostly wait
SAME = "import os\n"
SOUND = mutations.Plant(mutations.Mutation("none", 0, SAME, SAME), 0, {"short": 0, "lacks": 1, "spike": 2}, 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder below which the lab keeps its runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("hang")
        patch.setattr(hang, "ROOT", folder)
        yield folder


@pytest.fixture(scope="module")
def runs(root):
    """A run of each seed, several at once, where the lab keeps them; and one of the sound script."""
    plants = {seed: mutations.choose_plant(seed) for seed in SEEDS} | {"sound": SOUND}
    runs, names = {}, [*plants]
    for first in range(0, len(names), AT_ONCE):
        some = {
            name: hang.PlantedRun(plants[name], root / "build" / "hang" / f"seed{name}")
            for name in names[first : first + AT_ONCE]
        }
        wait_for_runs(*some.values())
        runs |= some
    return runs


@pytest.fixture(scope="module")
def labs(runs):
    return {seed: hang.Lab(seed) for seed in SEEDS}


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Keep the run of a seed as if it had ended, in a folder of the lab, without running it."""
    monkeypatch.setattr(hang, "ROOT", tmp_path)

    def write(seed):
        folder = tmp_path / "build" / "hang" / f"seed{seed}"
        mutations.choose_plant(seed).write(folder)
        (folder / "exits.json").write_text("[1, 1, 1]")

    return write


# ---- what is planted


def test_each_fault_is_planted_and_each_rank_is_at_fault():
    plants = [mutations.choose_plant(seed) for seed in range(1000)]
    assert {plant.mutation for plant in plants} == {*mutations.MUTATIONS}
    assert {plant.rank for plant in plants} == {*range(mutations.RANKS)}
    assert not THOROUGH or {mutations.choose_plant(seed).mutation for seed in SEEDS} == {*mutations.MUTATIONS}


@pytest.mark.parametrize("fault", mutations.MUTATIONS, ids=lambda fault: f"{fault.kind}-{fault.culprit}")
def test_a_fault_is_one_small_change_in_one_place(fault):
    compile(fault.text(), "train.py", "exec")
    assert mutations.SOUND.count(fault.old) == 1
    lines = fault.lines()
    assert 1 <= len(lines) <= 3 and max(lines) - min(lines) == len(lines) - 1
    assert not re.search(r"rank == [12]\b|step ==", "".join(fault.text().splitlines()[line - 1] for line in lines))


# ---- the runs


def test_each_run_fails_and_the_sound_script_runs_to_its_end(runs):
    assert [name for name, run in runs.items() if run.exit_statuses == [0, 0, 0]] == ["sound"]
    lines = who_hangs.who_hangs(who_hangs.read_dumps(runs["sound"].folder.glob("recorder_*.json")))
    assert lines == [who_hangs.SAME]


# ---- the evidence: a solver that has nothing else

OTHERS = re.compile(r"Timed out waiting|closed by peer|Connection reset|Broken pipe|Traceback")


def own_error(log):
    """Whether a rank ended with an error that is not the network's; the lines with a File are not looked at."""
    last = [line for line in log.splitlines() if re.match(r"rank \d: [\w.]*(Error|Quit)\b", line)]
    return bool(last) and not OTHERS.search(last[-1])


def odd(words):
    """The one that differs from all others, which agree; None if there is none."""
    rare = [word for word, count in Counter(words).items() if count == 1]
    return words.index(rare[0]) if len(set(words)) == 2 and len(rare) == 1 else None


def suspects(lab):
    """Who each kind of evidence blames, the surest first: a rank, or None."""
    ranks = range(mutations.RANKS)
    exits, logs = lab.look("exits").splitlines(), [lab.look(f"log {rank}") for rank in ranks]
    yield next((rank for rank in ranks if re.search(r"SIG(ABRT|KILL|SEGV)", exits[rank])), None)
    yield next((rank for rank in ranks if own_error(logs[rank])), None)
    yield next((rank for rank in ranks if "does not belong to the given group" in logs[rank]), None)
    yield next((rank for rank in ranks if exits[rank].endswith("status 0")), None)
    if source := re.search(r"broadcast\(seed, src=(.*)\)", "".join(logs)):
        yield odd([eval(source[1], {"rank": rank}) for rank in ranks])
    waits = [odd([f"rank {rank} did not come" in lab.look("who_hangs").splitlines()[0] for rank in ranks])]
    yield waits[0] if "SIGTERM" in exits[waits[0] or 0] else None
    stacks = [re.sub(r"line \d+|rank \d", "", lab.look(f"stack {rank}")) for rank in ranks]
    yield odd(["".join(re.findall(r" in (\w+)", stack)[-2:-1]) for stack in stacks])
    yield odd(re.findall(r"called (\w+ \[\d*\] \w+|\w+)|did", lab.look("who_hangs").splitlines()[0]))
    match = re.match(r"group.*?: rank (\d) ", lab.look("who_hangs"))
    yield int(match[1]) if match else None


def test_the_evidence_names_the_rank(labs):
    blamed = {seed: next((rank for rank in suspects(lab) if rank is not None), None) for seed, lab in labs.items()}
    wrong = {seed: (rank, labs[seed].plant) for seed, rank in blamed.items() if rank != labs[seed].plant.rank}
    assert not wrong


def everything(lab):
    """All that can be looked at but the script, without what differs from run to run."""
    ranks = range(mutations.RANKS)
    of_ranks = [f"{piece} {rank}" for piece in ("log", "stack") for rank in ranks]
    said = map(lab.look, ["exits", "who_hangs", *of_ranks])
    return re.sub(r"process \d+|pid \d+|\[127.*", "", "\n".join(said))


def answer_of(lab):
    """The right answer."""
    fault = lab.plant.mutation
    return {
        "rank": lab.plant.rank,
        "line": min(fault.lines()),
        "kind": fault.kind,
        "fix": mutations.KINDS[fault.kind][1],
    }


def test_where_the_evidence_is_the_same_the_answer_is_or_the_script_tells(labs):
    told = {seed: everything(lab) for seed, lab in labs.items()}
    for one, other in combinations(labs.values(), 2):
        if told[one.seed] == told[other.seed] and answer_of(one) != answer_of(other):
            assert one.evidence.source != other.evidence.source and answer_of(one)["rank"] == answer_of(other)["rank"]


# ---- the checker


def wrong_answers(lab):
    """Answers that are right but for one part, and the one that blames who waits."""
    right, lines = answer_of(lab), lab.plant.mutation.lines()
    for rank in {*range(mutations.RANKS)} - {right["rank"]}:
        yield right | {"rank": rank}, "is not at fault"
    for line in (min(lines) - 2, max(lines) + 2, 1):
        yield right | {"line": line}, "is not where it departs"
    for kind, (_, fix) in mutations.KINDS.items():
        if kind != right["kind"]:
            yield right | {"kind": kind, "fix": fix}, "rank and line are right, but not that"
    for fix in mutations.FIXES.keys() - {right["fix"]}:
        yield right | {"fix": fix}, "all but the fix is right"


def test_the_checker_knows_what_is_wrong_first(keep):
    for seed in range(60):
        keep(seed)
        lab = hang.Lab(seed)
        for answer, told in wrong_answers(lab):
            said = lab.answer(**answer)
            assert said.startswith("not yet: ") and told in said and "\n" not in said, (seed, answer)
        for line in lab.plant.mutation.lines():
            assert lab.answer(**answer_of(lab) | {"line": line}) == "right", (seed, line)


# ---- on the command line


def test_a_seed_is_run_looked_at_and_answered_on_the_command_line(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hang, "ROOT", tmp_path)
    assert main(["hang", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "build/hang/seed1/train.py" in said and "stack R" in said and len(said.splitlines()) < 30
    right = answer_of(hang.Lab(1))
    words = [f"{name}={value}" for name, value in right.items()]
    main(["hang", "--seed", "1", "--look", "stack", "2"])
    main(["hang", "--seed", "1", "--look", "stack 2"])
    assert main(["hang", "--seed", "1", "--answer", *words]) == 0
    *looked, last = capsys.readouterr().out.splitlines()
    half = len(looked) // 2
    assert looked[:half] == looked[half:] and "rank 2" in looked[0] and last == "right"
    assert main(["hang", "--seed", "1", "--answer", "rank=0", *words[1:]]) == (right["rank"] != 0)


BAD = {
    "--seed x": "'x'",
    "--look nothing": "no evidence is called 'nothing': choose one of exits, who_hangs, log R",
    "--look log": "no evidence is called 'log'",
    "--look log 1 2": "no evidence is called",
    "--look exits 1": "no evidence is called",
    "--look log -1": "no evidence is called 'log -1'",
    "--look stack 3": "no evidence is called 'stack 3'",
    "--look lines 99999": "no evidence is called 'lines 99999'",
    "--answer rank=1": "is not rank=… line=… kind=… fix=…",
    "--answer rank=x line=1 kind=early fix=agree": "is not rank=… line=… kind=… fix=…",
    "--answer rank=1 line=1 kind=late fix=agree": "'late' is not known: choose one of early",
    "--answer rank=1 line=1 kind=early fix=pray": "'pray' is not known: choose one of agree",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_word_is_told_in_one_line(words, keep):
    keep(1)
    refused(main, ["hang", "--seed", "1", *words.split()], named=[BAD[words]])


def test_a_seed_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "ROOT", tmp_path)
    refused(main, ["hang"], named=["--seed"])
    assert not [*tmp_path.iterdir()]


# ---- who_hangs, on dumps of any run


def dump(*names, group="0", first=1, done=None, size=2):
    """The dump of a rank that called these."""
    entries = [
        {"profiling_name": f"gloo:{name}", "input_sizes": [[4]], "input_dtypes": ["Float"], "is_p2p": name == "send"}
        | {"process_group": [group, ""], "collective_seq_id": number}
        for number, name in enumerate(names, first)
    ]
    last = first + len(names) - 1 if done is None else done
    return {"entries": entries, "pg_status": {group: {"last_completed_collective": str(last)}}, "world_size": size}


FOUND = {
    "all ended": ([dump("barrier"), dump("barrier")], [who_hangs.SAME]),
    "all called, none ended": (
        [dump("a", "b", done=1), dump("a", "b", done=1)],
        ["group 0, collective 2: ranks 0 and 1 called b [4] Float, and it does not end"],
    ),
    "one missed": (
        [dump("a", "b"), dump("a"), dump("a", "b")],
        ["group 0, collective 2: rank 1 did not come; ranks 0 and 2 called b [4] Float"],
    ),
    "another order": (
        [dump("a", "b"), dump("b", "a"), dump("a", "b")],
        ["group 0, collective 1: rank 1 called b [4] Float; ranks 0 and 2 called a [4] Float"],
    ),
    "no dump": ([dump("a", size=2)], ["rank 1 left no dump: was it killed?"]),
    "a long run, of which only the end is kept": (
        [dump("b", "c", first=2), dump("c", "d", first=3)],
        ["group 0, collective 4: rank 0 did not come; rank 1 called d [4] Float"],
    ),
    "a group of some": (
        [dump(), dump("a", group="1", done=0), dump()],
        ["group 1, collective 1: rank 1 called a [4] Float, and it does not end"],
    ),
    "one hangs before its first": (
        [dump("a"), {"pg_status": {}, "world_size": 2}],
        ["group 0, collective 1: rank 0 called a [4] Float; rank 1 did not come"],
    ),
    "point to point": ([dump("send"), dump("send")], [who_hangs.SAME]),
}


@pytest.mark.parametrize("what", FOUND)
def test_who_hangs_says_who_missed_what(what):
    dumps, lines = FOUND[what]
    assert who_hangs.who_hangs(dict(enumerate(dumps))) == lines


def test_who_hangs_runs_alone_in_a_shell(runs, tmp_path):
    script = tmp_path / "taken_home.py"
    script.write_text(Path(who_hangs.__file__).read_text())
    done = python(script, *sorted(runs["sound"].folder.glob("recorder_*.json")))
    assert (done.returncode, done.stdout) == (0, f"{who_hangs.SAME}\n")
    for words, said in (([tmp_path / "none"], "none"), ([], "python who_hangs.py recorder_rank*.json")):
        done = python(script, *words)
        assert done.returncode == 1
        one_line(done.stderr, said)


def test_who_hangs_takes_no_pickle_and_no_other_file(tmp_path):
    bad = tmp_path / "recorder_rank0.json"
    pickled = pickle.dumps({"entries": []})
    for content in (pickled, b"", b"[]", b'{"entries": 3}', b'{"entries": []}', b'{"entries": [{}]}'):
        bad.write_bytes(content)
        refused(main, ["who-hangs", str(bad)], named=[bad.name])
    refused(main, ["who-hangs"], named=["recorder"])
    refused(main, ["who-hangs", "--watched", str(bad)], named=["another path"])


def test_each_rank_of_srun_writes_a_file_of_its_own(cluster, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['SLURM_PROCID'])\n")
    step = ["srun", "--ntasks=2", "--nodes=1", f"--chdir={tmp_path}", sys.executable, watched.__file__, "train.py"]
    done = subprocess.run(step, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    sizes = {path.name: json.loads(path.read_text())["world_size"] for path in tmp_path.glob("recorder_*.json")}
    assert sizes == {"recorder_rank0.json": 2, "recorder_rank1.json": 2}
