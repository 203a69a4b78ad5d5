"""Pictures of every page, light and dark, wide and narrow, into docs/screenshots.

Run: .venv/bin/python scripts/screenshots.py. Starts a service of its own on an empty database with the repository's
measured runs; needs Chromium (CHROMIUM, else /usr/bin/chromium).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
OOM = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1000.00 MiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 0.25 GiB is free. Including non-PyTorch memory, this process has 78.86 GiB memory in use. Of "
    "the allocated memory 77.12 GiB is allocated by PyTorch, and 0.35 GiB is reserved by PyTorch but unallocated."
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(folder: str, port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": folder, "OOMBUDSMAN_LOG_LEVEL": "error"}
    program = str(Path(sys.executable).parent / "oombudsman")
    records = ROOT / "estimator" / "data" / "measured" / "dense_check.jsonl"
    subprocess.run([program, "runs", "import", str(records)], env=environment, check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen([program, "serve", "--port", str(port)], env=environment)
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return process
    raise RuntimeError("the service did not start")


def pages(page: Any, origin: str) -> dict[str, str]:
    """Addresses of what is worth a picture; asks for an answer first."""
    page.goto(origin + "/?recipe=llama3_8b_pretrain_config&gpu=h100-80gb&num_gpus=2")
    page.click("button.primary")
    page.wait_for_url("**/r/**")
    answer = page.url
    return {
        "start": origin + "/",
        "result": answer,
        "what-if": answer + "?tensor=2&context=1&recompute=mlp#what-if",
        "measured": origin + "/measured",
        "not-found": origin + "/r/rec_nothing",
    }


def shoot(browser: Any, origin: str, out: Path, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, device_scale_factor=1)
    page = context.new_page()
    suffix = f"{scheme}" if width > 600 else f"{scheme}-narrow"
    for name, address in pages(page, origin).items():
        page.goto(address)
        page.screenshot(path=out / f"{name}-{suffix}.png", full_page=True)
    page.goto(origin + "/")
    page.fill("#log", OOM)
    page.fill("#gpu", "h99")
    page.click("button[value=read]")
    page.wait_for_load_state()
    page.screenshot(path=out / f"evidence-{suffix}.png", full_page=True)
    page.fill("#num_gpus", "two")
    page.click("button.primary")
    page.wait_for_load_state()
    page.screenshot(path=out / f"errors-{suffix}.png", full_page=True)
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screenshots")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        service = serve(folder, port)
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                for scheme in ("light", "dark"):
                    shoot(browser, f"http://127.0.0.1:{port}", options.out, scheme, 1120)
                shoot(browser, f"http://127.0.0.1:{port}", options.out, "light", 360)
                browser.close()
        finally:
            service.terminate()
            service.wait()
    print("\n".join(sorted(path.name for path in options.out.glob("*.png"))))


if __name__ == "__main__":
    main()
