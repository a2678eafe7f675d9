"""The page in a real browser, over a real server around the fake runner: chat, stop, keys, the live view, accessibility."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import LIMIT_S
from tests.server.browser import Browser, find_browser
from tests.server.fakes import write_model
from tests.server.test_serve import Process

AXE = "axe-core@4.14.1"
KEY = "sk-test-1"
LETTERS = {"low": 97, "high": 123, "eos_every": 0}

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """40 tokens a second, for at most 512 tokens."""
    folder = tmp_path_factory.mktemp("model")
    process = Process(write_model(folder, **LETTERS, step_seconds=0.025, held_by=str(folder / "held")))
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("needs Chromium or Chrome on the PATH")
    browser = Browser(executable, tmp_path_factory.mktemp("browser") / "profile")
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def page(chromium: Browser, server: Process) -> Iterator[Browser]:
    """The page as it is when it has met the server; nothing may have gone wrong in it by the end."""
    chromium.complaints.clear()
    chromium.look(width=1280, height=800)
    chromium.open(server.url + "/")
    chromium.wait("document.getElementById('state').dataset.state === 'ready'")
    yield chromium
    assert chromium.complaints == []


def say(page: Browser, text: str) -> None:
    page.run("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")


def shown(page: Browser, id: str) -> bool:
    return bool(page.run(f"document.getElementById('{id}').checkVisibility()"))


def set_field(page: Browser, id: str, value: object) -> None:
    page.run(f"document.getElementById('{id}').value = {json.dumps(str(value))}")


def answered(page: Browser, count: int = 1) -> None:
    page.wait(f"document.querySelectorAll('article.assistant:not([aria-busy]) .figures').length === {count}")


def at_rest(server: Process) -> bool:
    engine = httpx.get(f"{server.url}/v1/status", timeout=LIMIT_S, trust_env=False).json()["engine"]
    return bool(engine["running"] == engine["waiting"] == 0)


def generated(server: Process) -> float:
    """Tokens so far."""
    text = server.get("/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("headrace_generation_tokens_total{"))


def test_a_chat_is_streamed(page: Browser) -> None:
    set_field(page, "max-tokens", 40)
    set_field(page, "temperature", 0)
    say(page, "one\ntwo")
    page.wait("document.querySelector('article.assistant[aria-busy] .content .prose')")  # words before the end
    assert shown(page, "stop")
    assert not shown(page, "send")
    answered(page)
    assert shown(page, "send")
    text = page.run("document.querySelector('article.assistant .content').textContent")
    assert len(text) == 40
    assert page.run("document.querySelector('article.user .body').innerText") == "one\ntwo"
    figures = page.run("document.querySelector('.figures').textContent")
    for part in ("first token ", " tokens/s", "40 tokens", "cached 0", "cut at the token limit"):
        assert part in figures, figures
    assert page.run("document.activeElement.id") == "message"
    say(page, "three")
    answered(page, 2)
    assert "cached 0" not in page.run("[...document.querySelectorAll('.figures')].pop().textContent"), "the conversation so far is in the cache"
    page.run("document.getElementById('fresh').click()")
    assert page.run("document.querySelectorAll('article').length") == 0
    assert page.run("document.activeElement.id") == "message"


def test_shift_and_enter_make_a_line(page: Browser) -> None:
    page.run("document.getElementById('message').focus()")
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert page.run("document.getElementById('message').value") == "a\nb"
    assert page.run("document.querySelectorAll('article').length") == 0


@pytest.mark.parametrize("way", ["escape", "button", "fresh"])
def test_stopping_frees_the_engine(page: Browser, server: Process, way: str) -> None:
    before = generated(server)
    set_field(page, "max-tokens", 400)
    say(page, "go on")
    page.wait("document.querySelector('article.assistant[aria-busy] .content .prose')")
    server.until(lambda: not at_rest(server))  # what it tells of itself is a moment old
    if way == "escape":
        page.press("Escape")
    else:
        page.run(f"document.getElementById('{'stop' if way == 'button' else way}').click()")
    server.until(lambda: at_rest(server))
    assert generated(server) - before < 400
    page.wait("document.getElementById('stop').hidden")
    assert page.run("document.activeElement.id") == "message"
    if way == "fresh":
        assert page.run("document.querySelectorAll('article').length") == 0
    else:
        assert page.run("document.querySelector('.figures').textContent").endswith("stopped")
    assert not shown(page, "problem")


def test_errors_are_said_in_the_servers_words(page: Browser) -> None:
    set_field(page, "temperature", -1)
    say(page, "hello")
    page.wait("!document.getElementById('problem').hidden")
    assert page.run("document.getElementById('problem').textContent") == "temperature must be from 0.0 to 1000000.0, not -1.0."
    assert page.run("document.getElementById('message').value") == "hello", "it can be sent again"
    assert page.run("document.querySelectorAll('article').length") == 0
    assert any("400" in complaint for complaint in page.complaints)
    page.complaints.clear()
    set_field(page, "temperature", "")
    set_field(page, "max-tokens", 2)
    page.press("Enter")
    answered(page)
    assert not shown(page, "problem")


def test_text_of_the_model_is_never_markup(page: Browser) -> None:
    evil = "<img src=x onerror=alert(1)> `<b>`\n```html\n<script>alert(2)</script>\n```\nend"
    script = f"""import('/web/markup.js').then(({{ render }}) => {{
        const box = document.createElement('div');
        box.append(render({json.dumps(evil)}));
        return [box.textContent, [...box.querySelectorAll('*')].map((one) => one.localName)];
    }})"""
    text, names = page.run(script)
    assert names == ["p", "code", "pre", "code", "p"]
    assert "<img src=x onerror=alert(1)>" in text
    assert "<script>alert(2)</script>" in text


def test_an_answer_is_spoken_in_sentences(page: Browser) -> None:
    """Letters without an end are spoken once, when the answer ends."""
    page.run(
        "window.changes = 0; new MutationObserver(() => { window.changes += 1; })"
        ".observe(document.getElementById('spoken'), { childList: true, subtree: true, characterData: true })"
    )
    set_field(page, "max-tokens", 60)
    say(page, "speak")
    answered(page)
    page.wait("document.getElementById('spoken').textContent.endsWith('End of the answer.')")
    assert page.run("window.changes") <= 4
    assert len(page.run("document.querySelectorAll('#spoken p')[1].textContent")) == 60


def test_the_live_view_moves(page: Browser, server: Process) -> None:
    page.run("document.getElementById('to-wheel').click()")
    page.wait("document.querySelector('#rows tr')")
    assert not shown(page, "chat-view")

    def cell(name: str) -> str:
        rows = "[...document.querySelectorAll('#rows tr')]"
        return str(page.run(f"{rows}.find((row) => row.cells[0].textContent === {json.dumps(name)}).cells[1].textContent"))

    page.wait("document.querySelector('#picture .count').textContent === '0'")
    before = cell("Steps so far")
    with ThreadPoolExecutor(10) as pool:
        for number in range(10):
            pool.submit(server.complete, prompt=f"p{number}", max_tokens=150)
        server.wait_running(8)
        server.hold()
        page.wait("document.querySelector('#picture .count').textContent === '8'")
        page.wait("document.querySelectorAll('#picture .drop.filled').length === 2")
        page.wait("document.querySelectorAll('#picture .paddle.filled').length === 8")
        assert cell("Requests running") == "8 of 8"
        assert cell("Requests waiting") == "2"
        assert cell("KV blocks used") != "0 of 256"
        page.wait("parseFloat(document.querySelector('#time-key strong').textContent) > 50")  # the runner's share
        server.let_go()
        page.wait("parseFloat(document.querySelector('#figures dd').textContent) > 50")  # tokens out
        assert cell("Steps so far") != before
        turned = page.run("document.querySelector('.turning').style.transform")
        page.wait(f"document.querySelector('.turning').style.transform !== {json.dumps(turned)}")
        server.until(lambda: at_rest(server))
        page.wait("document.querySelector('#picture .count').textContent === '0'")


def test_status_is_asked_for_only_while_it_is_seen(page: Browser) -> None:
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/v1/status')).length"
    assert page.run(asked) == 0
    page.run("location.hash = '#wheel'")
    page.wait(f"{asked} >= 2")
    page.run("location.hash = '#chat'")
    page.wait("!document.getElementById('chat-view').hidden")
    count = page.run(asked)
    time.sleep(1.5)
    assert page.run(asked) <= count + 1  # one may have been on its way


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Browser, tmp_path: Path) -> None:
    server = Process(write_model(tmp_path, **LETTERS), "--api-key", KEY)
    try:
        server.wait_ready()
        chromium.look(width=1280, height=800)
        chromium.open(server.url + "/#chat")
        chromium.wait("document.getElementById('key-dialog').open")
        assert "A valid API key is required" in chromium.run("document.getElementById('key-problem').textContent")
        assert chromium.run("document.activeElement.id") == "key"
        chromium.type("wrong")
        chromium.press("Enter")
        chromium.wait("document.getElementById('key-dialog').open && document.getElementById('key').value === ''")
        chromium.type(KEY)
        chromium.press("Enter")
        chromium.wait("document.getElementById('state').dataset.state === 'ready'")
        set_field(chromium, "max-tokens", 3)
        say(chromium, "hi")
        answered(chromium)
        assert chromium.run("[localStorage.length, document.cookie, Object.values(sessionStorage)]") == [0, "", [KEY]]
        assert chromium.run("document.documentElement.outerHTML").count(KEY) == 0
        chromium.run("sessionStorage.clear(); document.getElementById('to-wheel').click()")
        chromium.wait("document.getElementById('key-dialog').open")
        chromium.press("Escape")
        chromium.wait("!document.getElementById('wheel-problem').hidden")
        time.sleep(1.5)
        assert not chromium.run("document.getElementById('key-dialog').open"), "who declines is not asked again"
    finally:
        server.kill()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", folder, AXE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {AXE}: {done.stderr[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def findings(page: Browser, axe: str) -> list[Any]:
    page.run(axe + ";0")
    script = "axe.run().then((found) => found.violations.map((one) => [one.id, one.impact, one.nodes.map((node) => node.html).slice(0, 5)]))"
    found: list[Any] = page.run(script)
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_accessibility(page: Browser, axe: str, size: tuple[int, int], dark: bool) -> None:
    page.look(width=size[0], height=size[1], dark=dark, still=True)
    set_field(page, "max-tokens", 5)
    say(page, "`code` and words")
    answered(page)
    page.run("document.getElementById('settings').open = true")
    assert findings(page, axe) == []
    page.run("document.getElementById('problem').hidden = false; document.getElementById('problem').textContent = 'A problem.'")
    assert findings(page, axe) == []
    page.run("location.hash = '#wheel'; document.getElementById('wheel-table').open = true")
    page.wait("document.querySelector('#rows tr')")
    assert findings(page, axe) == []
    for view in ("chat", "wheel"):
        page.run(f"location.hash = '#{view}'")
        page.wait(f"!document.getElementById('{view}-view').hidden")
        overflow = page.run("[document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight]")
        assert overflow == [0, 0], view


def test_everything_is_reached_by_keyboard(page: Browser) -> None:
    page.run("document.activeElement.blur()")
    page.run("document.body.focus()")
    seen = []
    for _ in range(24):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.className || document.activeElement.localName"))
        outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or seen[-1] == "body", seen
    wanted = {"to-chat", "to-wheel", "model", "system", "temperature", "max-tokens", "top-p", "top-k", "seed"}
    wanted |= {"skip", "conversation", "message", "fresh", "send"}
    assert wanted <= set(seen), seen
