"""JupyterLab whose kernels listen on files that its user alone can reach; `make lab` calls it.

Over TCP, Jupyter's default, every user of the machine can read what cells contain and print. It
needs JupyterLab, and takes its flags: `python -m ddp_helpers.launch.lab --port=8888`.
"""

import os
import signal
import sys

from jupyterlab.labapp import main

from ddp_helpers.launch.shared import socket_folder

if __name__ == "__main__":
    # When its terminal closes, Jupyter ends as by `kill`, which removes its files.
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with socket_folder() as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = folder
        main([*sys.argv[1:], "--KernelManager.transport=ipc"])
