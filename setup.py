"""Put the job file's template and the sites, which stand beside the package, into its wheel.

All else about the package stands in pyproject.toml. `pip install` and `pip wheel` run this file.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = [Path("slurm/job.sbatch.jinja"), *sorted(Path("slurm/sites").glob("*.toml"))]


class BuildWithSlurm(build_py):
    """Builds the package, and copies slurm/ into it: an installed package has no checkout."""

    def run(self) -> None:
        """Build; an editable install reads the files where they stand."""
        super().run()
        for file in [] if self.editable_mode else FILES:
            target = Path(self.build_lib) / "ddp_helpers" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    def get_source_files(self) -> list[str]:
        """List what a source distribution needs."""
        return [*super().get_source_files(), *map(str, FILES)]


setup(cmdclass={"build_py": BuildWithSlurm})
