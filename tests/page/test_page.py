"""The page in a real browser: a headless Chromium, over a service in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from stepgraph.runtime import Engine

from ..rigs.browser import CHROMIUM, Browser
from ..rigs.http_rig import CHAT, COMPLETIONS, demo_with_template, quick_config
from ..rigs.http_servers import KEY, Threaded
from ..rigs.service_rig import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


class Recorder:
    """Records the bodies of requests for answers, and may answer in the place of the model."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.script: list[dict[str, Any]] | None = None
        self.stopped = False

    def around(self, app: ASGIApp) -> ASGIApp:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            first = await receive()
            body = first["body"]
            while first.get("more_body"):
                first = await receive()
                body += first["body"]
            self.bodies.append(json.loads(body or b"null"))
            self.paths.append(scope["path"])
            if self.script is None:
                messages = iter([{"type": "http.request", "body": body}])

                async def again() -> Any:
                    return next(messages, None) or await receive()

                await app(scope, again, send)
            else:
                await self._play(receive, send)

        return serve

    async def _play(self, receive: Receive, send: Send) -> None:
        """Send the events of the script; without an end it goes on until the client stops."""
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        script = self.script or []
        for number in range(0, len(script), 100):
            data = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in script[number:][:100])
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(0)
        if "usage" in script[-1] or "error" in script[-1]:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.stopped = True


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def ended(reason: str = "stop") -> list[dict[str, Any]]:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {}}
    choice = {"index": 0, "delta": {}, "finish_reason": reason}
    return [{"choices": [choice]}, {"choices": [], "usage": usage}]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


