"""What a code host reads in .github: forms of issues ask for what the course can print, workflows run what is there."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import yaml
from real import LIMIT

from ddp_helpers import ROOT
from ddp_helpers.cli import make_parser

GITHUB = ROOT / ".github"
KEYS = {"name", "description", "title", "body"}  # of those that GitHub knows; it refuses a form with another
PARTS = {  # a kind of part: what it must have, and may
    "markdown": ({"value"}, {"value"}),
    "input": ({"label"}, {"label", "description", "placeholder"}),
    "textarea": ({"label"}, {"label", "description", "placeholder", "render"}),
    "dropdown": ({"label", "options"}, {"label", "description", "options"}),
}


def test_forms_of_issues_have_the_keys_that_github_knows() -> None:
    forms = sorted({*(GITHUB / "ISSUE_TEMPLATE").glob("*.yml")} - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"})
    assert [form.stem for form in forms] == ["failure", "unclear"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert set(form) == KEYS, path.name
        for part in form["body"]:
            needed, known = PARTS[part["type"]]
            assert needed <= set(part["attributes"]) <= known, (path.name, part)
            assert set(part) <= {"type", "attributes", "id", "validations"}, (path.name, part)
        names = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(names) == len(set(names)), path.name


def test_a_failure_is_asked_for_by_commands_and_files_that_are_there() -> None:
    text = " ".join((GITHUB / "ISSUE_TEMPLATE" / "failure.yml").read_text().split())
    typed = re.findall(r"`(?:ddp-course|python3 -m ddp_helpers) ([^`]+)`", text)
    assert {*typed} == {"explain", "explain --json LOG", "doctor --data none"}
    for command in typed:
        make_parser().parse_known_args(command.split())  # ends with an error at what it does not know
    paths = re.findall(r"`([\w/]+/[\w./]*)`", text)
    assert paths and all((ROOT / path).exists() for path in paths)


def test_workflows_make_what_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}
    steps = {name: [step for job in flow["jobs"].values() for step in job["steps"]] for name, flow in workflows.items()}
    for name, its in steps.items():
        made = [step["run"].split()[1] for step in its if step.get("run", "").startswith("make ")]
        assert made and all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in made), name
    [published] = [step for step in steps["pages"] if "upload-pages-artifact" in step.get("uses", "")]
    assert f" . {published['with']['path']}\n" in makefile.split("\nsite:")[1]


def test_the_weekly_run_comes_to_the_fault_matrix_also_where_a_test_fails_and_ends_in_failure(tmp_path: Path) -> None:
    """make itself and the Makefile's rules; the programs that they start only say that they were started."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    says = "#!/bin/sh\necho called: $*\n"
    programs = {".venv/bin/python": says + "[ $2 != pytest ]\n", "slurm/cluster": says + 'shift\nexec "$@"\n'}
    programs |= dict.fromkeys((".venv/bin/ruff", ".venv/bin/lint-imports", ".venv/bin/mypy"), says)
    programs |= dict.fromkeys((".venv/bin/ddp-course", ".ci/packages", "pyproject.toml", ".venv/installed"), says)
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    options = {"env": {"PATH": os.environ["PATH"]}, "capture_output": True, "text": True, "timeout": LIMIT}
    done = subprocess.run(["make", "test-all"], cwd=tmp_path, check=False, **options)
    assert done.returncode != 0 and "called: -m pytest\n" in done.stdout, done.stderr
    assert "called: -m faults --times 3\n" in done.stdout
    on_simulated_gpus = "gpus 2 -- slurm/cluster with .venv/bin/python -m ddp_helpers.upkeep.course --all"
    assert done.stdout.endswith(f"called: {on_simulated_gpus}\n"), done.stdout
