"""Try on this machine what only a GPU can show, and write down what was seen; ten minutes at most.

python3 gpu_first_run.py --data data    # the folder with MNIST's files: download_data.py gets them
srun --gres=gpu:2 --cpus-per-task=8 --time=15 python3 gpu_first_run.py --data data
python3 gpu_first_run.py --data data --cpu    # the same steps on two CPU ranks, over gloo; twenty

It starts the scripts that stand beside it. Each step has a time limit of its own, since a hang is a
result, and adds a line to record.jsonl at once; nothing stops the others. At the end it prints a
table, and on GPUs the folder to send or to commit. Needs torch and torchvision. MIT licence.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
import importlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time


def main() -> int:
    """Run all steps, each in a process of its own; return 0 if all that was tried went well."""
    args = read_flags()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job's end, as Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        first = take_step("facts", args, Path(folder), end)
    seen, lines = first["seen"], [first]
    if not first["ok"]:
        why = seen.get("why") or ": ".join([first["ended"], *first["said"][-1:]])
        print(f"no GPU that torch can use, so nothing was tried: {why}")
        print("with --cpu the same steps run on CPUs, over gloo")
        return 1
    vars(args).update({name: seen[name] for name in ("ranks", "gpus", "bf16", "visible")})
    out = new_folder(args.out, "cpu" if args.cpu else seen["names"][0])
    print(f"the record: {out}")
    done = False
    try:
        for name in STEPS:
            if name != "facts" and (not args.only or name in args.only):
                work = Path(tempfile.mkdtemp(dir=out))
                lines.append(take_step(name, args, work, end))
                # First: where the disk is full, this makes room for the line.
                shutil.rmtree(work, ignore_errors=True)
            done = write(out, lines)
            if lines[-1]["ended"] == "interrupted":
                break
    finally:
        print_table(lines)
    if not (args.cpu or SIMULATED):  # what CPUs show is no record of a GPU
        print(f"send this folder to the course, or commit it: {out}")
    if lines[-1]["ended"] == "interrupted":
        return 130
    no_time = any(line["ended"] == NO_TIME for line in lines)
    return int(not done or no_time or any(line["ok"] is False for line in lines))


def read_flags() -> Namespace:
    """Read the command line; stops where it cannot be used."""
    parser = ArgumentParser(usage="%(prog)s --data FOLDER [flags]; --help lists them")
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder with MNIST/raw")
    add("--out", type=Path, help="folder in which the record's folder is made")
    add("--seconds", type=float, help="of all steps, 600 or on CPUs 1200: each has its share")
    add("--only", nargs="+", choices=STEPS, help="leave out the other steps")
    add("--example", type=Path, help="main.py of pytorch/examples/mnist, to be timed beside ours")
    add("--cpu", action="store_true", help="hide the GPUs: two ranks on CPUs, over gloo")
    args = parser.parse_args()
    args.data, args.seconds = args.data.resolve(), args.seconds or (1200 if args.cpu else 600)
    if missing := [name for name in MNIST if not raw_file(args.data, name).is_file()]:
        cure = f"download_data.py --data {args.data} gets them, where there is a network"
        parser.error(f"--data {args.data} has no MNIST/raw/{missing[0]}-ubyte: {cure}")
    in_course = (COURSE / "notebooks" / "results").is_dir()
    place = "build" if args.cpu or SIMULATED else "notebooks/results"
    home = COURSE / place if in_course else Path.cwd()
    args.out = (args.out or home / "gpu").resolve()
    args.ranks, args.gpus, args.visible = 0, 0, ""  # `facts` will tell
    return args


def new_folder(out: Path, name: str) -> Path:
    """Make the folder NAME-N for this record, with the first N that is free."""
    name = re.sub(r"\W+", "-", name.lower())
    folders = (out / f"{name}-{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    return folder


def write(out: Path, lines: list[dict[str, Any]]) -> bool:
    """Write the record and its log, each whole, or leave those before; tells whether it did."""
    ends = [line | {"said": line["said"][-20:]} for line in lines]
    record = "".join(json.dumps(line) + "\n" for line in ends)
    log = "".join("\n".join([f"==== {line['step']}", *line["said"], ""]) for line in lines)
    part = out / "new.part"
    try:
        for name, text in {"record.jsonl": record, "log.txt": log}.items():
            part.write_text(text)
            part.replace(out / name)
    except OSError as error:
        lines[-1]["found"] += f" (not written at once: {error.strerror})"
        print(f"the record cannot be written now: {error.strerror}", flush=True)
        with suppress(OSError):
            part.unlink()
        return False
    return True


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print a row for each step."""
    print("\nstep       seconds")
    for line in lines:
        print(f"{line['step']:<9} {line['seconds']:8.1f}  {verdict(line)}")
    print(flush=True)