Open = Callable[..., tuple[str, Recorder]]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Serves the demo model, and opens the page; afterwards nothing has gone wrong in it."""
    servers: list[Threaded] = []

    def serve(*, chat: bool = True, **options: Any) -> tuple[str, Recorder]:
        source = demo_with_template(tmp_path, TEMPLATE) if chat else "demo"
        recorder = Recorder()
        start = partial(Engine.from_pretrained, source, quick_config(256))
        servers.append(Threaded(start, wrap=recorder.around, page=True, **options))
        address = f"http://127.0.0.1:{servers[-1].port}"
        browser.open(address)
        browser.wait("document.readyState === 'complete' && location.port")
        browser.evaluate("sessionStorage.clear()")
        browser.open("about:blank")
        browser.problems.clear()
        browser.requests.clear()
        browser.resize(1100, 800)
        browser.open(address)
        return address, recorder

    yield serve
    address = f"http://127.0.0.1:{servers[-1].port}/"
    elsewhere = [url for url in browser.requests if not url.startswith((address, "about:"))]
    problems = list(browser.problems)
    browser.open("about:blank")
    servers[-1].close()
    assert not elsewhere
    assert not problems


IDLE = "turns.ariaBusy === 'false'"


def say(browser: Browser, text: str) -> None:
    """Send a message with the keyboard and wait for the end of the answer."""
    begin(browser, text)
    browser.wait(IDLE)


def begin(browser: Browser, text: str) -> None:
    browser.wait("!chat.hidden")
    browser.evaluate("document.querySelector('#prompt').focus()")
    browser.type(text)
    browser.press("Enter")
    browser.wait("turns.ariaBusy !== null")


def fill(browser: Browser, **values: Any) -> None:
    """Enter settings with the keyboard."""
    browser.evaluate("settings.open = true")
    for name, value in values.items():
        browser.evaluate(f"document.querySelector('[name={name}]').select()")
        browser.type(str(value))


def test_chat_sends_edits_and_regenerates(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page()
    browser.wait("!chat.hidden")
    fill(browser, temperature=0, max_tokens=40, seed=3, system="Be brief.")
    say(browser, "def main(")
    say(browser, "import")
    assert recorder.paths == [CHAT, CHAT]
    body = recorder.bodies[1]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 40, 3)
    assert not {"top_p", "top_k", "tools"} & body.keys(), "the server has defaults"
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"].strip() in browser.text("article:nth-child(2) .text")
    times = browser.text("aside")
    for fact in ("Median", "First token", "queue", "prefill", "tokens/s", "cached", "40 tokens"):
        assert fact in times, times
    bars = browser.evaluate("document.querySelector('aside path').getAttribute('d')")
    assert bars.count("M") == 39, "one for each token but the first"
    assert browser.text("#finished").startswith("Answer: ")
    browser.click(".assistant .actions button")  # the last one: Regenerate
    wait_until(lambda: len(recorder.bodies) == 3)
    browser.wait(IDLE)
    assert recorder.bodies[2]["messages"] == body["messages"]
    browser.click("article:first-child .actions button")
    assert browser.evaluate("document.querySelector('#prompt').value") == "def main("
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#prompt').value") == ""
    browser.click("article:first-child .actions button")
    say(browser, "a")
    assert recorder.bodies[3]["messages"][1:] == [{"role": "user", "content": "def main(a"}]
    kept = browser.evaluate("turns.textContent")
    browser.evaluate("window.isOld = true; location.reload()")
    browser.wait("!window.isOld && !chat.hidden")
    assert browser.evaluate("turns.textContent") == kept
    browser.evaluate("URL.createObjectURL = (file) => { window.saved = file; return '#'; }")
    browser.click("#export")
    saved = json.loads(browser.evaluate("saved.text()"))
    assert saved["messages"][0]["content"] == "def main(a"
    assert len(saved["messages"][1]["timings"]["inter_token_ms"]) == 39
    assert saved["settings"]["seed"] == "3"
    browser.click("#new")
    browser.wait("document.querySelectorAll('article').length === 0")


def test_keyboard_alone_sends_breaks_lines_and_stops(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page()
    recorder.script = [delta(role="assistant", content=""), delta(content="begins ")]
    browser.wait("!chat.hidden")
    focused = []
    for _ in range(12):
        browser.press("Tab")
        focused.append(browser.evaluate("document.activeElement.id || document.activeElement.text"))
    order = ["send", "new", "export", "Chat", "Server", "model", "prompt"]
    assert [name for name in focused if name in order][:7] == order
    browser.evaluate("document.querySelector('#prompt').focus()")
    browser.type("one")
    browser.press("Enter", shift=True)
    browser.type("two")
    browser.press("Enter")
    browser.wait("document.querySelector('.assistant .text')?.innerText.includes('begins')")
    assert recorder.bodies[0]["messages"][0]["content"] == "one\ntwo"
    assert browser.text("#finished") == "", "read aloud before its end"
    browser.press("Escape")
    browser.wait(IDLE)
    assert "stopped" in browser.text("aside")
    assert "begins" in browser.text("#finished")
    wait_until(lambda: recorder.stopped)
    assert browser.evaluate("document.activeElement.id") == "prompt"


def test_markup_of_models_is_shown_as_text(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page(model_names=[MARKUP])
    called = {"name": MARKUP, "arguments": json.dumps({"x": MARKUP})}
    texts = [
        delta(role="assistant", reasoning=MARKUP),
        delta(
            content=f"{MARKUP}\n\n```{MARKUP}\n**{MARKUP}** `{MARKUP}`\n```html\n{MARKUP}\n```\n"
        ),
        delta(content=f"\n# {MARKUP}\n[x](javascript:window.hacked=1)\n"),
        delta(tool_calls=[{"index": 0, "id": MARKUP, "type": "function", "function": called}]),
    ]
    recorder.script = [*texts, *ended(MARKUP)]
    say(browser, MARKUP)
    recorder.script = [{"error": {"message": MARKUP}}]
    say(browser, MARKUP)
    assert recorder.bodies[0]["model"] == MARKUP
    assert recorder.bodies[1]["messages"][2]["role"] == "tool"
    assert browser.evaluate("turns.textContent").count("<img src=x") == 13
    assert browser.evaluate("turns.querySelectorAll('img, script, a, iframe').length") == 0
    assert browser.evaluate("turns.querySelector('pre').textContent").strip() == MARKUP
    assert browser.evaluate("window.hacked ?? null") is None
    assert MARKUP in browser.text("[role=alert]")


def test_long_answer_keeps_the_page_responsive(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page()
    line = [delta(content=f" word{i}" if i % 20 else f"\nline {i}") for i in range(50_000)]
    code = [delta(content=f" {i}") for i in range(50_000)]  # a line without an end
    recorder.script = [*line, delta(content="\n```\n"), *code, *ended()]
    browser.wait("!chat.hidden")
    browser.evaluate(
        "window.longest = 0; let last = performance.now(); (function frame(now) {"
        " window.longest = Math.max(window.longest, now - last); last = now;"
        " requestAnimationFrame(frame); })(last)"
    )
    say(browser, "go")
    shown = browser.evaluate("document.querySelector('.assistant .text').textContent")
    assert "word49999" in shown
    assert shown.endswith(" 49999\n") or " 49999" in shown[-200:]
    assert browser.evaluate("window.longest") < 2000, "milliseconds without a frame"


def test_server_view_moves_with_the_load(browser: Browser, open_page: Open) -> None:
    address, _ = open_page()
    browser.wait("!chat.hidden")
    assert not [url for url in browser.requests if url.endswith("/live")], "the view is closed"
    browser.click("nav a[href='#server']")
    browser.wait("document.querySelector('#phase').innerText.startsWith('serving')")
    body = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(f"{address}{COMPLETIONS}", json=body).status_code == 200
    browser.wait("document.querySelector('#gaps').innerText.includes('597 gaps')")
    steps = browser.text("#steps")
    for shown in ("decode: ", "prefill: ", "plan ", "launch ", "device ", "commit ", "1.0 rows"):
        assert shown in steps, steps
    tiles = browser.text("#tiles")
    assert "of 16" in tiles
    assert "def main" not in browser.text("body")
    browser.click("nav a[href='#chat']")
    browser.wait("!chat.hidden")


def test_operators_see_the_time_of_each_operation(browser: Browser, open_page: Open) -> None:
    address, _ = open_page(admin=True)
    browser.wait("!chat.hidden")
    browser.click("nav a[href='#server']")
    browser.click("#profile-start")
    body = {"prompt": "def main(", "max_tokens": 20, "ignore_eos": True}
    while browser.evaluate("document.querySelector('#profile-start').disabled"):
        assert httpx.post(f"{address}{COMPLETIONS}", json=body).status_code == 200
    shown = browser.text("#operations")
    assert "decode" in shown
    assert "layers" in shown or "head" in shown


def test_page_fits_a_phone_and_the_dark(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page()
    recorder.script = [delta(content="x" * 500 + "\n```\n" + "y" * 500 + "\n```\n"), *ended()]
    say(browser, "z" * 500)
    browser.evaluate("settings.open = true")
    browser.resize(360, 740)
    for view in ("#server", "#chat"):
        browser.click(f"nav a[href='{view}']")
        browser.wait(f"!document.querySelector('{view}').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for part in ("color", "backgroundColor"):
            colours.append(browser.evaluate(f"getComputedStyle(document.body).{part}"))
    browser.prefer("light")
    assert len({*colours}) == 4


def test_key_is_asked_for_and_stays_in_the_tab(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page(api_keys=[KEY])
    for key in ("wrong", KEY):
        browser.wait("document.activeElement.id === 'key'")
        browser.problems.clear()  # a 401 is reported
        browser.type(key)
        browser.press("Enter")
        browser.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
    say(browser, "hello")
    assert recorder.paths == [CHAT]
    assert "First token" in browser.text("aside")
    kept = browser.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
    assert kept == '[{},""]'
    browser.problems.clear()


def test_models_without_a_template_continue_the_text(browser: Browser, open_page: Open) -> None:
    _, recorder = open_page(chat=False)
    browser.wait("turns.innerText.includes('/v1/completions')")
    say(browser, "def main(")
    assert recorder.paths == [COMPLETIONS]
    assert recorder.bodies[0]["prompt"] == "def main("
    answer = browser.evaluate("document.querySelector('.assistant .text').textContent")
    say(browser, "import")
    continued = recorder.bodies[1]["prompt"]
    assert continued.startswith("def main(")
    assert continued.endswith("import")
    assert len(continued) > len("def main(import")
    assert answer.strip()
