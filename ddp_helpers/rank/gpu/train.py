"""The steps of the first GPU run that train and measure; each runs in a process of its own."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_helpers.rank.gpu.step import (
    COURSE,
    HERE,
    SIMULATED,
    Step,
    difference,
    found,
    metrics,
    raw_file,
)
from ddp_helpers.rank.launchers import cpus_of_rank


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
