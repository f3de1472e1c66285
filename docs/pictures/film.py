"""Makes film.gif: the page of a run while one of its workers, then its coordinator, is killed.

    python docs/pictures/film.py

Starts a broker, the pipeline of `exactlyonce init` and Chromium, all on this machine; takes a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image

from exactlyonce.connectors.embedded.broker import HOST, EmbeddedBroker, free_port
from exactlyonce.engines.local import monitoring

FILM = Path(__file__).parent / "film.gif"
WIDTH, HEIGHT = 1000, 760
COLOURS, SHOWN_MS, LAST_MS = 64, 1_300, 4_000
LIMIT_S = 120.0
PAUSE = threading.Event()
"""Never set."""
HEAD = """\
<style>#caption {{ margin: 0; padding: 10px 16px; background: #101216; color: #e9ecf1; font: 17px monospace }}
#caption b {{ color: #ff7a61 }}</style><p id="caption">{caption}</p><script>
let asked = 0;
window.fetch = async () => {{
  if (asked++ >= {answers}) throw new Error("gone");
  return {{ok: true, json: async () => ({state})}};
}};
</script>
"""
"""Shows the page as it was when it got *state*, and for how many requests the run still answered."""


class Scene(NamedTuple):
    caption: str
    state: dict[str, Any]
    answers: int = 1_000


def rendered(scene: Scene, page: str, folder: Path) -> Image.Image:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
    document, picture = folder / "scene.html", folder / "scene.png"
    head = HEAD.format(caption=scene.caption, answers=scene.answers, state=json.dumps(scene.state))
    document.write_text(page.replace("<main", f"{head}<main", 1))
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=2000",
            f"--screenshot={picture}", f"file://{document}",
        ],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    with Image.open(picture) as shot:
        return shot.convert("RGB")


def save(scenes: list[Scene], folder: Path) -> None:
    page = (Path(monitoring.__file__).parent / "page.html").read_text()
    frames = [rendered(scene, page, folder) for scene in scenes]
    sheet = Image.new("RGB", (WIDTH, HEIGHT * len(frames)))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (0, number * HEIGHT))
    palette = sheet.quantize(COLOURS)
    shown = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [*[SHOWN_MS] * (len(shown) - 1), LAST_MS]
    shown[0].save(FILM, save_all=True, append_images=shown[1:], duration=times, loop=0, optimize=True)
    print(f"{FILM.name}: {len(shown)} pictures, {FILM.stat().st_size:,} bytes")


def state(address: str) -> dict[str, Any]:
    with urlopen(f"http://{address}/state.json", timeout=10) as answer:
        known: dict[str, Any] = json.load(answer)
        return known


def wait_for(address: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if condition(state(address)):
                return
        except (URLError, ConnectionError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("the run is not as it should be")
        PAUSE.wait(0.1)


def workers(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def feed(folder: Path) -> None:
    subprocess.run([sys.executable, "feed.py"], cwd=folder, capture_output=True, check=True)


def feed_until(ended: threading.Event, folder: Path) -> None:
    while not ended.wait(0.3):
        feed(folder)


def main() -> None:
    address, ended = f"{HOST}:{free_port()}", threading.Event()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        broker = EmbeddedBroker(folder / "broker", port=0, lifetime="process")
        broker.start()
        command = [sys.executable, "-m", "exactlyonce.cli.main"]
        subprocess.run([*command, "init", "totals"], cwd=folder, check=True, capture_output=True)
        totals = folder / "totals"
        run = [
            *command, "run", "pipeline:pipeline", "--parallelism", "2", "--checkpoint-interval", "1s", "--ui", address,
            "--restart", "fixed_delay:attempts=9,delay=6s",
        ]  # fmt: skip
        os.environ["EXACTLYONCE_BOOTSTRAP_SERVERS"] = broker.bootstrap_servers
        feed(totals)
        feeder = threading.Thread(target=feed_until, args=(ended, totals))
        feeder.start()
        process = subprocess.Popen(run, cwd=totals, stderr=subprocess.DEVNULL)
        scenes: list[Scene] = []

        def take(caption: str, times: int = 1) -> None:
            for number in range(times):
                PAUSE.wait(1.5 if number else 0)
                scenes.append(Scene(caption, state(address)))

        try:
            wait_for(address, lambda seen: len(done(seen)) >= 15)
            take("$ exactlyonce run pipeline:pipeline --parallelism 2 --ui 127.0.0.1:8080", 2)
            victim = workers(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            wait_for(address, lambda seen: not seen["well"])
            take(f"$ <b>kill -9 {victim}</b> &nbsp; # a worker", 3)
            wait_for(address, lambda seen: seen["well"])
            before = len(done(state(address)))
            wait_for(address, lambda seen: len(done(seen)) >= before + 4)
            take("it goes on from the last checkpoint: every record counts once", 2)
            process.kill()
            process.wait()
            scenes.append(Scene(f"$ <b>kill -9 {process.pid}</b> &nbsp; # the whole run", scenes[-1].state, answers=1))
            process = subprocess.Popen(run, cwd=totals, stderr=subprocess.DEVNULL)
            wait_for(address, lambda seen: bool(seen["incarnation"]))
            take("$ exactlyonce run pipeline:pipeline ... &nbsp; # the next one, from the same checkpoint")
            wait_for(address, lambda seen: len(done(seen)) >= 6)
            take("$ exactlyonce run pipeline:pipeline ... &nbsp; # the next one, from the same checkpoint")
        finally:
            ended.set()
            process.kill()
            process.wait()
            feeder.join()
            broker.kill()
        save(scenes, folder)


def done(seen: dict[str, Any]) -> list[Any]:
    return [each for each in seen["checkpoints"] if each["outcome"] == "completed"]


if __name__ == "__main__":
    main()
