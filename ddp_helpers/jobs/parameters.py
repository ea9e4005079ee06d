"""Execute a notebook with values for its parameters, of which papermill checks no name.

job.ipynb checks names with it, and the sweep of 11b executes job.ipynb, in the learner's process.
"""

import ast
import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import JobError

# Names that every kernel has.
_KERNEL_NAMES = {"In", "Out", "exit", "quit", "open", "get_ipython"}


def check_names(notebook: str | Path, names: Iterable[str]) -> None:
    """Raise JobError at a name that is no parameter of the notebook.

    notebook: its path, relative to the checkout. Names of the kernel, and those that begin with an
    underscore, may be anybody's. papermill would run a name that is none as code.
    """
    known = _parameter_names(ROOT / notebook)
    for name in names:
        is_private = name.startswith("_") and name.isidentifier()
        if name in known or name in _KERNEL_NAMES or is_private:
            continue
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise JobError(f"{Path(notebook).name} has no parameter {name!r}: {hint}")


def _parameter_names(notebook: Path) -> list[str]:
    """The names that the cell tagged `parameters` gives a value."""
    cells = json.loads(notebook.read_text())["cells"]
    for cell in cells:
        if "parameters" in cell["metadata"].get("tags", []):
            statements = ast.parse("".join(cell["source"])).body
            assignments = [node for node in statements if isinstance(node, ast.Assign)]
            return [ast.unparse(node.targets[0]) for node in assignments]
    return []


def execute(notebook: str | Path, output: str | Path, **parameters: object) -> None:
    """Execute a notebook with these parameters, whatever it calls them; keep the copy at `output`.

    notebook: its path, relative to the checkout. Raises JobError, with nothing executed, if it has
    no such parameter; and where one of its cells fails.
    """
    import papermill  # here, since it takes a second, and the job's own kernel only checks names
    from papermill.exceptions import PapermillExecutionError

    from ddp_helpers.launch.kernels import KernelOnFiles

    check_names(notebook, parameters)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    try:
        papermill.execute_notebook(
            _braced(ROOT / notebook),
            _braced(output),
            parameters,
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            kernel_manager_class=KernelOnFiles,
        )
    except PapermillExecutionError as error:
        name = Path(notebook).name
        raise JobError(f"{name} failed: {error.ename}: {error.evalue}") from None


def _braced(path: str | Path) -> str:
    """Double the braces of a path: papermill would fill in what stands in them."""
    return str(path).replace("{", "{{").replace("}", "}}")
