"""The set-up of notebook 07: scripts and data to bring, a folder, a site's flags.

The notebook's set-up calls it, once; no rank does.
"""

import os
import shutil
from pathlib import Path

from ddp_helpers import ROOT, RUNS
from ddp_helpers.data.digits import write_digits
from ddp_helpers.jobs.site import Site
from ddp_helpers.rank import scripts
from ddp_helpers.records import runs


def folders(small_train: int) -> tuple[Path, Path, Path]:
    """Write the scripts and the small data, and make the first job's folder.

    small_train: training images of the small data. Returns the folder that simulates the learner's
    laptop, with two scripts of the course; the folder of the data; and the job's folder.
    """
    laptop = ROOT / "build" / "first_job"
    shutil.rmtree(laptop, ignore_errors=True)  # otherwise old files would be copied as well
    for name in ("simple_ddp", "mnist_ddp"):
        scripts.write_script(name, laptop / f"{name}.py")
    data = write_digits(ROOT / "build" / f"small_{small_train}", train=small_train, test=256)
    on_cluster = runs.new_run_folder(RUNS, "07_first")
    on_cluster.mkdir(parents=True, exist_ok=True)
    return laptop, data, on_cluster


def flags_of(name: str, gpus_per_node: int) -> tuple[str, str, str, str]:
    """Set a site's partition and account for salloc, sbatch and srun, and return its flags.

    name: of a file in slurm/sites, or its path. The flags request one GPU, two, and as many as the
    job has per node; the last are flags of scripts, such as --no-cuda if GPUs are simulated.
    """
    site = Site.load(name)
    for flag in site.admission:
        key, _, value = flag.removeprefix("--").partition("=")
        for command in ("SALLOC", "SBATCH", "SLURM"):
            os.environ[f"{command}_{key.upper()}"] = value
    one, two, some = (site.gpus.replace("{n}", str(count)) for count in (1, 2, gpus_per_node))
    return one, two, some, " ".join(site.script_args)
