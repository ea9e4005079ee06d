"""`explain` on job files that do not work: faults of public ones, made small; each fault alone; and sound ones."""

import itertools
import json
import re
from pathlib import Path

import pytest
from notebook_texts import cells

from ddp_helpers import ROOT
from ddp_helpers.jobs import Job, Site, render
from ddp_tools import PlainError
from ddp_tools.explain.command import explain
from ddp_tools.explain.jobfile import is_job_file, judge_job, load_faults, not_seen, table
from ddp_tools.explain.jobfile_text import JobFile

FILES = Path(__file__).parent / "jobfiles"
PUBLIC = {
    "gpus_by_gres": {"unset-variable": 6},
    "scontrol_inside": {"scontrol-in-container": 7},
    "letters": {"directive-case": 4, "master-empty": 8},
    "torchrun_each": {"torchrun-each-task": 9},
    "node_rank": {"node-rank-in-batch": 12},
    "set_first": {"late": 4},
    "no_folder": {"output-folder": 6},
    "folder_of_job": {"output-folder": 5},
    "nounset": {"conda-nounset": 8},
    "high_port": {"port-ephemeral": 8},
    "variable": {"directive-variable": 5},
    "localhost": {"master-localhost": 7},
}


def judged(path: Path, text: str, kind: str = "fault") -> dict[str, int]:
    """The ids of what is found in a job file of this text, and their lines."""
    found = judge_job(JobFile(path, text))
    return {one.fault.id: one.line for one in reversed(found) if kind == (one.fault.kind if one.seen else "not seen")}


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.stem)
def test_a_public_job_file_that_does_not_work_is_explained(path: Path, capsys: pytest.CaptureFixture) -> None:
    found, expected = judged(path, path.read_text()), PUBLIC[path.stem]
    risks = judged(path, path.read_text(), "risk")
    assert expected.items() <= (found | risks).items() and set(found) - set(expected) <= {"late"}
    assert explain([path]) == (1 if found else 4)
    said = capsys.readouterr().out
    assert all(f"{path}:{line}: " in said for line in expected.values())


# ---- each fault alone: what is put into the place of a piece of a sound file