# What launchers export. The last three words are rank, local rank and world size; before them
# stands what names this start. The first row whose words are all set counts, as a whole: inside a
# Slurm job mpirun's ranks have SLURM_PROCID=0, too.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i() -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it."""
    for launcher, names in LAUNCHERS.items():
        if all(name in os.environ for name in names):
            rank, local_rank, world_size = (int(os.environ[name]) for name in names[-3:])
            return launcher, rank, local_rank, world_size
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name, "1") != "1":
            cure = "start it with srun, mpirun or torchrun"
            sys.exit(f"{name}={os.environ[name]}, but no launcher started this process: {cure}")
    return "single", 0, 0, 1


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself; any process calls it.

    They are those of its Slurm task, or its share of torchrun's.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = len(os.sched_getaffinity(0))
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's ranks on this node
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task_cpus.isdecimal() and int(task_cpus):
        cpus = min(cpus, int(task_cpus))  # of the task, which is torchrun with all its ranks
    return max(1, cpus // max(1, int(sharing) if sharing.isdecimal() else 1))


PROGRAM = Path(sys.argv[0]).resolve()  # gpu_first_run.py, written out
HERE = PROGRAM.parent
COURSE = HERE.parents[1]  # where it stands in the course's slurm/scripts, as it is committed
if not (COURSE / "notebooks" / "spirals.py").exists():
    COURSE = HERE
SIMULATED = "SIMULATED_GPUS" in os.environ  # by `ddp-course gpus`
MNIST = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
COUNTER = itertools.count()


class Step:
    """What a step runs with: the flags, its folder, the number of ranks, their environment."""

    def __init__(self, args: Namespace, work: Path) -> None:
        self.args, self.work, self.data = args, work, Path(args.data)
        self.cpu, self.size = args.cpu, args.ranks
        share = max(1, cpus_of_rank() // max(2, self.size))
        self.env = {**os.environ, "OMP_NUM_THREADS": str(share)}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        # So that time-outs end a minute sooner, and leave the recorders' files.
        self.env |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # its old name
            self.env[name] = str(work / "recorder_rank_")
        if args.gpus == 1:
            self.env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two ranks share it, since NCCL 2.30

    def note(self, **facts: object) -> None:
        """Write down at once what was seen."""
        with (self.work / "notes").open("a") as file:
            print(json.dumps(facts, default=str), file=file, flush=True)

    def start(self, command: list, name: str, **env: object) -> subprocess.Popen:
        """Start a command, whose output goes to a file of this name."""
        said = (self.work / name).open("wb")
        words = {word: str(text) for word, text in env.items()}
        argv = list(map(str, command))
        return subprocess.Popen(argv, stdout=said, stderr=said, env=self.env | words, cwd=self.work)

    def run(self, *program: object, ranks: int = 0, grace: float = 15, **env: object) -> list:
        """Run Python with a program, or a program on several ranks, to its end.

        Returns of each rank its status, its seconds, and what it said; grace: as in `wait_for`.
        """
        command = [sys.executable, *program]
        self.note(command=f"{f'{ranks} ranks: ' if ranks else ''}{' '.join(map(str, command))}")
        # As long as the ranks live, a socket that is bound and does not listen keeps their port.
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held.getsockname()[1]}
            if sys.platform != "linux":  # elsewhere nobody could listen beside it
                held.close()
            group |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            number = next(COUNTER)
            names = [f"said-{number}-{rank}" for rank in range(max(1, ranks))]
            begin, started = time.monotonic(), []
            for rank, name in enumerate(names):
                mine = group | {"RANK": rank, "LOCAL_RANK": rank} if ranks else {}
                started.append(self.start(command, name, **mine, **env))
            seconds = wait_for(started, begin, grace)
        texts = [(self.work / name).read_text(errors="replace") for name in names]
        for rank, text in enumerate(texts):
            print(f"---- {' '.join(map(str, program))}, rank {rank}\n{text}", flush=True)
        ended = zip(started, seconds, texts, strict=True)
        return [(each.returncode, took, text) for each, took, text in ended]

    def probe(self, name: str, *words: object, ranks: int = 0, **env: object) -> list:
        """Run one of PROBES as `run` runs a program."""
        return self.run(PROGRAM, "--probe", name, *words, ranks=ranks, **env)

    def torchrun(self, *program: object, restarts: int = 0) -> list:
        """Return the command of torchrun with all ranks; what it starts ends with it."""
        options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={self.size}"]
        return ["-m", "torch.distributed.run", *options, f"--max-restarts={restarts}", *program]

    def small(self) -> Path:
        """Cut MNIST to its first 512 training and 256 test images."""
        target = self.work / "small"
        raw_file(target, "").parent.mkdir(parents=True, exist_ok=True)
        for name, most in zip(MNIST, (512, 512, 256, 256), strict=True):
            content = raw_file(self.data, name).read_bytes()
            head, size = (16, 28 * 28) if "images" in name else (8, 1)
            count = min(most, int.from_bytes(content[4:8], "big"))
            text = content[:4] + count.to_bytes(4, "big") + content[8:head]
            raw_file(target, name).write_bytes(text + content[head : head + count * size])
        return target


def wait_for(started: list[subprocess.Popen], begin: float, grace: float) -> list[float]:
    """Wait for ranks, and return when each ended, in seconds since `begin`.

    Once one has failed, the others have `grace` seconds; then they are killed.
    """
    seconds = dict.fromkeys(started, 0.0)
    patience = float("inf")
    while running := [each for each in started if not seconds[each]]:
        for each in running:
            if each.poll() is not None:
                seconds[each] = time.monotonic() - begin
                if each.returncode:
                    patience = min(patience, time.monotonic() + grace)
            elif time.monotonic() > patience:
                each.kill()
        time.sleep(0.02)
    return list(seconds.values())


def raw_file(data: Path, name: str) -> Path:
    """Return the path of one of MNIST's files."""
    return data / "MNIST" / "raw" / f"{name}-ubyte"


def found(ranks: list) -> dict[str, Any]:
    """Return what a probe told on its first rank; ends the step where it told nothing."""
    status, _, text = ranks[0]
    if not (told := re.findall(r"^SEEN (.*)$", text, re.M)):
        sys.exit(f"status {status}: {' '.join(text.splitlines()[-1:])}")
    return json.loads(told[-1])


def tell(**facts: object) -> None:
    """Print, in a probe, what its step reads by `found`."""
    print("SEEN", json.dumps(facts), flush=True)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the epochs of a run's record."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of two files of weights."""
    import torch

    both = [torch.load(path, map_location="cpu", weights_only=True) for path in (one, other)]
    return max((both[0][name] - both[1][name]).abs().max().item() for name in both[0])


def resume(step: Step) -> None:
    """Kill runs and go on with them; compare with those that nobody killed."""
    common = ["--data", step.small(), "--epochs", 2, "--batch-size", 16, "--num-workers", 0]
    common += ["--checkpoint-every", 10, "--save-model", "--timeout", 60, "--run-dir"]
    script, off = HERE / "mnist_ddp_resumable.py", {}

    def go(name: str, *flags: object) -> Path:
        step.run(script, *common, name, *flags, ranks=step.size)
        return step.work / name / "mnist_cnn.pt"

    def kill(name: str, at: int, *flags: object) -> None:
        step.probe("killed", at, "all", *common, name, *flags, ranks=step.size)

    golden = go("golden")
    for at in (17,) if step.cpu else (17, 45):
        kill(f"killed-{at}", at)
        if at == 17:
            shutil.copytree(step.work / "killed-17", step.work / "control")
        off[f"killed at {at}"] = difference(golden, go(f"killed-{at}"))
        step.note(off=off)
    step.probe("forget", *common, "control", ranks=step.size)
    off["control"] = difference(golden, step.work / "control" / "mnist_cnn.pt")
    if not step.cpu:
        off["again"] = difference(golden, go("again"))
        if step.args.bf16:
            kill("killed-bf16", 17, "--bf16")
            off["bf16"] = difference(go("golden-bf16", "--bf16"), go("killed-bf16", "--bf16"))
    resumed = max(value for name, value in off.items() if name not in ("control", "again"))
    near = 0 if step.cpu else off["control"] / 10
    step.note(off=off, ok=resumed <= near < off["control"])
    step.note(found=f"weights: off by {resumed:.0e} at most, the control {off['control']:.0e}")


def timeout(step: Step) -> None:
    """Let a rank come too late to an all-reduce, and see how the others end."""
    seconds, begin = 4 if step.cpu else 10, time.time()
    ranks = step.probe("late", seconds, ranks=step.size, grace=5)
    files = sorted(path.name for path in step.work.glob("recorder_rank_*"))
    status, took, text = ranks[0]
    waited = begin + took - found(ranks)["waits_since"]
    known = ("Watchdog caught collective operation timeout", "taking the entire process down")
    lines = [words for words in known if words in text]
    step.note(statuses=[each[0] for each in ranks], waited=waited, recorders=files, lines=lines)
    step.note(ok=status == 1 if step.cpu else (status == -signal.SIGABRT and bool(files)))
    told = f"after {waited:.0f} s with status {status}, {len(files)} recorders' files"
    step.note(found=f"a timeout of {seconds} s ended rank 0 {told}")


def restart(step: Step) -> None:
    """Restart the ranks after a time-out, as torchrun does, with and without the key it leaves."""
    seconds, lives = (4, 1) if step.cpu else (10, 40)
    env, waits = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": 15}, {}
    # Only the first deletes the key, which there is with NCCL alone.
    for script in ("mnist_ddp_resumable",) if step.cpu else ("mnist_ddp_resumable", "mnist_ddp"):
        words = step.torchrun(PROGRAM, "--probe", "again", script, seconds, lives, restarts=1)
        waits[script] = step.start([sys.executable, *words], script, **env)
    statuses = {script: each.wait() for script, each in waits.items()}
    texts = {script: (step.work / script).read_text(errors="replace") for script in waits}
    for script, text in texts.items():
        print(f"---- {script}\n{text}")
    lived = {script: "lived" in text for script, text in texts.items()}
    first = f"rank 0 of {step.size} on"
    begun = {script: text.count(first) for script, text in texts.items()}
    step.note(statuses=statuses, begun=begun, lived=lived)
    as_told = lived["mnist_ddp_resumable"] and not lived.get("mnist_ddp", False)
    step.note(ok=as_told and {*begun.values()} == {2})
    told = ", ".join(f"{script} {'goes on' if lived[script] else 'ends'}" for script in lived)
    step.note(found=f"restarted after a time-out: {told}")


def killed(step: Step) -> None:
    """Kill one rank, and see when the others notice."""
    patience = 60 if step.cpu else 20  # gloo notices by itself
    flags = ["--data", step.small(), "--batch-size", 16, "--num-workers", 0, "--run-dir", "run"]
    words = [20, step.size - 1, *flags, "--timeout", patience]
    ranks = step.probe("killed", *words, ranks=step.size, grace=5 * patience)
    late = ranks[0][1] - ranks[-1][1]
    step.note(statuses=[each[0] for each in ranks], late=late)
    step.note(ok=ranks[0][0] not in (0, -9) and (step.cpu or late > 0.8 * patience))
    step.note(found=f"rank 0 ended {late:.1f} s after the killed one, its timeout {patience} s")


def full(step: Step) -> None:
    """Fill the memory of rank 0, then of the last rank, under torchrun."""
    said, seen = ("can't allocate memory" if step.cpu else "out of memory"), {}
    flags = ["--data", step.small(), "--epochs", 1, "--num-workers", 0]
    for rank in (1,) if step.cpu else sorted({0, step.size - 1}):
        program = step.torchrun(PROGRAM, "--probe", "full", rank, *flags)
        [(status, took, text)] = step.run(*program)
        lines = [line for line in text.splitlines() if "memory" in line]
        named = any(said in line and f"[rank{rank}]" in line for line in lines)
        seen[f"rank {rank}"] = {"status": status, "seconds": took, "lines": lines, "named": named}
        step.note(**seen)
    ok = all(each["status"] and each["named"] for each in seen.values())
    slowest = max(each["seconds"] for each in seen.values())
    told = "named" if ok else "not named on its rank"
    step.note(ok=ok, found=f"{told}; all ranks ended within {slowest:.0f} s")


def facts(step: Step) -> None:
    """Name the machine: what its driver, NVML, CUDA and torch say."""
    queries = "name,driver_version,compute_cap,compute_mode,mig.mode.current,memory.total"
    commands = {
        "smi": ["nvidia-smi", f"--query-gpu={queries}", "--format=csv,noheader"],
        "topology": ["nvidia-smi", "topo", "-m"],
        "revision": ["git", "-C", str(HERE), "rev-parse", "HEAD"],
        "changed": ["git", "-C", str(HERE), "status", "--short", "--untracked-files=no"],
    }
    modes: list[str] = []
    for name, command in commands.items():
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            step.note(**{name: done.stdout.splitlines()})
            modes += done.stdout.splitlines() if name == "smi" else []
    import torch

    step.note(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda)
    step.note(cpus=cpus_of_rank(), cpu=torch.cpu.get_capabilities().get("cpu_name"))
    step.note(open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    step.note(digits=raw_file(step.data, "").with_name("MD5SUMS").exists())
    with suppress(OSError):
        step.note(shm=shutil.disk_usage("/dev/shm").total)
    names, usable, nccl, why, bf16 = [], [], (), "torch sees none", False
    counted = torch.cuda.device_count()  # by NVML: also those that CUDA cannot use
    if counted:
        nccl = torch.cuda.nccl.version()
        step.note(architectures=torch.cuda.get_arch_list(), cudnn=torch.backends.cudnn.version())
    for index in range(counted):
        try:
            torch.zeros(1, device=f"cuda:{index}").add_(1)
            names.append(torch.cuda.get_device_name(index))
            usable.append(index)
            bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
    gpus = len(names)
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(counted)))
    visible = ",".join(given.split(",")[index] for index in usable)
    is_exclusive = any("Exclusive" in line for line in modes)
    alone = 2 if nccl >= (2, 30) and not is_exclusive else 1  # as many ranks may share one GPU
    most = max((ranks for ranks in (1, 2, 4, 8) if ranks <= gpus), default=0)
    ranks = 2 if step.cpu else alone if gpus == 1 else most
    step.note(counted=counted, gpus=gpus, names=names, visible=visible, why=why, nccl=nccl)
    step.note(bf16=bf16, ranks=ranks, simulated=SIMULATED and bool(gpus))
    where = f"{gpus} x {names[0]}" if gpus else f"{cpus_of_rank()} CPUs"
    step.note(ok=bool(gpus or step.cpu), found=f"{where}, torch {torch.__version__}")


