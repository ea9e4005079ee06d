"""JupyterLab whose kernels listen on files that its user alone can reach; `make lab` calls it.

Over TCP, as Jupyter starts them, every user of the machine can read what cells hold and show. It
needs JupyterLab, and takes its flags: `python -m ddp_helpers.launch.lab --port=8888`.
"""

import os
import signal
import sys

from jupyterlab.labapp import main

from ddp_helpers.launch.shared import socket_folder

if __name__ == "__main__":
    # A terminal that is closed ends Jupyter, too, but as `kill` does: so that its files go with it.
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with socket_folder() as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = folder
        main([*sys.argv[1:], "--KernelManager.transport=ipc"])
