"""The steps of the first GPU run that do harm: kill, wait in vain, fill the memory."""

import shutil
import signal
import sys
import time
from pathlib import Path

from ddp_helpers.rank.gpu.step import HERE, PROGRAM, Step, difference, found


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