def scripts(step: Step) -> None:
    """Run each script on one device, with every warning an error."""
    small, spirals = step.small(), COURSE / "notebooks" / "spirals_ddp.py"
    short = ["--data", small, "--epochs", 1, "--num-workers", 0]
    commands: dict[str, list] = {
        "doctor": [HERE / "doctor.py", "--data", step.data],
        "simple_ddp": [HERE / "simple_ddp.py"],
        "mnist_ddp": [HERE / "mnist_ddp.py", *short],
        "mnist_ddp_resumable": [HERE / "mnist_ddp_resumable.py", *short, "--run-dir", "resumable"],
        "mnist_fast": [HERE / "mnist_fast.py", *short[:4]],
        "spirals_ddp": [spirals, "--epochs", 1],
    }
    statuses: dict[str, int] = {}
    warnings: dict[str, int] = {}  # also those that come while Python ends, which can fail nothing
    for name, command in commands.items():
        if Path(command[0]).exists():
            [(statuses[name], _, text)] = step.run("-W", "error", *command)
            warnings[name] = text.count("Warning")
            step.note(statuses=statuses, warnings=warnings)
    bad = [name for name in statuses if statuses[name] or warnings[name]]
    count = f"{len(statuses)} scripts, no warning"
    said = f"these failed or warned: {', '.join(bad)}" if bad else count
    step.note(ok=not bad, found=said)