TIME = "#SBATCH --time"
SRUN = """#!/bin/bash
#SBATCH --job-name=fit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4  # on each node
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
module load cuda
source venv/bin/activate
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python fit.py --nodes 7 -n 9'
"""
TORCHRUN = """#!/bin/bash -l
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH -t 60
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c "torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --node_rank=\\$SLURM_NODEID \\
  --master_addr=$head --master_port=12345 fit.py"
"""
C10D = TORCHRUN.replace("--node_rank=\\$SLURM_NODEID", "--node_rank=$SLURM_NODEID --rdzv_backend=c10d").replace(
    "--master_addr=$head --master_port=12345", "--rdzv_endpoint=$head:12345"
)
ONE = """#!/bin/sh
#SBATCH --gres=gpu:2
#SBATCH --time=10
# "an odd ' comment
NONE='' EMPTY=""
[ -n "$SLURM_ARRAY_TASK_ID" ] && echo "array $SLURM_ARRAY_TASK_ID"
cat > note.txt <<EOF
  #SBATCH --nodes=9: no directive, and srun python x.py no command
EOF
torchrun --standalone --nproc-per-node=2 fit.py --download-dir data
"""
HELPED = SRUN.replace("module load cuda", "srun --ntasks=1 --nodes=1 python prepare.py")  # which is no training
TOLD = SRUN.replace("#SBATCH --time", "#SBATCH --signal=TERM@300 --requeue --export=ALL,SEED=1\n#SBATCH --time")
PASSED_ON = TOLD.replace("=TERM@", "=B:TERM@").replace("-n 9'\n", "-n 9' &\ntrap 'kill -USR1 $!' TERM\nwait\n")
FUNCTION = PASSED_ON.replace("trap 'kill -USR1 $!' TERM", 'stop() {\n  kill -s USR1 "$!"\n}\ntrap stop TERM')
AGENT = TORCHRUN.replace("#SBATCH -t", "#SBATCH --signal=USR2@300\n#SBATCH -t").replace(
    "torchrun --", "torchrun --signals-to-handle=SIGTERM,SIGUSR2 --"
)
AGENT = AGENT.replace("head=", "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=200\nhead=")
BEHIND = AGENT.replace("=USR2@", "=B:USR1@").replace(
    'fit.py"\n', 'fit.py" &\nstop() { kill -0 $! && touch stop; }\ntrap stop USR1\nwait\n'
)
GPU_TASKS = SRUN.replace("--ntasks-per-node=4", "--ntasks-per-gpu=1").replace(" * SLURM_NTASKS_PER_NODE", " * 4")
FARM = SRUN.replace("srun --cpus", "srun --ntasks=1 --exact --cpus").replace("-n 9'\n", "-n 9' &\nwait\n")
OPTIONS = SRUN.replace("srun --", "OPTIONS='--label --gpu-bind=none -K1'\nsrun -l $OPTIONS --mpi=pmix --")
OPTIONS = OPTIONS.replace(
    "#SBATCH --nodes", "#SBATCH -p gpu -A me --mem 64G --hint=nomultithread --exclusive\n#SBATCH --nodes"
)
TEE = SRUN.replace("module load cuda", "set -euo pipefail").replace("-n 9'\n", "-n 9' 2>&1 | tee -a log\n")
STATUS = TEE + "status=$?\nexit $status\n"
ASIDE = SRUN.replace(
    "\nsrun --", "\nsrun --overlap nvidia-smi -l 9 > load.txt &\nsrun --"
)  # a monitor beside the ranks
EXACT = ASIDE.replace("--overlap nvidia-smi", "--exact --gres=none nvidia-smi").replace(
    "\nsrun --cpus", "\nsrun --exact --label --cpus"
)
EXACT = EXACT.replace('cpus-per-task="$SLURM_CPUS_PER_TASK"', "unbuffered")
PAIR = (
    TORCHRUN.replace('fit.py"', 'fit.py" &')
    .replace("srun bash", "srun -N1 -n1 -w a bash")
    .replace("\\$SLURM_NODEID", "0")
)
PAIR += PAIR.partition("| head -n 1)\n")[2].replace("-w a", "-w b").replace("rank=0", "rank=1") + "wait\n"
LOOP = SRUN.replace("srun --cpus", "for seed in 1 2; do\nsrun --cpus").replace("-n 9'\n", "-n 9' &\nwait\ndone\n")
CALLED = LOOP.replace("for seed in 1 2; do", "fit() {").replace("&\nwait\ndone", "\n}\nfit 1 &\nwait\nfit 2")
GROUP = STATUS.replace("srun --", "{ srun --").replace("9' 2>&1", "9'; } 2>&1")
SOUND = {
    "a function leaves it": CALLED.replace("\n}\nfit 1 &\nwait\nfit 2", "&\n}\nfit\nwait"),
    **{"each pass waits": LOOP, "a function, twice": CALLED, "a group's pipe": GROUP},
    "a node for each pass": LOOP.replace("&\nwait\ndone", "&\ndone\nwait").replace("srun --", "srun -N1 -n1 -w $at --"),
    **{"pipefail": STATUS, "pipe is the last": TEE, "overlap": ASIDE, "one step for each node": PAIR},
    "PIPESTATUS": STATUS.replace("set -euo pipefail", "").replace("$?", "${PIPESTATUS[0]}"),
    "status of srun": f"{SRUN}status=$?\nexit $status\n",
    "overlap of the second": ASIDE.replace("srun --overlap", "srun").replace(
        "\nsrun --cpus", "\nsrun --overlap --cpus"
    ),
    "after wait": ASIDE.replace("--overlap ", "").replace(".txt &", ".txt &\nwait"),
    "nodes that Slurm chooses": PAIR.replace("-w a ", "").replace("-w b ", ""),
    "one and the others": PAIR.replace("-w b", "-x a"),
    **{"srun": SRUN, "with a helper": HELPED, "torchrun": TORCHRUN, "c10d": C10D, "one node": ONE, "told": TOLD},
    **{"passed on": PASSED_ON, "farm": FARM, "options": OPTIONS},
    **{"one command": TOLD.replace("exec ", "").replace("-n 9'", "-n 9 2>&1'")},
    "by a path's env": TOLD.replace("bash -c", "/usr/bin/env SEED=2 bash -c"),
    **{"by a function": FUNCTION, "agent": AGENT.replace("=USR2@", "=12@"), "behind": BEHIND, "gpu tasks": GPU_TASKS},
    "scancel": BEHIND.replace("kill -0 $!", "scancel --signal=USR2 $SLURM_JOB_ID"),
    "counts of Slurm": TORCHRUN.replace("srun bash", "srun -N $SLURM_NNODES -n ${SLURM_NNODES} bash"),
    "a pipe that asks": SRUN.replace("-n 9'\n", "-n 9' | grep -q done || scontrol requeue 1\n"),
    "passed on by number": PASSED_ON.replace("' TERM\n", "' 15\n").replace("-n 9' &", "-n 9' 2>&1 | tee out &"),
    "torchrun starts all": ONE.replace("#SBATCH --time", "#SBATCH -n 2\n#SBATCH --time").replace(
        "\ntorch", "\nsrun -n1 torch"
    ),
}
EXPORTS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
CASES = [
    ("no-shebang", SRUN, "#!/bin/bash\n", "\n#!/bin/bash\n"),
    ("dos", SRUN, "\n", "\r\n"),
    ("directive-case", SRUN, "#SBATCH --nodes", "#sbatch --nodes"),
    ("directive-indented", SRUN, "#SBATCH --nodes", " #SBATCH --nodes"),
    ("directive-space", SRUN, "#SBATCH", "# SBATCH"),
    ("late", SRUN, "#SBATCH --nodes", "cd fit\n#SBATCH --nodes"),
    ("directive-variable", SRUN, "=%x-%j.log", "=$HOME/%j.log"),
    ("directive-blank", SRUN, "name=fit", "name=fit it"),
    ("short-equals", TORCHRUN, "-N 2", "-N=2"),
    ("output-folder", SRUN, "=%x-%j.log", "=%j/log"),
    ("output-folder", SRUN, TIME, f"#SBATCH -e %j/err\n{TIME}"),
    ("output-folder", SRUN.replace("=%x-", "=/%x/").replace("=fit", "=tmp"), "=tmp", "=fit"),
    ("output-folder-here", SRUN.replace("=%x-", "=tmp/").replace(TIME, f"#SBATCH -D /\n{TIME}"), "#SBATCH -D /\n", ""),
    ("no-time", SRUN, f"{TIME}=01:00:00\n", ""),
    ("srun-cpus", SRUN.replace(' --cpus-per-task="$SLURM_CPUS_PER_TASK"', "").replace("=8\n", "=1\n"), "=1\n", "=8\n"),
    ("tasks-contradict", SRUN, "#SBATCH --nodes=2\n", "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n"),
    ("unset-variable", SRUN, "module load cuda", "n=$SLURM_GPUS_PER_NODE"),
    ("unset-variable", SRUN, "#SBATCH --ntasks-per-node=4\n", ""),
    ("unset-variable", SRUN, "module load cuda", '[ -z "$SLURM_GPUS" ] && exit 1'),
    ("unset-variable", ONE, "\n# ", '\nset -u\necho "$SLURM_NTASKS"\n# '),
    ("not-exported", SRUN, "export MASTER_ADDR", "MASTER_ADDR"),
    ("master-empty", SRUN, EXPORTS, "export MASTER_ADDR=$MASTER_ADDR\n"),
    ("master-localhost", SRUN, EXPORTS, "export MASTER_ADDR=localhost\n"),
    ("master-localhost", TORCHRUN, "--master_addr=$head", "--master_addr=\\$(hostname)"),
    ("scontrol-in-container", TORCHRUN, 'srun bash -c "',
     'srun apptainer exec x.sif sh -c "H=\\$(scontrol show hostnames);'),
    ("rank-in-batch", SRUN, "module load cuda", "export RANK=$SLURM_PROCID"),
    ("rank-in-batch", SRUN, "'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python fit.py --nodes 7 -n 9'",
     '"RANK=$SLURM_PROCID python fit.py"'),
    ("node-rank-in-batch", TORCHRUN, "\\$SLURM_NODEID", "$SLURM_NODEID"),
    ("conda-nounset", SRUN, "source venv/bin/activate", "set -eu\nconda activate fit"),
    ("cuda-visible", ONE, "torchrun --", "export CUDA_VISIBLE_DEVICES=0,1,2,3\ntorchrun --"),
    ("uneven-tasks", SRUN.replace(" * SLURM_NTASKS_PER_NODE", " * 4"), "--ntasks-per-node=4", "--ntasks=8"),
    ("tasks-gpus", SRUN, "gpu:a100:4", "gpu:a100:2"),
    ("tasks-gpus", GPU_TASKS, "--ntasks-per-gpu=1", "--ntasks-per-gpu=2"),
    ("tasks-gpus", SRUN.replace("--gres=gpu:a100:4", "-G 8"), "-G 8", "-G 4"),
    ("tasks-gpus", SRUN, "--ntasks-per-node=4", "--ntasks-per-node=2"),
    ("torchrun-alone", ONE, TIME, f"#SBATCH --nodes=2\n{TIME}"),
    ("torchrun-each-task", TORCHRUN.replace("#SBATCH --ntasks-per-node=1\n", ""), "#SBATCH -t",
     "#SBATCH --ntasks-per-gpu=1\n#SBATCH -t"),
    ("torchrun-each-task", TORCHRUN, "srun bash", "srun --ntasks-per-node=$SLURM_GPUS_ON_NODE bash"),
    ("excluded", GPU_TASKS, "#SBATCH --ntasks-per-gpu=1", "#SBATCH --ntasks-per-gpu=1 --ntasks-per-node=4"),
    ("nproc-gpus", TORCHRUN, "--nproc_per_node=4", "--nproc_per_node=$SLURM_NNODES"),
    ("nproc-gpus", TORCHRUN, "--nproc_per_node=4", ""),
    ("torchrun-each-task", TORCHRUN, "--ntasks-per-node=1", "--ntasks-per-node=4"),
    ("torchrun-alone", TORCHRUN, "srun bash", "bash"),
    ("python-alone", SRUN, 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', "time"),
    ("standalone", TORCHRUN, "--nproc", "--standalone --nproc"),
    ("nproc-gpus", TORCHRUN, "--nproc_per_node=4", "--nproc_per_node=8"),
    ("nproc-gpus", TORCHRUN, "--gpus-per-node=4", "--gpus-per-node=2"),
    ("nnodes", TORCHRUN, "--nnodes=$SLURM_NNODES", "--nnodes=4"),
    ("gpus-per-task-alone", ONE, TIME, f"#SBATCH --gpus-per-task=1\n{TIME}"),
    ("excluded", SRUN, TIME, f"#SBATCH --cpus-per-gpu=2\n{TIME}"),
    *(("excluded", SRUN.replace(TIME, f"#SBATCH --{one}=1G\n{TIME}"), TIME, f"#SBATCH --{other}=1G\n{TIME}")
      for one, other in itertools.pairwise(["mem", "mem-per-cpu", "mem-per-gpu", "mem"])),
    ("signal-no-step", ONE, "#SBATCH --time", "#SBATCH --signal=USR1@120\n#SBATCH --time"),
    ("signal-no-trap", TOLD, "=TERM@", "=B:TERM@"),
    ("signal-no-trap", PASSED_ON, "=B:TERM@", "=B:10@"),
    ("signal-late", PASSED_ON, "-n 9' &", "-n 9'"),
    ("signal-kept", PASSED_ON, "kill -USR1", "kill"),
    ("signal-kept", FUNCTION, "-s USR1", "-s 15"),
    ("signal-kept", FUNCTION.replace("stop()", "function stop"), "-s USR1", "-s INT"),
    ("signal-kept", PASSED_ON.replace("trap", "if true; then trap").replace("' TERM", "' TERM 10; fi"), "-USR1", "-1"),
    ("signal-kept", TOLD.replace("=TERM@", "=B:USR1@").replace("\nsrun", "\nexec srun"), "=B:USR1@", "=B:TERM@"),
    ("signal-torchrun", AGENT, "SIGTERM,SIGUSR2", "SIGTERM"),
    ("signal-torchrun", AGENT, " --signals-to-handle=SIGTERM,SIGUSR2", ""),
    ("signal-torchrun", AGENT, "=USR2@", "=10@"),
    ("signal-torchrun", AGENT.replace("torchrun --", "python -m torch.distributed.run --"), "SIGUSR2", "SIGUSR1"),
    ("signal-torchrun", BEHIND, "kill -0", "kill -USR1"),
    ("signal-30s", AGENT, "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=200\n", ""),
    ("signal-wrapped", TOLD.replace("exec python", "cd run; exec python"), "exec", ""),
    ("signal-wrapped", TOLD.replace("exec ", ""), "-n 9'", "-n 9\n  date'"),
    ("signal-wrapped", TOLD.replace("exec ", ""), "-n 9'", "-n 9 & wait'"),
    ("signal-wrapped", AGENT, "bash -c", "apptainer exec x.sif bash -c"),
    ("signal-wrapped", AGENT, "bash -c", "dash -c"),
    ("signal-wrapped", TOLD, "bash -c", "apptainer exec x.sif bash -c"),
    ("signal-wrapped", HELPED.replace("srun --cpus-per-task", "mpirun --x"), "#SBATCH --t",
     "#SBATCH --signal=TERM\n#SBATCH --t"),
    ("srun-one-task", SRUN, "srun --", "srun --ntasks=1 --"),
    ("srun-one-task", HELPED, "\nsrun --cpus", "\nsrun -n1 --cpus"),
    ("srun-one-task", TORCHRUN, "srun bash", "srun -n1 bash"),
    ("step-variable", C10D, "endpoint=$head", "endpoint=$SLURM_LAUNCH_NODE_IPADDR"),
    ("download", SRUN, "module load cuda", "srun python download.py"),
    ("download", TORCHRUN, "fit.py", "fit.py --download"),
    ("status-of-another", f"{SRUN}status=$?\nexit $status\n", "status=$?", "echo ended\nstatus=$?"),
    ("status-of-pipe", STATUS, "set -euo pipefail", ""),
    ("status-of-pipe", STATUS, "euo pipefail", "o pipefail\nset +o pipefail"),
    ("status-of-pipe", STATUS.replace("status=$?\nexit $status", "if [ $? -ne 0 ]; then exit 1; fi"), "o pipefail", ""),
    ("status-of-pipe", STATUS.replace("tee -a log", "tee -a log || scontrol requeue 1"), "o pipefail", ""),
    ("status-of-pipe", STATUS.replace("\nsrun", "\nif ! srun").replace("-a log", "-a log; then exit 1; fi"),
     "o pipefail", ""),
    ("status-of-pipe", STATUS.replace("-a log\n", "-a log &\nid=$!\nwait $id\n"), "o pipefail", ""),
    ("status-of-pipe", TEE, "o pipefail", ""),
    ("status-of-pipe", GROUP, "o pipefail", ""),
    ("status-of-pipe", CALLED.replace("fit 2", "set -o pipefail\nfit 2 | tee log"), "set -o pipefail\n", ""),
    ("step-waits", ASIDE, "srun --overlap nvidia-smi", "srun nvidia-smi"),
    ("step-waits", ASIDE, "srun --overlap nvidia-smi", "srun -N 2 --ntasks-per-node=1 nvidia-smi"),
    ("step-waits", ASIDE.replace("srun --overlap", "srun").replace("\nsrun --cpus", "\nsrun --overlap --cpus"),
     "srun --overlap --cpus", "srun --cpus"),
    ("step-waits", EXACT, "srun --exact --label", "srun --label"),
    ("step-waits", ASIDE, "srun --overlap nvidia-smi", "srun --exact -c 1 nvidia-smi"),
    ("step-waits", PAIR, "-w b", "-w a"),
    ("step-may-wait", ASIDE, "srun --overlap nvidia-smi", "srun --exact -c 1 --gres=none nvidia-smi"),
    ("step-may-wait", ASIDE, "srun --overlap nvidia-smi", "srun $HOW nvidia-smi"),
    ("step-waits", LOOP, "&\nwait\ndone", "&\ndone\nwait"),
    ("step-waits", CALLED, "&\nwait", "&"),
    ("step-may-wait", LOOP.replace("for seed in 1 2", "while read seed"), "wait\n", ""),
    ("step-may-wait", LOOP.replace("1 2", "1 2 3").replace("srun", "srun -n1 --exact --gres=gpu:1"), "wait\n", ""),
    ("folder-of-each-attempt", SRUN.replace("fit.py", "fit.py --out run-$(date +%s)"),
     TIME, f"#SBATCH --requeue\n{TIME}"),
    ("port-ephemeral", SRUN, "10000 + SLURM_JOB_ID % 20000", "10000 + SLURM_JOB_ID % 50000"),
    ("port-ephemeral", SRUN, "$((10000 + SLURM_JOB_ID % 20000))", "$(shuf -i 30000-50000 -n 1)"),
    ("port-ephemeral", TORCHRUN, "12345", "45678"),
    ("port-array", TORCHRUN, "#SBATCH -t", "#SBATCH --array=0-3\n#SBATCH -t"),
    ("port-array", SRUN.replace("$((10000 + SLURM_JOB_ID % 20000))", "29500"),
     "#SBATCH --t", "#SBATCH -a 0-3\n#SBATCH --t"),
]  # fmt: skip


@pytest.mark.parametrize(("id_", "text", "old", "new"), CASES, ids=[f"{n}-{row[0]}" for n, row in enumerate(CASES)])
def test_each_fault_is_found_where_it_is_put(id_: str, text: str, old: str, new: str, tmp_path: Path) -> None:
    path, kind = tmp_path / "job.sbatch", load_faults()[id_].kind.replace("unseen", "not seen")
    found = judged(path, text.replace(old, new), kind)
    assert not judged(path, text, kind) and id_ in found, found


SCRIPT = {  # a job file, a script that has the fault in it, and one that has not
    "master-unset": (SRUN.replace(EXPORTS, ""), "init_process_group()", "import lightning"),
    "one-task": (ONE, "net = DistributedDataParallel(net)", "DataParallel(net)"),
    "gpus-per-task": (
        SRUN.replace("--gres=gpu:a100:4", "--gpus-per-task=1"),
        "set_device(local_rank)",
        "set_device(0)",
    ),
}


@pytest.mark.parametrize("id_", SCRIPT)
def test_what_a_script_may_cure_is_told_by_the_script(id_: str, tmp_path: Path) -> None:
    text, harm, cure = SCRIPT[id_]
    text = text.replace("torchrun --standalone --nproc-per-node=2", "srun python")
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    assert id_ in judged(path, text, "not seen") and explain([path]) == 4
    (tmp_path / "fit.py").write_text(harm)
    assert id_ in judged(path, text) and explain([path]) == 1
    (tmp_path / "fit.py").write_text(cure)
    assert not judged(path, text) and not judged(path, text, "not seen")


def test_a_folder_that_may_be_where_sbatch_is_called_is_not_seen(tmp_path: Path) -> None:
    text, path = SRUN.replace("=%x-%j.log", "=none/%j.log"), tmp_path / "job.sbatch"
    path.write_text(text)
    assert {*judged(path, text, "not seen")} == {"output-folder-here"} and explain([path]) == 4
    assert "output-folder" in judged(path, text.replace("module load cuda", "mkdir -p none"))
    (tmp_path / "none").mkdir()
    assert explain([path]) == 0


UNREAD = {  # an option that no check reads, or not with this value, in the place of a piece of a sound file
    "--ntasks-per-socket=2": (ONE, "#SBATCH --time", "#SBATCH --ntasks-per-socket=2\n#SBATCH --time"),
    "--gpu-bind=single:1": (OPTIONS, "--gpu-bind=none", "--gpu-bind=single:1"),
    "--export=NONE": (SRUN, "#SBATCH --time", "#SBATCH --export NONE\n#SBATCH --time"),
    "--gres=gpu:2,mps:50": (ONE, "gres=gpu:2", "gres=gpu:2,mps:50"),
    "--no-such": (OPTIONS, "--hint=nomultithread", "--no-such"),
    "$EXTRA": (SRUN, "srun --", "srun $EXTRA --"),
    "$ARGS": (TORCHRUN, "--nnodes", "$ARGS --nnodes"),
    "--distribution=cyclic": (OPTIONS, "--hint=nomultithread", "--distribution=cyclic"),
}


@pytest.mark.parametrize("option", UNREAD)
def test_an_option_that_no_check_reads_is_named_and_the_file_is_not_called_sound(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text, old, new = UNREAD[option]
    (tmp_path / "job.sbatch").write_text(text.replace(old, new))
    assert explain([tmp_path / "job.sbatch"]) == 4
    said = capsys.readouterr().out
    assert f"Not seen: what {option} in line " in said and "No known fault" not in said


def test_the_options_that_a_site_may_name_are_all_looked_at(tmp_path: Path) -> None:
    template = (ROOT / "slurm" / "sites" / "TEMPLATE.toml").read_text()
    options = re.findall(r"--[a-z-]+=?\S*", template.partition("The usual ones:")[2].partition("# A learner's own")[0])
    assert len(options) > 12
    options = [option.strip(",").replace("…", "node1") for option in options]
    lines = "".join(f"#SBATCH {option}\n" for option in options)
    job = JobFile(tmp_path / "job.sbatch", SRUN.replace("#SBATCH --time", f"{lines}#SBATCH --time"))
    assert not not_seen(job) and {one.fault.id for one in judge_job(job)} == {"excluded"}


def test_a_job_file_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.pbs"
    path.write_text("#!/bin/bash\n#PBS -l select=2:ncpus=64:ngpus=4\nmpiexec python fit.py\n")
    with pytest.raises(PlainError, match="a job file for PBS: explain reads those of Slurm alone"):
        explain([path])


def test_no_fault_is_without_a_case() -> None:
    assert set(load_faults()) == {row[0] for row in CASES} | set(SCRIPT) | set(NOTES)


def options(text: str) -> dict[str, str]:
    """What a job file asks for, in its directives and of srun."""
    job = JobFile(FILES / "job.sbatch", text)
    return job.options | {name: value for start in job.starts for name, value in start.own.items()}


def test_each_option_that_is_said_to_be_read_changes_a_verdict_and_is_in_the_documentation() -> None:
    """A case proves it for its fault, if it changes this option alone."""
    proved: dict[str, set[str]] = {name: {"(value)"} for name in re.findall(r"--([a-z-]+)=", " ".join(UNREAD))}
    for id_, text, old, new in CASES:
        changed = {name for name, _ in options(text).items() ^ options(text.replace(old, new)).items()}
        if len(changed) == 1:
            proved.setdefault(changed.pop(), set()).add(id_)
    said = table()
    assert not set(said["read"]) & set(said["indifferent"])
    assert {name for name, ids in said["read"].items() if not proved.get(name, set()) >= set(ids)} == set()
    assert set(said["values"]) <= {name for name, ids in proved.items() if "(value)" in ids}
    cells = ["; ".join(f"{name}: {', '.join(ids)}" for name, ids in said["read"].items())]
    cells += [", ".join(sorted(said[kind])) for kind in ("values", "indifferent")]
    page = (ROOT / "docs" / "tools.md").read_text()
    assert not [cell for cell in cells if f" | {cell} |\n" not in page]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_job_file_has_no_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(SOUND[name])
    assert explain([path]) == 0 and "No known fault is in it." in capsys.readouterr().out


NOTES = ("no-time", "directive-space-some", "srun-cpus", "cuda-visible-srun", "status-of-pipe-unused")


def test_what_only_some_clusters_mind_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    text = SRUN.replace("#SBATCH --time", "# SBATCH --time").replace(
        '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--label"
    )
    text = text.replace("module load cuda", "export CUDA_VISIBLE_DEVICES=0,1")
    text = text.replace("-n 9'\n", "-n 9' 2>&1 | tee log\necho done\n")
    path.write_text(text)
    assert set(judged(path, text, "note")) == set(NOTES) and explain([path]) == 0


def test_the_courses_own_job_files_have_no_fault(tmp_path: Path) -> None:
    kinds: tuple[dict, ...] = ({}, {"array": ("1", "2")}, {"requeue": True, "grace": 60})
    sites = ("local", "della", "greene", "classroom", "pyxis")
    for site, launcher, kind in itertools.product(sites, ("srun", "torchrun"), kinds):
        program = ("fit.py", "{array}") if "array" in kind else ("fit.py",)
        job = Job("fit", program, nodes=2, ranks_per_node=2, gpus_per_node=2, launcher=launcher, **kind)
        text = render(job, Site.load(site), tmp_path)
        file = JobFile(tmp_path / "job.sbatch", text)
        # What singularity does with a signal is not known.
        known = {"signal-wrapped"} if site == "greene" and "grace" in kind else set()
        assert {one.fault.id for one in judge_job(file)} == known and not not_seen(file), (site, launcher, kind)


UNSEEN = {
    "what `srun ./run_all.sh` in line 9 starts": ("module load cuda", "srun ./run_all.sh"),
    "what `bash fit.sh` in line 9 starts": ("module load cuda", "bash fit.sh"),
    "what `srun bash -c hostname ./run.sh": ("module load cuda", "srun bash -c 'hostname\n./run.sh'"),
    "how many nodes line 14 has": ("--nodes=2", "--nodes=2-4"),
    "how many tasks per node line 14 has": ("srun --", "srun --ntasks=$COUNT --"),
    "how many GPUs per node line 14 has": ("gpu:a100:4", "gpu:$KIND"),
}


@pytest.mark.parametrize("said", UNSEEN)
def test_what_may_start_ranks_and_a_count_that_is_not_plain_are_not_seen(said: str, tmp_path: Path) -> None:
    job = JobFile(tmp_path / "job.sbatch", SRUN.replace(*UNSEEN[said]))
    assert len(not_seen(job)) == 1 and not_seen(job)[0].startswith(said), not_seen(job)


def test_what_starts_no_rank_is_not_seen(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --time=10\nsrun ./run_all.sh\n")
    assert explain([path]) == 4 and "Not seen: the command that starts the ranks" in capsys.readouterr().out
    path.write_text(TOLD.partition("srun")[0] + "python prepare.py\nsrun ./run_all.sh\n")  # nor is it the Python above
    assert explain([path]) == 4 and "fault" not in capsys.readouterr().out
    path.write_text("#!/bin/bash\npython fit.py\n")
    assert explain([path], as_json=True) == 4
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "not seen" and data["faults"] == [] and len(data["not_seen"]) == 1


def test_a_log_is_no_job_file_and_both_at_once_are_refused(tmp_path: Path) -> None:
    texts = {"a.log": "#!/bin/bash\nloss 0.3\n", "b.sh": SRUN, "c.log": "job 3\n" + SRUN, "d.slurm": "", "e.sh": "ls"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert [name for name in texts if is_job_file(tmp_path / name)] == ["b.sh", "d.slurm"]
    with pytest.raises(PlainError, match="alone"):
        explain([tmp_path / "a.log", tmp_path / "b.sh"])


WRITES = re.compile(r"%%writefile \S+\.sbatch\n")


def test_the_job_files_that_notebooks_write_have_no_fault() -> None:
    paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    sources = [(path.stem, cell) for path in paths for cell in cells(path, "code")]
    written = [(name, WRITES.sub("", cell)) for name, cell in sources if WRITES.match(cell)]
    assert {name[:2] for name, _ in written} == {"07", "08", "11"}
    for name, text in written:
        assert judged(Path(f"{name}.sbatch"), text) == judged(Path(f"{name}.sbatch"), text, "risk") == {}, name
        for sum_ in ("$((32768 + SLURM_JOB_ID % 20000))", "$((10000 + SLURM_JOB_ID))"):
            high = text.replace("$((10000 + SLURM_JOB_ID % 20000))", sum_)
            assert high == text or judged(Path(f"{name}.sbatch"), high, "risk"), "the control: a port that may be taken"
