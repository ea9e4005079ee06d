"""Judge what the ranks are: complete, of one version, each with a device and CPUs. A row for each check."""

from ddp_helpers.rank.doctor.facts import Facts, Fault, Row, judge


def check_ranks(everyone: list[Facts]) -> Row:
    """Ranks 0 .. world_size - 1, each once, from one launcher, and local ranks unique on a node."""

    def fault(one: Facts) -> Fault:
        if one.tasks > 1:
            return f"alone, but the job has SLURM_NTASKS={one.tasks}", "start it with srun, torchrun or mpirun"
        same = [o.rank for o in everyone if (o.host, o.node, o.local_rank) == (one.host, one.node, one.local_rank)]
        if len(same) > 1:
            return f"local rank {one.local_rank} on {one.host} twice", "let one launcher number all ranks: export none"
        if (one.launcher, one.world_size) != (first.launcher, first.world_size):
            return f"{one.launcher} says {one.world_size} ranks", "start all ranks with one launcher"
        return None

    first, hosts = everyone[0], {one.host for one in everyone}
    if sorted(one.rank for one in everyone) != list(range(first.world_size)):
        numbers = ", ".join(str(one.rank) for one in everyone)
        return Row("ranks", False, f"of {first.world_size} there are {numbers}", "let one launcher number all ranks")
    by = "no launcher" if first.launcher == "single" else first.launcher
    plural = "s" if len(everyone) > 1 else ""
    fine = f"{len(everyone)} rank{plural} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}, started by {by}"
    return judge("ranks", everyone, fault, fine)


def check_devices(everyone: list[Facts]) -> Row:
    """Every rank has a GPU of its own, or none has one."""

    def fault(one: Facts) -> Fault:
        if one.device_error:
            return "no device", one.device_error
        if not one.gpu and any(o.gpu for o in everyone):
            return "no GPU, where others have one", "ask for as many GPUs as tasks on each node, or --no-cuda"
        if one.gpu and sum((o.host, o.gpu) == (one.host, one.gpu) for o in everyone) > 1:
            return f"GPU {one.gpu} on {one.host} is shared", "as many GPUs as tasks on each node: one rank for each GPU"
        return None

    names = ", ".join(sorted({one.device for one in everyone}))
    return judge("devices", everyone, fault, f"a GPU for each rank: {names}" if "cuda" in names else "CPU on each rank")


def check_versions(everyone: list[Facts]) -> Row:
    """Python, torch, torchvision, CUDA and NCCL are the same on all ranks."""

    def fault(one: Facts) -> Fault:
        other = [f"{name} {version}" for name, version in one.versions.items() if first.get(name) != version]
        return (f"{', '.join(other)}", f"use one environment on all nodes; rank 0 has {fine}") if other else None

    first = everyone[0].versions
    fine = ", ".join(f"{name} {version}" for name, version in first.items())
    return judge("versions", everyone, fault, fine)


def check_cpus(everyone: list[Facts]) -> Row:
    """Each rank has the CPUs that its task asked for, one for itself and each worker, and one for each thread."""

    def fault(one: Facts) -> Fault:
        own = own_cpus(one, everyone)
        if len(one.cpus) < one.asked:
            cure = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            small = f"ask for at most --cpus-per-task={one.machine}: the machine has no more"
            cure = cure if one.machine >= one.asked else small
            return f"{cpus(len(one.cpus))}, but --cpus-per-task={one.asked}", cure
        if own < one.workers + 1:
            more = f"--num-workers {own - 1}, or" if own else "fewer ranks on a node, or"
            return f"{cpus(own)} of its own for itself and --num-workers {one.workers}", f"{more} more --cpus-per-task"
        if own < one.threads:
            return f"{cpus(own)} of its own for OMP_NUM_THREADS={one.threads}", f"export OMP_NUM_THREADS={own}"
        return None

    least = min(own_cpus(one, everyone) for one in everyone)
    return judge("cpus", everyone, fault, f"each rank has {cpus(least)} or more of its own")


def own_cpus(one: Facts, everyone: list[Facts]) -> int:
    """CPUs that a rank has to itself: under Slurm those of its task, elsewhere its share of those that it may use."""
    if one.launcher == "slurm":
        return min(len(one.cpus), one.asked)
    near = [other for other in everyone if (other.host, other.node) == (one.host, one.node)]
    return len(one.cpus) // max(1, sum(not set(one.cpus).isdisjoint(other.cpus) for other in near))


def cpus(number: int) -> str:
    """A number of CPUs in words."""
    return f"{number} CPU{'' if number == 1 else 's'}"