def equal(step: Step) -> None:
    """Compare one process with one rank and with several, and with another global batch."""
    folder = COURSE / "notebooks"
    if not folder.exists():
        step.note(found="left out: spirals.py is not here")
        return
    runs = {"process": 0, "one rank": 1, "ranks": step.size, "control": step.size}
    for name, ranks in runs.items():
        script = folder / ("spirals_ddp.py" if ranks else "spirals.py")
        batch = 48 * max(2, step.size) if name == "control" else 48
        save = ["--save", step.work / f"{name}.pt", "--batch-size", batch]
        step.run(script, "--epochs", 3, *save, ranks=ranks)
    base = step.work / "process.pt"
    off = {name: difference(base, step.work / f"{name}.pt") for name in list(runs)[1:]}
    ok = max(off["one rank"], off["ranks"]) < 1e-4 < off["control"]
    step.note(off=off, ok=ok)
    numbers = f"{off['one rank']:.0e}, {step.size} ranks {off['ranks']:.0e}"
    step.note(found=f"weights: one rank off by {numbers}, the control {off['control']:.0e}")


def graph(step: Step) -> None:
    """Compare mnist_fast's replayed steps with the same steps, taken one by one."""
    off = found(step.probe("graph", step.small(), step.work, 2 if step.cpu else 12))
    near = max(10 * off["again"], off["control"] / 100)
    step.note(off=off, ok=None if step.cpu else off["graph"] <= near < off["control"])
    numbers = f"{off['graph']:.0e}, the same run again {off['again']:.0e}"
    step.note(found=f"weights: off by {numbers}, the control {off['control']:.0e}")


