"""Run a notebook with parameters: papermill, which only warns where a name is wrong, with that made an error."""

import ast
import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import JobError

KERNELS_OWN = {"In", "Out", "exit", "quit", "open", "get_ipython"}


def check_names(notebook: str | Path, names: Iterable[str]) -> None:
    """Raise JobError at a name that is no parameter of the notebook, whose path is relative to the checkout."""
    known = names_of(ROOT / notebook)
    for name in names:
        own = name in KERNELS_OWN or (name.startswith("_") and name.isidentifier())  # papermill would run what is not
        if name not in known and not own:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise JobError(f"{Path(notebook).name} has no parameter {name!r}: {hint}")


def names_of(notebook: Path) -> list[str]:
    """The names that the cell tagged `parameters` gives a value."""
    cells = json.loads(notebook.read_text())["cells"]
    tagged = next((cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", [])), "")
    return [node.targets[0].id for node in ast.parse("".join(tagged)).body if isinstance(node, ast.Assign)]


def execute(notebook: str | Path, output: str | Path, **parameters: object) -> None:
    """Execute a notebook with these values for its parameters, and keep the executed copy at `output`.

    Raises JobError, with nothing executed, if it has no such parameter; and where one of its cells fails.
    """
    import papermill  # here, since it takes a second, and the job's own kernel only checks names
    from papermill.exceptions import PapermillExecutionError

    from ddp_helpers.launch.kernels import KernelOnFiles

    check_names(notebook, parameters)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    options = {"kernel_name": "python3", "progress_bar": False, "log_output": False}
    options["kernel_manager_class"] = KernelOnFiles
    try:
        papermill.execute_notebook(braced(ROOT / notebook), braced(output), parameters, **options)
    except PapermillExecutionError as error:
        raise JobError(f"{Path(notebook).name} failed: {error.ename}: {error.evalue}") from None


def braced(path: str | Path) -> str:
    """A path as papermill takes it: it would fill in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")
