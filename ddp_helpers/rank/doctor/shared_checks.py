"""Judge what the ranks share: network, clocks, folder, data and space. A row for each check."""

from ddp_helpers.rank.doctor.facts import ASYNC, ENOUGH, SHARED, Facts, Fault, Row, judge


def check_network(everyone: list[Facts]) -> Row:
    """Ranks on several hosts talk through an interface that leaves the host."""

    def fault(one: Facts) -> Fault:
        name = f"{one.backend.upper()}_SOCKET_IFNAME"
        if one.interface_error:
            return one.interface_error, f"export {name}= the interface between the nodes: ip -brief address"
        if one.loopback and several:
            cure = f"export MASTER_ADDR= the first node's name, and {name}= the interface between the nodes"
            return f"{one.interface} does not leave {one.host}", cure
        return None

    several = len({one.host for one in everyone}) > 1
    return judge("network", everyone, fault, ", ".join(dict.fromkeys(one.interface for one in everyone)))


def check_reduce(everyone: list[Facts]) -> Row:
    """An all-reduce gives the right sum on every rank; how fast it was."""
    slow, size = max(one.latency for one in everyone), everyone[0].world_size
    fine = f"right sums over {everyone[0].backend}; {slow * 1e6:.0f} µs for 4 bytes"
    if size > 1:
        speed = min(one.bandwidth for one in everyone)
        fine += f"; {speed / 1e9:.2f} GB/s for 16 MB (busbw: bytes / seconds * 2(W-1)/W, W={size})"
    cure = "one rank sends something else: the same code and environment on all nodes; try --no-cuda, NCCL_DEBUG=INFO"
    return judge("all-reduce", everyone, lambda one: (one.reduce_error, cure) if one.reduce_error else None, fine)


def check_clocks(everyone: list[Facts]) -> Row:
    """The hosts' clocks agree."""

    def fault(one: Facts) -> Fault:
        if abs(one.skew) <= ASYNC:
            return None
        way = "ahead of" if one.skew > 0 else "behind"
        return f"{abs(one.skew):.1f} s {way} rank 0", f"have the clock of {one.host} set (chronyc makestep, as root)"

    worst = max(abs(one.skew) for one in everyone)
    return judge("clocks", everyone, fault, f"at most {worst * 1e3:.3f} ms from rank 0's")


def check_folder(everyone: list[Facts]) -> Row:
    """What rank 0 writes into the run folder, all ranks read."""
    folder = everyone[0].folder
    cure = f"--run-dir on a file system that all nodes share, and that you may write to, not {folder}"
    fine = f"all ranks read what rank 0 wrote into {folder}"
    return judge("run folder", everyone, lambda one: (one.folder_error, cure) if one.folder_error else None, fine)


def check_dataset(everyone: list[Facts]) -> Row:
    """All ranks have the same data, and it is whole."""

    def fault(one: Facts) -> Fault:
        if one.data_error:
            return "no whole data", one.data_error
        if one.data != whole[0]:
            return f"{one.data}, where others have {whole[0]}", "one --data for all ranks, on a shared file system"
        return None

    whole = [one.data for one in everyone if one.data] or [""]
    return judge("data", everyone, fault, f"{whole[0]}, whole on each rank")


def check_space(everyone: list[Facts]) -> Row:
    """There is room for records and checkpoints."""

    def fault(one: Facts) -> Fault:
        if one.free >= ENOUGH:
            return None
        return f"{one.free / 1e9:.2f} GB free for {one.folder}", "make room for 1 GB, or another --run-dir"

    return judge("space", everyone, fault, f"{min(one.free for one in everyone) / 1e9:.0f} GB free for the run folder")


def check_shm(everyone: list[Facts]) -> Row:
    """There is room for the batches that DataLoader workers hand over."""

    def fault(one: Facts) -> Fault:
        if not one.workers or one.shm >= SHARED:
            return None
        return f"{one.shm / 2**20:.0f} MB for {one.workers} workers", "docker run --shm-size=1g, or --num-workers 0"

    least = min(one.shm for one in everyone)
    return judge("/dev/shm", everyone, fault, f"{least / 2**20:,.0f} MB free for the workers' batches")
