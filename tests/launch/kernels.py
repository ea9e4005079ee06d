"""A real kernel, and what its cells show."""

import os
import re

import psutil
from jupyter_client.manager import KernelManager
from real import LIMIT

from ddp_helpers.launch.kernels import file_transport
from ddp_helpers.launch.shared import VARIABLE

LOAD = "%load_ext ddp_helpers.launch.ranks\nfrom ddp_helpers.launch.ranks import pull, start"


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self, folder):
        self.folder = folder
        self.manager = KernelManager(kernel_name="python3", **file_transport())
        # As in a learner's JupyterLab, its server of ranks is its own child, and not forked from the one of all tests.
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, VARIABLE: ""})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)
        assert self.run(LOAD) == ""

    def start(self, cell):
        """Send a cell."""
        return self.client.execute(cell)

    def finish(self, sent):
        """All that a cell shows, the last state of what it draws anew; its error behind it."""
        said, drawn, self.letters = "", {}, 0  # letters: how much went to the front end
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT)
            kind, content = message["msg_type"], message["content"]
            self.letters += len(str(content))
            if message["parent_header"].get("msg_id") != sent:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return re.sub(r"\x1b\[[\d;]+m", "", "\n".join(drawn.values()) + said)
            if kind == "stream":
                said += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                drawn[str(content.get("transient"))] = content["data"]["text/plain"]
            elif kind == "error":
                said += content["evalue"] or content["ename"]

    def run(self, cell):
        """Run a cell to its end; what it showed."""
        return self.finish(self.start(cell))

    def children(self):
        """The processes that this kernel has started, also by others, but for the warm server, which stays."""
        kernel = psutil.Process(self.manager.provisioner.pid)
        servers = [child for child in kernel.children() if "ddp_helpers.launch.server" in child.cmdline()]
        return [process for process in kernel.children(recursive=True) if process not in servers]

    def pids(self, size=2):
        """The processes of the ranks that are there."""
        said = self.run(f"%%ranks {size}\nimport os\nos.getpid()")
        return [int(pid) for pid in re.findall(r"\] (\d+)$", said, re.M)]
