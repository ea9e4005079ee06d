"""Who am I? Rank, local rank, world size, node and meeting point, as the launcher tells them."""

import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from ddp_helpers.rank.group import own_keys
from ddp_helpers.rank.launchers import stop, who_am_i

# For each launcher its names for the number of ranks on this node, and for the node. Slurm's lists this node's ranks.
ON_NODE = {
    "torchrun": ("LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    "mpich": ("MPI_LOCALNRANKS", ""),
    "pals": ("PMI_LOCAL_SIZE", "PALS_NODEID"),
    "slurm": ("SLURM_GTIDS", "SLURM_NODEID"),
    "env": ("LOCAL_WORLD_SIZE", "GROUP_RANK"),
}


def whole(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable that holds a whole number, 0 or more. Stops where it holds something else."""
    value = env.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 19):  # more digits do not fit torch's integers
        stop(f"{name} is {value!r}, not a whole number: start with torchrun, srun or mpirun, and let them set it")
    return int(value)


@dataclass(frozen=True)
class Topology:
    """This process among its peers; every rank makes its own with `Topology.from_env()`."""

    rank: int = 0  # among all processes: 0 .. world_size - 1
    local_rank: int = 0  # among the processes of this node: 0 .. local_world_size - 1
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    launcher: str = "single"
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Topology":
        """Read what the launcher says; every rank calls it. Stops where variables contradict each other."""
        launcher, rank, local_rank, size = who_am_i(env)
        if launcher == "single":
            return cls()
        local_size, node = ON_NODE[launcher]
        # SLURM_GTIDS lists this node's ranks, as in 4,5,6,7; nodes may hold different numbers of them.
        here = env.get(local_size, "").count(",") + 1 if launcher == "slurm" else whole(env, local_size, size)
        if local_rank >= here:
            stop(f"local rank {local_rank} of {here} on its node: start all with one launcher")
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if here == size else "")
        if not (address and address.isascii() and address.isprintable()):
            stop(f"MASTER_ADDR is {address!r}, and there are several nodes: export the name of the first before srun")
        # One port for all ranks of a job, another for the next job, below those that the system hands out.
        name = env.get("PMIX_NAMESPACE") or env.get("PBS_JOBID", "")
        job = whole(env, "SLURM_JOB_ID", zlib.crc32(name.encode(errors="replace")))
        port = whole(env, "MASTER_PORT", 10_000 + job % 20_000)
        if not 0 < port < 2**16:
            stop(f"MASTER_PORT is {port}: choose one from 1024 to 65535, or leave it out")
        return cls(rank, local_rank, size, here, whole(env, node, 0), launcher, address, port)

    def cpus(self) -> int:
        """CPUs that this rank has to itself: under Slurm those of its task, elsewhere its share of the node's."""
        node = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        slurm = self.launcher == "slurm"
        task = whole(os.environ, "SLURM_CPUS_PER_TASK", 1) if slurm else node // self.local_world_size
        return max(1, min(node, task))

    def device(self, cuda: bool = True) -> torch.device:
        """Claim this rank's device: cuda:local_rank where there are GPUs, else its CPUs. Every rank calls it."""
        gpus, asked = torch.cuda.device_count() if cuda else 0, os.environ.get("SLURM_GPUS_ON_NODE", "")
        if cuda and asked not in ("", "0") and not gpus:
            why = f"torch {torch.__version__} for CUDA {torch.version.cuda} sees none"
            stop(f"SLURM_GPUS_ON_NODE={asked} but {why}: does nvidia-smi show a driver for that CUDA? Or --no-cuda")
        if not gpus:
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(self.cpus())
            return torch.device("cpu")
        # Each task may be shown one GPU of its own (--gpus-per-task=1, or by a wrapper): then it is cuda:0 for all.
        hidden = asked != "1" if asked else "CUDA_VISIBLE_DEVICES" in os.environ
        own = gpus == 1 and hidden and self.launcher != "torchrun"
        if self.local_rank >= gpus and not own:
            stop(f"local rank {self.local_rank} finds {gpus} GPUs: start at most {gpus} ranks per node, or --no-cuda")
        torch.cuda.set_device(0 if own else self.local_rank)
        return torch.device("cuda", torch.cuda.current_device())

    def answers(self) -> bool:
        """Whether someone listens where rank 0 should be; a name that nobody knows is an OSError."""
        try:  # a firewall may be silent
            socket.create_connection((self.master_addr, self.master_port), timeout=1).close()
        except socket.gaierror:
            raise
        except OSError:
            return False
        return True

    def meet(self, seconds: float) -> dist.Store:
        """A store where all ranks have signed in; every rank calls it. Stops after `seconds`, the missing named."""
        if self.launcher == "single":
            return dist.HashStore()
        place = f"MASTER_ADDR={self.master_addr} MASTER_PORT={self.master_port}"
        hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        end, found = time.monotonic() + seconds + hosts, []  # rank 0 goes last: the others ask its store who is missing

        def connect() -> None:
            try:
                found.append(dist.TCPStore(self.master_addr, self.master_port, None, hosts, wait_for_workers=False))
            except dist.DistError as error:
                found.append(error)

        try:
            while not hosts and not self.answers():
                if time.monotonic() > end:
                    stop(f"{place}: rank 0 is not there after {seconds:g} s: is it running, and is this its address?")
                time.sleep(0.1)
            # A stranger that holds the port and never answers would keep TCPStore waiting for ever: in a thread it may.
            thread = Thread(target=connect, daemon=True)
            thread.start()
            thread.join(seconds)
            if not found:
                stop(f"{place}: held by a stranger")
            if isinstance(found[0], Exception):
                raise found[0]
            store = own_keys(found[0], self.launcher)
            store.set(f"rank {self.rank}", "here")
            store.add("present", 1)
            while store.add("present", 0) < self.world_size:
                if time.monotonic() > end:
                    absent = [str(r) for r in range(self.world_size) if not store.check([f"rank {r}"])]
                    stop(f"{place}: rank {', '.join(absent)} of {self.world_size} missing after {seconds:g} s")
                time.sleep(0.02 + self.world_size / 50_000)  # one store answers all ranks
            return store
        except (dist.DistError, OSError, UnicodeError) as error:
            why = str(error).partition("\n")[0]  # torch lists its C++ frames below
            stop(f"{place}: rank {self.rank} cannot {'listen: take another port' if hosts else 'get there'} ({why})")


@contextmanager
def process_group(me: Topology, device: torch.device, seconds: float) -> Iterator[dist.Store]:
    """Be in the group for the length of the block; every rank must enter. Waits for peers at most `seconds`."""
    cuda, store = device.type == "cuda", me.meet(seconds)
    ranks = {"rank": me.rank, "world_size": me.world_size, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("nccl" if cuda else "gloo", store=store, device_id=device if cuda else None, **ranks)
    try:
        yield store
        dist.barrier()  # nobody leaves while a peer still needs an answer
        time.sleep(0.1)  # gloo's threads must let go of the last tensors before Python ends, or the process aborts
    finally:
        dist.destroy_process_group()
