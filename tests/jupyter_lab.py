"""A JupyterLab of our own for the browser tests: 127.0.0.1, a token, a free port, and no traces."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_SETTINGS = {
    # a question about news would stand in front of the notebook
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}


@contextlib.contextmanager
def running(work: Path) -> Iterator[tuple[str, str]]:
    """Start JupyterLab on copies of the notebooks; (address, token). Ends it, and its kernels."""
    shutil.copytree(ROOT / "notebooks", work / "notebooks")
    shutil.copytree(ROOT / "docs", work / "docs")
    settings = work / "settings"
    for name, value in _SETTINGS.items():
        folder, file = name.split(":")
        path = settings / folder / f"{file}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    log = (work / "jupyter.log").open("w")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "QUASAR_LAB_FAST": "1",
        "JUPYTER_TOKEN": token,
        "JUPYTER_CONFIG_DIR": str(work / "config"),
        "JUPYTER_RUNTIME_DIR": str(work / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(work / "workspaces"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root",
         "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
         f"--ServerApp.root_dir={work}", "--LabApp.expose_app_in_browser=True"],
        env=environment, cwd=work, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, token, process, work / "jupyter.log")
        yield address, token
    finally:
        process.terminate()  # the server shuts its kernels down
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def shut_kernels_down(address: str, token: str) -> None:
    """End the kernels of all notebooks: each holds a model."""
    for session in json.load(_ask(f"{address}/api/sessions", token)):
        _ask(f"{address}/api/sessions/{session['id']}", token, method="DELETE").close()


def _ask(url: str, token: str, method: str = "GET") -> Any:
    headers = {"Authorization": f"token {token}"}
    return urllib.request.urlopen(
        urllib.request.Request(url, headers=headers, method=method), timeout=30
    )


def _wait(address: str, token: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), _ask(f"{address}/api/status", token):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")
