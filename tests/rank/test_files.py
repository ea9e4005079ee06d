"""A file is written whole or not at all, and nobody else's is touched, whatever lies in the folder."""

import resource
import subprocess
import sys
from pathlib import Path

from ddp_helpers import jobs
from ddp_helpers.rank.files import write_atomically


def test_a_job_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("job.sbatch", "job.json"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    jobs.write_job(jobs.Job("try", ("x.py",)), jobs.Site("here"), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.is_symlink()} == {"job.json", "job.sbatch"}
    assert not (tmp_path / "elsewhere").exists()


def test_where_there_is_no_room_the_old_file_stays_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "file", b"old")
    code = "import sys, pathlib; from ddp_helpers.rank.files import *\n"
    code += "write_atomically(pathlib.Path(sys.argv[1]), b'x' * 99)"

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))

    command = [sys.executable, "-c", code, tmp_path / "a" / "file"]
    done = subprocess.run(command, preexec_fn=no_room, capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr and (tmp_path / "a" / "file").read_bytes() == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_each_of_two_writers_at_once_leaves_a_whole_file(tmp_path: Path) -> None:
    code = "import sys, pathlib; from ddp_helpers.rank.files import *\n"
    code += "for _ in range(50): write_atomically(pathlib.Path(sys.argv[1]), sys.argv[2].encode() * 100_000)"
    pair = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "file", letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in pair):
        content = (tmp_path / "file").read_bytes() if (tmp_path / "file").exists() else b"a" * 100_000
        assert len(content) == 100_000 and len(set(content)) == 1
    assert [writer.returncode for writer in pair] == [0, 0] and len(list(tmp_path.iterdir())) == 1
