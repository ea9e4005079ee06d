"""`make lab` on a copy of the course: the server, its kernels and the browser are ended, whatever happens."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright
from real import LIMIT, make_lab

from ddp_helpers import ROOT
from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.launch import free_port
from ddp_helpers.launch.launchers import clean_environment

NOT_COPIED = [ROOT / name for name in ("build", "runs", "data")]
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update")


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that is up."""

    course: Path
    url: str
    token: str = field(repr=False)  # or a failing test prints it

    def ask(self, path: str, method: str = "GET") -> object:
        """What the server's own interface answers."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.loads(answer.read() or "null")

    def end_kernels(self) -> None:
        """End every kernel."""
        for kernel in self.ask("kernels"):
            self.ask(f"kernels/{kernel['id']}", "DELETE")

    def ranks(self) -> list[psutil.Process]:
        """The processes that run cells: of `%%launch` the launcher and its ranks, of `%%ranks` the ranks that stay."""
        cells, running = str(self.course / "build" / "cells"), []
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
                server, parent = "ddp_helpers.launch.server", process.parent()
                forked = server in command and parent is not None and server in parent.cmdline()
                stays = forked and Path(process.cwd()).is_relative_to(self.course)
                if stays or any(word.startswith(cells) for word in command):
                    running.append(process)
            except psutil.Error:
                continue
        return running


def copy_of_the_course(folder: Path) -> Path:
    """A copy that is its own checkout, so that no committed file is touched; the data are shared."""
    (ROOT / "data").mkdir(exist_ok=True)

    def ignored(where: str, names: list[str]) -> set[str]:
        return IGNORED(where, names) | {path.name for path in NOT_COPIED if path.parent == Path(where)}

    course = shutil.copytree(ROOT, folder / "course", ignore=ignored)
    (course / "data").symlink_to(ROOT / "data", target_is_directory=True)
    return course


def environment(course: Path, state: Path, token: str, variables: dict[str, str]) -> dict[str, str]:
    """Nobody's settings but the environment's, and `ddp_helpers` from the copy: its ROOT is the copy."""
    own = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    own |= {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "share"}
    folders = {name: str(state / folder) for name, folder in own.items()}
    return clean_environment() | folders | {"JUPYTER_TOKEN": token, "PYTHONPATH": str(course)} | variables


@contextmanager
def jupyter(course: Path, state: Path, **variables: str) -> Iterator[Lab]:
    """JupyterLab on the course, on this machine only, as `make lab` starts it, which trusts its notebooks."""
    token, lab_server = secrets.token_urlsafe(), Processes()
    lab = Lab(course, f"http://127.0.0.1:{free_port()}", token)
    command = [sys.executable, *make_lab(), "--no-browser", "--ServerApp.port_retries=0"]
    command.append(f"--port={lab.url.rpartition(':')[2]}")
    with (state / "jupyter.log").open("w") as log:
        env = environment(course, state, token, variables)
        paths = [str(path) for path in sorted((course / "notebooks").glob("*.ipynb"))]
        subprocess.run([sys.executable, "-m", "jupyter", "trust", *paths], env=env, stdout=log, check=True)
        try:
            lab_server.run(command, env, course, files=[None, log.fileno(), log.fileno()])
            end = time.monotonic() + LIMIT
            while not answers(lab):
                said = (state / "jupyter.log").read_text()
                is_there = lab_server.statuses() == [None] and time.monotonic() < end
                assert is_there, f"no JupyterLab within {LIMIT} s:\n{said[-2000:]}"
                time.sleep(0.2)
            yield lab
        finally:
            lab_server.end(signal.SIGTERM)


def answers(lab: Lab) -> bool:
    """Whether the server is up."""
    try:
        return bool(lab.ask("status"))
    except (urllib.error.URLError, ConnectionError):
        return False


def chromium_path() -> str | None:
    """Where the browser is, if it is on this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def has_sandbox() -> bool:
    """Whether Chromium can shut in its pages: root does without; a user needs Debian's program, or namespaces."""
    if os.geteuid() == 0 or Path("/usr/lib/chromium/chrome-sandbox").exists():
        return True
    return subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window. Root, as in a container, has no sandbox."""
    arguments = [f"--{word}" for word in (*QUIET, "disable-sync")]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), args=arguments, chromium_sandbox=os.geteuid() != 0, timeout=1000 * LIMIT
        )
        try:
            yield browser
        finally:
            browser.close()