def speed(step: Step) -> None:
    """Measure the seconds of an epoch, and the accuracy, of the plain and of the fast script."""
    data, epochs = (step.small(), 2) if step.cpu else (step.data, 5)
    rows: dict[str, dict] = {}

    def measure(name: str, script: str, *flags: object, epochs: int = epochs) -> None:
        folder = step.work / name.replace(" ", "-")
        common = ["--data", data, "--epochs", epochs, "--run-dir", folder]
        with gpu_share() as share:
            [(status, _, _)] = step.run(HERE / f"{script}.py", *common, *flags)
        lines = metrics(folder) if status == 0 else []
        keys = ("seconds", "test_seconds", "images_per_second", "test_accuracy")
        rows[name] = {key: [line[key] for line in lines] for key in keys} | {"status": status}
        rows[name]["gpu_share"] = share[1:-1]
        step.note(rows=rows)

    bf16 = ["--bf16"] if step.args.bf16 else []
    for name, workers in {"no": 0, "with": min(8, cpus_of_rank() - 1)}.items():
        measure(f"plain, {name} workers", "mnist_ddp", "--num-workers", workers, epochs=2)
    for batch, seed in ((64, 1), (256, 1), (1024, 1), (64, 2), (64, 3))[: 1 if step.cpu else 5]:
        flags = ["--batch-size", batch, "--lr", (batch / 64) ** 0.5, "--seed", seed, *bf16]
        measure(f"fast, batch {batch}, seed {seed}", "mnist_fast", *flags)
    if step.args.example:
        (step.work / "data").symlink_to(step.data)
        (step.work / "example").mkdir()
        command = [sys.executable, Path(step.args.example).resolve(), "--epochs", "1"]
        begin = time.monotonic()
        subprocess.run(command, cwd=step.work / "example", env=step.env, check=True)
        step.note(example_seconds=time.monotonic() - begin)
    rates = {name: max(row["images_per_second"], default=0) for name, row in rows.items()}
    best = " and ".join(f"{rates[name]:,.0f}" for name in list(rates)[1:3])
    step.note(ok=None if all(rates.values()) else False)
    step.note(found=f"images/s, plain with workers and fast: {best}")


@contextmanager
def gpu_share() -> Iterator[list[int]]:
    """Note twice a second in what per cent of the time a kernel runs on the first GPU."""
    share: list[int] = []
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    form, pipe = "--format=csv,noheader,nounits", subprocess.PIPE
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", form, f"--id={first}", "-lms", "500"]
    try:
        asked = subprocess.Popen(query, stdout=pipe, stderr=pipe, text=True)
    except OSError:
        yield share
        return
    try:
        yield share
    finally:
        asked.kill()
        share += [int(word) for word in asked.communicate()[0].split() if word.isdecimal()]


