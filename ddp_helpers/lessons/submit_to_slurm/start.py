"""What notebook 07 needs before its first job: scripts and data to bring, a folder, a site's flags.

The notebook's set-up calls it, once; no rank does.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from ddp_helpers import ROOT, RUNS
from ddp_helpers.jobs import Site
from ddp_helpers.launch import scripts
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.records import runs


class Folders(NamedTuple):
    """Where things lie."""

    laptop: Path  # stands for a folder on the learner's laptop: two scripts of the course
    data: Path
    on_cluster: Path  # a new one, for the first job


class Flags(NamedTuple):
    """What cells give to Slurm's commands, and to scripts, on a site."""

    one_gpu: str
    two_gpus: str
    gpus: str  # as many as the job has on a node
    script_args: str  # where GPUs are pretended: --no-cuda


def folders(small_train: int) -> Folders:
    """Write the scripts and the small data, and make the first job's folder.

    small_train: training images of the small data.
    """
    laptop = ROOT / "build" / "first_job"
    shutil.rmtree(laptop, ignore_errors=True)  # what an earlier course left there would be copied
    for name in ("simple_ddp", "mnist_ddp"):
        scripts.write_script(name, laptop / f"{name}.py")
    data = write_digits(ROOT / "build" / f"small_{small_train}", train=small_train, test=256)
    on_cluster = runs.new_run_folder(RUNS, "07_first")
    on_cluster.mkdir(parents=True, exist_ok=True)
    return Folders(laptop, data, on_cluster)


def flags_of(name: str, gpus_per_node: int) -> Flags:
    """Return the flags of a site, and let salloc, sbatch and srun know its partition and account.

    name: of a file in slurm/sites, or its path.
    """
    site = Site.load(name)
    for flag in site.admission:
        key, _, value = flag.removeprefix("--").partition("=")
        for command in ("SALLOC", "SBATCH", "SLURM"):
            os.environ[f"{command}_{key.upper()}"] = value
    one, two, some = (site.gpus.replace("{n}", str(count)) for count in (1, 2, gpus_per_node))
    return Flags(one, two, some, " ".join(site.script_args))
