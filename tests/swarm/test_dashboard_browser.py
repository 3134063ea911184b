"""The dashboard in headless Chromium, beside a live swarm: a peer is killed, it is seen to go, and the curve moves on.

A stranger announces itself with HTML in each text of its record. No request of the browser leaves this machine. What a
person chooses of the curves, by keys, stays when the page is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.manifest.file import load, run_id
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.identity import Identity

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")

HOSTILE = "<img src=http://evil.example/x onerror=owned=1>"
NICKNAME = "<img src=x onerror=owned=1>"

STAYS, GONE, NODES = (
    f"[...document.querySelectorAll('{each} title')].map(title => title.textContent).join()"
    for each in (".stay", ".stay.gone", ".node")
)
STEP = "document.querySelector('.tiles dd').firstChild.data.replaceAll(',', '')"


@contextmanager
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new",
        "--no-sandbox",  # root has none
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what it would ask for itself
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def stranger(run: RunId, bootstrap: str, about: PeerId) -> Iterator[PeerId]:
    """Somebody who announces itself with HTML in every text, until the block is left."""
    identity, said, over = Identity.generate(), threading.Event(), threading.Event()
    status = StageStatus(0, 1, Chain("0" * 64), synced=True, slots=4)
    record = Record(
        run,
        identity.peer,
        1,
        ("/dns4/evil.example/tcp/1",),
        (status,),
        numerics=HOSTILE,
        software=HOSTILE,
        nickname=NICKNAME,
        complaints=(Complaint(0, about, "unreached", HOSTILE),),
    )

    async def announce() -> None:
        listen = Listen(client=True)
        async with DhtDirectory(identity, run, num_stages=1, bootstrap=(bootstrap,), listen=listen) as directory:
            await directory.publish(record)
            said.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(announce()))
    thread.start()
    try:
        assert said.wait(PATIENCE_S)
        yield identity.peer
    finally:
        over.set()
        thread.join()


def eventually(driver: Any, script: str) -> Any:
    """What it returns once that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := driver.execute_script(f"return {script}")):
        assert time.monotonic() < deadline, f"{script}\n{driver.find_element('tag name', 'body').text}"
        time.sleep(0.1)
    return found


CUT = """
    const inside = (one, other) => one.left >= other.left - 1 && one.right <= other.right + 1;
    const wide = [...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth);
    const texts = [...document.querySelectorAll('svg text')].filter(
        each => !inside(each.getBoundingClientRect(), each.ownerSVGElement.getBoundingClientRect()));
    return [...wide.map(each => each.getAttribute('aria-label')), ...texts.map(each => each.textContent)]"""
"""Parts of the page that have to be scrolled sideways, and words of its drawings of which a part is not drawn."""


def look(driver: Any, path: Path, *, theme: str, width: int) -> None:
    """With this theme and width: a picture of the page, on which nothing sticks out at the side."""
    scheme = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    charts = "document.querySelector('.chart.pace canvas').clientWidth"
    eventually(driver, f"Math.abs({charts} - document.querySelector('.chart.pace').clientWidth) < 2")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    # A wide page may have more stages than it has room for.
    assert width > 600 or not driver.execute_script(CUT)
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    dark = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) < 3 * 128
    assert dark == (theme == "dark"), ground
    assert driver.save_screenshot(str(path)) and path.read_bytes().startswith(b"\x89PNG")


def choose(driver: Any) -> list[Any]:
    """Tokens for the axis, a smoothed curve and a log scale, all by keys; then what the controls say."""
    controls = driver.find_elements("css selector", ".choices select, .choices input")
    for control, key in zip(controls, ("\ue015", "\ue015", " "), strict=True):  # arrow down
        control.send_keys(key)
    return chosen(driver)


def chosen(driver: Any) -> list[Any]:
    controls = eventually(driver, "[...document.querySelectorAll('.choices select, .choices input')]")
    return [each.is_selected() if each.tag_name == "input" else each.get_attribute("value") for each in controls]


def requests(driver: Any) -> list[str]:
    """URLs that the page has asked for, also those that were refused."""
    told = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in told if each["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("data:")]


def peers(at: str) -> dict[str, Any]:
    """Whom the dashboard shows, told to this process."""
    with urllib.request.urlopen(f"{at}data.json", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer).get("peers", {})
    return found


def test_a_peer_is_killed_and_seen_to_go_while_the_curve_moves_on(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path, steps=100_000)
    words = ("--manifest", str(path), "--device", "cpu")
    serving = ("peer", "--stage", "0", "--no-restart", *words)
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(Running(tmp_path / "a", *serving, "--dashboard", "0"))
        listening = a.says("listening")
        bootstrap = listening["dht"][0]
        b = stack.enter_context(Running(tmp_path / "b", *serving, "--bootstrap", bootstrap))
        stack.enter_context(Running(tmp_path / "t", "trainer", *words, "--bootstrap", bootstrap))
        victim, at = b.says("listening")["peer"], a.says("dashboard")["at"]
        while victim not in peers(at) or peers(at)[victim]["stages"][0]["state"] != "synced":
            time.sleep(0.1)
        b.process.kill()
        driver = stack.enter_context(browser())
        driver.get(at)
        eventually(driver, f"{STAYS}.includes('{victim}')")
        before = int(eventually(driver, STEP))
        with stranger(run_id(load(path)), bootstrap, listening["peer"]) as name:
            eventually(driver, f"document.querySelector('a[href=\"#peer/{name}\"]')")
            for theme in ("light", "dark"):
                look(driver, tmp_path / f"{theme}.png", theme=theme, width=1280)
                look(driver, tmp_path / f"{theme}-phone.png", theme=theme, width=390)
            driver.execute_script(f"location.hash = 'peer/{name}'")
            eventually(driver, "document.body.innerText.includes('cannot be connected to')")
            shown = driver.find_element("tag name", "body").text
            assert shown.count(HOSTILE) == 3 and NICKNAME in shown, shown
            driver.execute_script("location.hash = ''")
        eventually(driver, f"{GONE}.includes('{victim}')")
        eventually(driver, f"!{NODES}.includes('{victim}') && {NODES}.includes('{listening['peer']}')")
        eventually(driver, f"Number({STEP}) > {before}")
        eventually(driver, "document.querySelector('rect.phase.averaging, rect.phase.backward')")
        eventually(driver, "/averaging|backward/.test(document.querySelector('text.phase').textContent)")
        eventually(driver, f"document.title.startsWith('{load(path).name} ')")
        assert choose(driver) == ["tokens", "5", True]
        legend = "document.querySelector('.chart.loss').textContent"
        eventually(driver, f"{legend}.includes('step, tokens') && {legend}.includes('mean of about 5 steps')")
        driver.refresh()
        assert chosen(driver) == ["tokens", "5", True]
        eventually(driver, f"{legend}.includes('step, tokens')")
        contributor = f"document.querySelector('[aria-label=Contributors] a[href=\"#peer/{listening['peer']}\"]')"
        eventually(driver, f"Number({contributor}.closest('tr').children[2].textContent.replaceAll(',', '')) > 0")
        marks = driver.execute_script("return fetch('data.json').then(answer => answer.json())")["marks"]
        assert ("gone", f"...{victim[-8:]} is gone without a word, stage 0") in [
            (each["kind"], each["text"]) for each in marks
        ]
        assert not driver.execute_script("return window.owned || document.querySelector('img')")
        assert not [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        asked = requests(driver)
        assert len(asked) > 10 and {urlsplit(url).hostname for url in asked} == {"127.0.0.1"}