def scaling(step: Step) -> None:
    """Measure the images per second of 1, 2, … ranks."""
    if not step.cpu and step.args.gpus == 1:
        step.note(found="left out: there is one GPU")
        return
    data, rates = step.small() if step.cpu else step.data, {}
    sizes = [1 << power for power in range(step.size.bit_length())]
    for batch, ranks in itertools.product((1024,) if step.cpu else (1024, 64), sizes):
        name = f"{ranks} ranks, batch {batch}"
        workers = 0 if step.cpu else min(8, cpus_of_rank() // ranks)
        flags = ["--data", data, "--epochs", 1, "--batch-size", batch, "--run-dir", name]
        flags += ["--num-workers", workers]
        step.run(HERE / "mnist_ddp.py", *flags, ranks=ranks)
        rates[name] = metrics(step.work / name)[-1]["images_per_second"]
        step.note(images_per_second=rates)
    gain = rates[f"{step.size} ranks, batch 1024"] / rates["1 ranks, batch 1024"]
    step.note(found=f"{step.size} ranks are {gain:.2f} times as fast as one, batch 1024")


def memory(step: Step) -> None:
    """Measure what CUDA and NCCL take beside the tensors."""
    seen = found(step.probe("memory", step.data, ranks=step.size))
    step.note(**seen, ok=None if step.cpu else seen["beside"] <= 1e9)
    step.note(found=f"beside the tensors {seen['beside'] / 1e9:.2f} GB after two steps")


def overlap(step: Step) -> None:
    """Tell whether all-reduces run beside backward, with both of torch's classes for NCCL."""
    names = {"0": "gloo"} if step.cpu else {"0": "older class", "1": "newer class"}
    seen: dict[str, dict] = {}
    for value, name in names.items():
        env = {"TORCH_DIST_USE_NCCL2": value}
        seen[name] = found(step.probe("overlap", int(step.cpu), ranks=step.size, **env))
        step.note(classes=seen)
    shares = {}
    for name, each in seen.items():
        computed = sum(end - begin for begin, end in each["lanes"]["compute"])
        shares[name] = each["hidden"] / min(each["sent"], computed)  # of what can be hidden
    step.note(shares=shares)
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if len({each["class_name"] for each in seen.values()}) < len(seen):
        step.note(found=f"this torch has one class: {told}")
        return
    step.note(found=f"hidden, of what can be: {told}")
    if not step.cpu:
        older, newer = shares["older class"], shares["newer class"]
        step.note(ok=older > 0.1 and newer < 0.25 * older)


# Each step with its limit in seconds, of 600. What can be spared comes last.
STEPS: dict[str, tuple[Callable[[Step], None], float]] = {
    "facts": (facts, 40),
    "scripts": (scripts, 90),
    "equal": (equal, 60),
    "graph": (graph, 40),
    "speed": (speed, 120),
    "resume": (resume, 150),
    "memory": (memory, 40),
    "overlap": (overlap, 60),
    "timeout": (timeout, 60),
    "restart": (restart, 100),
    "killed": (killed, 60),
    "full": (full, 60),
    "scaling": (scaling, 200),
}

NEED_TWO_RANKS = ("overlap", "timeout", "restart", "killed")
SAY_MORE_OF_TWO = ("equal", "resume", "memory", "full")  # what a page claims is of several
NO_TIME = "no time left"

# By these a rank would take itself for one of the launcher that started this program.
KNOWN_BY = {name for names in LAUNCHERS.values() for name in names}
FAMILIES = re.compile(r"(SLURM|PMIX?|PMI2|OMPI|PALS|TORCHELASTIC|MASTER)_|LOCAL_WORLD_SIZE$")


def take_step(name: str, args: Namespace, work: Path, end: float) -> dict[str, Any]:
    """Run a step within its share of the time, and return its line of the record."""
    share, left = STEPS[name][1] * args.seconds / 600, end - time.monotonic()
    limit = min(share, left)
    line = {"step": name, "ok": None, "ended": NO_TIME, "limit_s": round(limit, 1)}
    line |= {"seconds": 0.0, "found": "", "seen": {}, "commands": [], "said": []}
    if name in NEED_TWO_RANKS and args.ranks == 1:
        return line | {"ended": "left out: one GPU, which two ranks can share from NCCL 2.30 on"}
    if limit < 1:
        return line
    mark = f"{os.getpid()}-{name}"
    command = [sys.executable, PROGRAM, "--step", name, json.dumps(vars(args), default=str), work]
    env = environment(args) | {"GPU_FIRST_RUN": mark}
    print(f"{name:<9}", end=" ", flush=True)
    begin = time.monotonic()
    with (work / "said").open("wb") as said, suppress(OSError):
        step = subprocess.Popen(command, stdout=said, stderr=said, env=env, start_new_session=True)
        try:
            status = step.wait(limit)
            line["ended"] = "by itself" if status == 0 else f"died: status {status}"
        except subprocess.TimeoutExpired:
            # It may have hung, or been slow.
            line["ended"] = f"ended at its limit of {limit:.0f} s" if limit == share else NO_TIME
        except KeyboardInterrupt:
            line["ended"] = "interrupted"
        end_all(step, mark)
    line["seconds"] = round(time.monotonic() - begin, 1)
    text = (work / "said").read_text(errors="replace") if (work / "said").exists() else ""
    line["said"] = as_elsewhere(text[-50_000:], args, work).splitlines()
    for note in read_notes(work / "notes", args, work):
        line["commands"] += [note.pop("command")] if "command" in note else []
        line |= {key: note.pop(key) for key in ("ok", "found") if key in note}
        line["seen"] |= note
    if line["ended"] != "by itself":
        line["ok"] = None if line["ended"] == NO_TIME else False
    elif line["ok"] and args.ranks == 1 and name in SAY_MORE_OF_TWO:
        line |= {"ok": None, "found": f"{line['found']}; on one rank only"}
    print(f"{line['seconds']:5.1f} s  {verdict(line)}", flush=True)
    return line


def environment(args: Namespace) -> dict[str, str]:
    """Make the environment of a step: of no launcher, with the GPUs that it shall use by name."""
    inherited = {word for word in os.environ if word in KNOWN_BY or FAMILIES.match(word)}
    env = {word: text for word, text in os.environ.items() if word not in inherited}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if args.cpu or args.visible:  # named, so that a script without its GPU stops
        env["CUDA_VISIBLE_DEVICES"] = "" if args.cpu else args.visible
    return env


def end_all(step: subprocess.Popen, mark: str) -> None:
    """End a step and all that it has started, also what has left its session, as torchrun's do."""
    with suppress(ProcessLookupError):
        os.killpg(step.pid, signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):  # on Linux
        with suppress(OSError):
            if f"GPU_FIRST_RUN={mark}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        step.wait(10)  # one that a broken disk or driver holds is left behind


def as_elsewhere(text: str, args: Namespace, work: Path) -> str:
    """Take this machine's name and its paths out of a text."""
    known = {COURSE: "course", HERE: "scripts", args.data: "DATA", work: "WORK"}
    known |= {Path(sys.executable): "python", Path(sys.prefix): "PYTHON", Path.home(): "~"}
    for place in sorted(known, key=lambda place: len(str(place)), reverse=True):
        text = text.replace(str(place), known[place])
    name = os.uname().nodename
    for host in (name, name.partition(".")[0]):
        text = re.sub(rf"\b{re.escape(host)}\b", "HOST", text)
    return text


def read_notes(path: Path, args: Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Read what a step has noted; a last line may be cut off."""
    if path.exists():
        for text in as_elsewhere(path.read_text(), args, work).splitlines():
            with suppress(ValueError):
                yield json.loads(text)


def verdict(line: dict[str, Any]) -> str:
    """Say in a line what a step has shown."""
    word = {True: "ok", False: "NOT OK", None: "seen"}[line["ok"]]
    told = line["found"] or ": ".join(filter(None, [line["ended"], *line["said"][-1:]]))
    return f"{word:<6}  {told}"


def join(seconds: float, script: str = "mnist_ddp") -> tuple:
    """Form the group as a script does; returns rank, world size and device."""
    module = importlib.import_module(script)
    _, rank, local_rank, size = module.who_am_i()
    device = module.pick_device(local_rank)
    module.join(rank, size, device, seconds)
    return rank, size, device


def probe_graph(data: str, work: str, epochs: str) -> None:
    """Train FastNet without dropout by a graph, without, again, and with one learning rate."""
    import mnist_fast
    import torch

    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    device = mnist_fast.pick_device(0)
    sets = mnist_fast.datasets(Path(data))
    mnist_fast.Dropout = lambda p: torch.nn.Identity()
    flags = {"epochs": int(epochs), "lr": 1.0, "seed": 1, "bf16": False, "dry_run": False}
    flags |= {"batch_size": 60, "save_model": True}  # of 512 images the last batch has 32
    as_graph, off = mnist_fast.as_graph, {}
    for name in ("eager", "again", "graph", "control"):
        folder = Path(work, name)
        folder.mkdir()
        mnist_fast.as_graph = as_graph if name == "graph" else lambda take_step, *_: take_step
        gamma = 1.0 if name == "control" else 0.7
        mnist_fast.train(Namespace(**flags, gamma=gamma, run_dir=folder), device, *sets)
        off[name] = difference(Path(work, "eager", "mnist_cnn.pt"), folder / "mnist_cnn.pt")
    tell(**off)


def probe_killed(at: str, who: str, *flags: str) -> None:
    """Train the resumable script, and kill this rank, or each, after so many steps."""
    import mnist_ddp_resumable as script

    reseed = script.reseed

    def die(args: Namespace, step: int) -> None:
        reseed(args, step)
        if step == int(at) and who in ("all", os.environ.get("RANK", "0")):
            os.kill(os.getpid(), signal.SIGKILL)

    script.reseed = die
    sys.argv = [script.__file__, *flags]
    script.main()


def probe_forget(*flags: str) -> None:
    """Resume without the optimizer's state: the control."""
    import mnist_ddp_resumable as script

    restore = script.restore

    def forget(args: Namespace, parts: dict, newest: dict) -> dict:
        return restore(args, {name: parts[name] for name in parts if name != "optimizer"}, newest)

    script.restore = forget
    sys.argv = [script.__file__, *flags]
    script.main()


def probe_memory(data: str) -> None:
    """Measure the memory in use on this device: with a context, with a group, after two steps."""
    import mnist_ddp
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def used() -> int:
        if device.type == "cpu":
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    _, _, local_rank, size = mnist_ddp.who_am_i()
    device = mnist_ddp.pick_device(local_rank)
    taken = {"context": used()}
    mnist_ddp.join(int(os.environ["RANK"]), size, device, 60)
    dist.all_reduce(torch.ones(1, device=device))
    taken["group"] = used()
    model = DDP(mnist_ddp.Net().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.rand(64, 1, 28, 28, device=device)).sum().backward()
        optimizer.step()
    taken["steps"] = used()
    dist.barrier()
    held = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    ranks_here = size if device.type == "cuda" and torch.cuda.device_count() == 1 else 1
    tell(taken=taken, held=held, beside=taken["steps"] / ranks_here - held)
    dist.destroy_process_group()


def probe_overlap(small: str) -> None:
    """Time and record steps of six wide layers: alone, averaged after backward, and with DDP."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    rank, _, device = join(60)
    width = 512 if int(small) else 4096
    layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    batch = torch.randn(width // 4, width, device=device)

    def take_step(kind: str) -> None:
        ways = wrapped if kind == "ddp" else model
        for weight in model.parameters():
            weight.grad = None
        ways(batch).square().mean().backward()
        for weight in model.parameters() if kind == "after" else ():
            dist.all_reduce(weight.grad)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    milliseconds = {}
    for kind in ("alone", "after", "ddp"):
        for turn in range(25):
            if turn == 5:
                dist.barrier()
                wait()
                begin = time.perf_counter()
            take_step(kind)
        wait()
        milliseconds[kind] = 1000 * (time.perf_counter() - begin) / 20
    with torch.profiler.profile() as profile:
        take_step("ddp")
        wait()
    group = dist.distributed_c10d._get_default_group()._get_backend(device)
    lanes = {}
    if rank == 0:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
            lanes = read_lanes(events, on_gpu=device.type == "cuda")
        tell(milliseconds=milliseconds, class_name=type(group).__name__, **lanes)
    dist.barrier()
    dist.destroy_process_group()


def read_lanes(events: list[dict[str, Any]], on_gpu: bool) -> dict[str, Any]:
    """Find in a trace when this rank computed and when it sent, and for how many ms did both."""
    lanes: dict[str, list] = {"compute": [], "all-reduce": []}
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == ("kernel" if on_gpu else "user_annotation") and re.match("nccl|gloo:", name):
            lane = "all-reduce"
        elif kind == ("kernel" if on_gpu else "cpu_op") and not name.startswith("c10d::"):
            lane = "compute"
        else:
            continue
        lanes[lane].append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000))
    start = min(span[0] for spans in lanes.values() for span in spans)
    merged: dict[str, list] = {}
    for lane, spans in lanes.items():
        merged[lane] = []
        for begin, end in sorted((begin - start, end - start) for begin, end in spans):
            if merged[lane] and begin <= merged[lane][-1][1] + 0.001:
                merged[lane][-1][1] = max(merged[lane][-1][1], round(end, 3))
            else:
                merged[lane].append([round(begin, 3), round(end, 3)])
    pairs = itertools.product(merged["compute"], merged["all-reduce"])
    hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
    sent = sum(end - begin for begin, end in merged["all-reduce"])
    return {"lanes": merged, "hidden": hidden, "sent": sent}


def probe_late(seconds: str, script: str = "mnist_ddp") -> None:
    """Have the last rank come too late to an all-reduce, in a group with this timeout."""
    import torch
    import torch.distributed as dist

    rank, size, device = join(60, script)
    group = dist.new_group(timeout=timedelta(seconds=float(seconds)))
    total = torch.ones(1000, device=device)
    dist.all_reduce(total, group=group)
    if rank == size - 1:
        time.sleep(20 * float(seconds))
    tell(waits_since=time.time())
    dist.all_reduce(total, group=group)
    print(total.sum().item())


def probe_again(script: str, seconds: str, lives: str) -> None:
    """Run into a time-out at the first attempt, and live for so many seconds at the second."""
    import torch.distributed as dist

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        probe_late(seconds, script)
        # NCCL: under torchrun the watchdog aborts the all-reduce, and the rank goes on until it
        # has ended the process.
        time.sleep(600)
    rank, _, _ = join(60, script)
    time.sleep(float(lives))
    dist.barrier()
    print(f"rank {rank} lived")
    dist.destroy_process_group()


def probe_full(who: str, *flags: str) -> None:
    """Train mnist_ddp, and ask on one rank for more memory than there is."""
    import mnist_ddp
    import torch

    loss_and_metrics = mnist_ddp.loss_and_metrics

    def greedy(model: Any, batch: list, device: Any) -> tuple:
        if os.environ["RANK"] == who:
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return loss_and_metrics(model, batch, device)

    mnist_ddp.loss_and_metrics = greedy
    sys.argv = [mnist_ddp.__file__, *flags]
    mnist_ddp.main()


PROBES = {
    "graph": probe_graph,
    "killed": probe_killed,
    "forget": probe_forget,
    "memory": probe_memory,
    "overlap": probe_overlap,
    "late": probe_late,
    "again": probe_again,
    "full": probe_full,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        PROBES[sys.argv[2]](*sys.argv[3:])
    elif sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]][0](Step(Namespace(**json.loads(sys.argv[3])), Path(sys.argv[4])))
    else:
        sys.exit(main())
