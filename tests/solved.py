"""Run the worked solutions of a notebook in its own kernel, below its own cells: there a learner pastes them."""

import re

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from ddp_helpers import ROOT
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, NOT_YET, RIGHT

LINK = re.compile(r"\(solutions/(\w+\.ipynb)\)")
ANSWER = re.compile(r"^(def|class) ", re.M)


def answers_to(notebook):
    """The cells with the answers to a notebook's exercises; the imports at the top of the solutions are no answer."""
    for name in LINK.findall(" ".join(cell.source for cell in notebook.cells))[:1]:
        for cell in nbformat.read(ROOT / "notebooks" / "solutions" / name, as_version=4).cells:
            if cell.cell_type == "code" and ANSWER.search(cell.source):
                yield cell


class ClientWithSolutions(NotebookClient):
    """Executes a notebook, whose stubs must be told to be such, then the answers to its exercises, each of them right.

    Raises AssertionError where that is not so.
    """

    def __init__(self, nb, **options):
        self.answers = [*answers_to(nb)]
        # A notebook of its own, of the same cells: nbmake may write the one that it has.
        super().__init__(nbformat.NotebookNode({**nb, "cells": [*nb.cells, *self.answers]}), **options)

    async def async_execute_cell(self, cell, *args, **options):
        """Execute a cell."""
        is_answer = any(cell is answer for answer in self.answers)
        try:
            executed = await super().async_execute_cell(cell, *args, **options)
        except CellExecutionError as error:
            if not is_answer:
                raise
            raise AssertionError(f"a worked solution, pasted below the notebook's cells, ends with {error}") from None
        if cell.cell_type == "code" and "lessons.check(" in cell.source:
            said = "".join(
                output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
            )
            # The word in its colour, since a hint may have it, too; and on all ranks.
            is_right = f"m{RIGHT}\x1b[0m" in said and NOT_YET not in said and NOT_ATTEMPTED not in said
            as_meant = is_right if is_answer else NOT_ATTEMPTED in said
            assert as_meant, f"a worked solution is not right here, or a stub is judged: {said}"
        return executed
