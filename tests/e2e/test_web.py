"""`unbroken web` in a browser: a NIC dies by a click and comes back, in both themes and by keyboard
alone; pages elsewhere and those without the token change nothing."""

import json
import os
import re
import time

import pytest

from lib.browser import Browser
from lib.fabric import Fabric
from lib.http import Endpoint
from lib.process import Failure, ticks, wait_until
from lib.storms import many, storm

CONTRAST = (
    # The least contrast of any text on the page with the ground behind it (WCAG 2).
    """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const f = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
};
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
let least = [99, ''];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('svg')) continue;
  if (e.closest(':disabled')) continue;
  const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < least[0]) least = [contrast, e.outerHTML.slice(0, 200)];
}
return least;"""
)
NAMES = """
const bad = [];
for (const e of document.querySelectorAll('button, input, [role=button], [role=img], [tabindex]')) {
  const label = e.id && document.querySelector(`label[for=${e.id}]`);
  const by = e.getAttribute('aria-labelledby');
  const name = e.getAttribute('aria-label') || (by && document.getElementById(by)?.textContent)
    || label?.textContent || e.textContent;
  if (!name.trim() && e.checkVisibility()) bad.push(e.outerHTML.slice(0, 200));
}
return bad;"""
MANY_QPS, IDLE_SECONDS, IDLE_SHARE = 10_000, 30, 0.01


def web(fabric, logs, *args):
    """`unbroken web` of a fabric, and the token that it prints."""
    endpoint = Endpoint(fabric, "web", *args, name="web")
    printed = lambda: re.search(r"#token=([0-9a-f]{32})", endpoint.process.output())
    token = wait_until(printed, 10, "the token is printed").group(1)
    return endpoint, token


def act(endpoint, token, body, kind="application/json", **more):
    """Asks for a change."""
    headers = {
        "Content_Type": kind,
        **({"Authorization": f"Bearer {token}"} if token else {}),
        **more,
    }
    return endpoint.get("/api/act", body=json.dumps(body).encode(), **headers)


DEAD = {"action": "set-fault", "fault": "nic a/0 dead"}


@pytest.mark.smoke
def test_who_may_change_something(logs):
    """Without the token, from a page elsewhere, by a form of a page elsewhere, and with words that
    mean nothing, nothing is changed; the answer says why."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        endpoint, token = web(fabric, logs)
        evil = f"http://evil.example:{endpoint.port}"
        for expected, args, more in [
            (401, ("", DEAD), {}),
            (401, ("0" * 32, DEAD), {}),
            (403, (token, DEAD), {"Origin": evil}),
            (403, (token, DEAD), {"Host": evil[7:]}),
            (415, (token, DEAD, "text/plain"), {}),
            (400, (token, {"action": "reset"}), {}),
            (400, (token, {"action": "set-fault", "fault": "nic a/9 dead"}), {}),
            (400, (token, {"action": "drain", "nic": "../../x"}), {}),
            (413, (token, {"action": "set-fault", "fault": "x" * 5000}), {}),
        ]:
            status, _, text = act(endpoint, *args, **more)
            if status != expected or len(text) < 10:
                raise Failure(f"{args} {more}: {status} where {expected} was due: {text}")
        if fabric.events():
            raise Failure("something was changed")
        status, headers, page = endpoint.get("/")
        policy = headers["content-security-policy"]
        if (
            status != 200
            or "default-src 'self'" not in policy
            or headers["x-frame-options"] != "DENY"
        ):
            raise Failure(f"{status} {headers}")
        if re.search(r"https?://(?!www\.w3\.org)", page) or token in page:
            raise Failure("the page has the token, or something from elsewhere")
        state = json.loads(endpoint.get("/api/state?count=10")[2])
        if (
            state["may_change"]
            or len(state["nics"]) != 4
            or state["health"]["verdict"] != "healthy"
        ):
            raise Failure(f"{state}")
        if act(endpoint, token, DEAD)[0] != 200 or len(fabric.events("fault")) != 1:
            raise Failure("with the token it is not done")
        for path in ("/api/state?from=-1", "/api/state?count=99999999999999999999999"):
            if endpoint.get(path)[0] != 400:
                raise Failure(f"{path} is taken")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_nic_dies_and_comes_back_in_the_browser(logs, note, theme):
    """A click kills a NIC, after a question; picture, verdict, table and timeline follow; another
    one mends it. Text has enough contrast, and all that can be used has a name."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        storm(fabric, 8, 240)
        endpoint, token = web(fabric, logs)
        with Browser(logs, theme) as browser:
            browser.open(f"http://127.0.0.1:{endpoint.port}/#token={token}")
            says = lambda words: (
                f"return document.getElementById('verdict').textContent.startsWith('{words}')"
            )
            browser.wait_for(says("healthy"), 20, "the page says that all is well")
            browser.wait_for(
                "return document.querySelectorAll('#qps tbody tr').length === 16", 20, "all QPs"
            )
            browser.wait_for(
                "return document.querySelector('#rates polyline') !== null", 20, "lines"
            )
            if browser.run("return location.hash") or "token" in browser.run(
                "return location.href"
            ):
                raise Failure("the token stays in the address")
            before = len(endpoint.process.output())
            browser.picture(logs / f"healthy-{theme}.png")
            browser.click("[data-nic='a/0']")
            browser.click("#actions button")
            browser.click("#confirm-no")
            if fabric.events("fault"):
                raise Failure("a fault was set without a yes")
            browser.click("#actions button")
            if browser.text("#confirm-command") != "unbroken fault set 'nic a/0 dead'":
                raise Failure(browser.text("#confirm"))
            began = time.monotonic()
            browser.click("#confirm-yes")
            browser.wait_for(says("degraded, survived, 50 %"), 20, "the verdict follows")
            seen_s = time.monotonic() - began
            browser.wait_for(
                "return document.querySelector('[data-nic=\"a/0\"]').classList.contains('is-out')",
                10,
                "picture",
            )
            browser.wait_for(
                "return document.querySelector('#timeline .bar') !== null", 10, "timeline"
            )
            browser.wait_for(
                "return document.querySelector('#events').textContent.includes('switched')",
                10,
                "events",
            )
            browser.wait_for(
                "return document.querySelector('#qps').textContent.includes('first path a/0-b/0')",
                20,
                "QPs",
            )
            label = browser.run(
                "return document.querySelector('[data-nic=\"a/0\"]').getAttribute('aria-label')"
            )
            if not label.startswith("NIC a/0: dead, nic a/0 dead"):
                raise Failure(f"a screen reader hears {label}")
            browser.picture(logs / f"dead-{theme}.png")
            contrast, where = browser.run(CONTRAST)
            if contrast < 4.5:
                raise Failure(f"contrast {contrast:.2f}: {where}")
            if nameless := browser.run(NAMES):
                raise Failure(f"without a name: {nameless}")
            browser.click("#actions button:nth-of-type(4)")
            browser.click("#confirm-yes")
            browser.wait_for(says("healthy"), 60, "all are back")
            if complaints := browser.complaints():
                raise Failure(f"the browser complains: {complaints}")
            if len(endpoint.process.output()) != before:
                raise Failure(f"the server says more: {endpoint.process.output()}")
        note(f"seen {seen_s:.1f} s after the click; contrast {contrast:.1f} at least")


def test_by_keyboard_alone_and_on_a_narrow_screen(logs):
    """Tab and Enter are enough to drain a NIC; nothing is cut off at 400 pixels; a page that was
    opened without the token looks only, and is given it in a field."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        endpoint, token = web(fabric, logs)
        with Browser(logs, size=(400, 800)) as browser:
            browser.open(f"http://127.0.0.1:{endpoint.port}/")
            browser.wait_for(
                "return document.querySelector('[data-nic]') !== null", 20, "the picture"
            )
            browser.click("[data-nic='a/1']")
            if not browser.run("return document.querySelector('#actions button').disabled"):
                raise Failure("without the token it could be changed")
            browser.run("document.getElementById('token').focus()")
            for key in token:
                browser.press(key)
            browser.press("Enter")
            browser.wait_for(
                "return !document.querySelector('#actions button').disabled",
                10,
                "the token is taken",
            )
            browser.run("document.querySelector('.skip').focus()")
            focus = (
                "return document.activeElement.dataset.nic || document.activeElement.textContent"
            )
            seen = []
            for wanted in ("b/1", "drain"):
                for _ in range(40):
                    browser.press("Tab")
                    seen.append(browser.run(focus))
                    if seen[-1] == wanted:
                        break
                else:
                    raise Failure(f"Tab does not lead to {wanted}: {seen}")
                browser.press("Enter")
                if wanted == "b/1" and browser.run(focus) != "dies":
                    raise Failure("a NIC is chosen, and the focus is not on what can be done to it")
            browser.wait_for(
                "return document.getElementById('confirm').open", 5, "it is asked back"
            )
            # The focus is on No.
            browser.press("Tab")
            browser.run("document.getElementById('confirm-yes').focus()")
            browser.press("Enter")
            drained = lambda: fabric.nics()["b/1"]["state"] == "active, drained"
            wait_until(drained, 10, "b/1 is drained")
            # As CSS has them: 13 pixels, and none is drawn smaller than it can be read.
            words = "[...document.querySelectorAll('#main svg text')]"
            least = f"Math.min(...{words}.map((t) => t.getBoundingClientRect().height))"
            if (height := browser.run(f"return {least}")) < 12:
                raise Failure(f"words in pictures are {height:.1f} pixels high")
            label = "getComputedStyle(document.querySelector('#nics td'), '::before').content"
            if "State" not in browser.run(f"return {label}"):
                raise Failure("a cell does not say of what it is")
            wide = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
            if wide[0] > wide[1]:
                raise Failure(f"the page is {wide[0]} pixels wide on a screen of {wide[1]}")
            browser.picture(logs / "narrow.png")


# Lines of three NICs: b/0 is what a/0 is but for 1 % of the peak, a/1 is another one.
MERGED = """
return import('/draw.js').then(({ merged }) => {
  const line = (name, bps) => [name, bps.map((n, second) => [second, n])];
  const all = [line('a/0', [900, 1000, 0]), line('a/1', [900, 500, 0]), line('b/0', [905, 990, 0])];
  return merged(all, 1000).map(([names]) => names);
});"""
# The marks of the timeline that lie on the name of a lane or beyond the picture.
MARKS_ON_NAMES = """
const box = (e) => e.getBoundingClientRect();
const names = [...document.querySelectorAll('#timeline text[text-anchor=end]')]
  .filter((e) => !e.textContent.includes(':'));
const edge = Math.max(...names.map((e) => box(e).right));
const right = box(document.querySelector('#timeline svg')).right;
return [...document.querySelectorAll('#timeline .bar, #timeline path')]
  .filter((e) => box(e).left < edge || box(e).right > right).map((e) => e.textContent);"""


def test_a_page_that_is_opened_late_shows_what_was_before(logs):
    """Faults of before are in both pictures, events in the order of their times whatever the order
    of the log, no mark lies on a lane's name, and NICs that carry the same are one line."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        fabric.fault("nic a/1 down")
        fabric.fault("nic b/1 down")
        [first, last] = fabric.events("fault")
        # Written after both, it happened between them, as a switch that two processes tell of.
        between = {"wall_us": (first["wall_us"] + last["wall_us"]) // 2}
        between |= {"event": "port-down", "nic": "a/1", "time_us": last["time_us"], "pid": 1}
        with open(fabric.path / "events.jsonl", "a") as log:
            log.write(json.dumps(between) + "\n")
        endpoint, _ = web(fabric, logs)
        with Browser(logs) as browser:
            browser.open(f"http://127.0.0.1:{endpoint.port}/")
            marks = "[...document.querySelectorAll('#rates .event')].map((e) => e.textContent)"
            browser.wait_for(f"return {marks}.length === 3", 20, "the chart has what was before")
            told = browser.run(f"return {marks}")
            assert ["a/1 down" in told[0], "a/1" in told[1], "b/1 down" in told[2]] == [True] * 3
            lines = "return [...document.querySelectorAll('#events li')].map((e) => e.textContent)"
            newest = browser.run(lines)
            order = [next(n for n, what in enumerate(told) if what in line) for line in newest]
            assert order == [2, 1, 0], newest
            shown = browser.run("return document.querySelectorAll('#timeline .bar, path').length")
            assert shown >= 3
            assert browser.run(MARKS_ON_NAMES) == []
            assert browser.run(MERGED) == ["a/0, b/0", "a/1"]


@pytest.mark.timing
@pytest.mark.serial
def test_ten_thousand_queue_pairs(logs, note):
    """With 10,000 queue pairs an answer takes a fraction of a second, and a page that is open takes
    a hundredth of a core at most."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        many(fabric, MANY_QPS)
        endpoint, _ = web(fabric, logs)
        state = lambda: json.loads(endpoint.get("/api/state?count=100")[2])
        wait_until(lambda: state()["counts"]["all"] == MANY_QPS, 60, "all queue pairs")
        before, began, took = ticks(endpoint.process.pid), time.monotonic(), []
        while time.monotonic() - began < IDLE_SECONDS:
            asked = time.monotonic()
            state()
            took.append(time.monotonic() - asked)
            # As often as the page asks: that is the load of which the share of a core is told.
            time.sleep(1)
        share = (ticks(endpoint.process.pid) - before) / os.sysconf("SC_CLK_TCK") / IDLE_SECONDS
        took.sort()
        median_ms = took[len(took) // 2] * 1000
        note(
            f"{share * 100:.2f} % of a core; an answer in {median_ms:.1f} ms, "
            f"{took[-1] * 1000:.0f} at most"
        )
        if share > IDLE_SHARE or median_ms > 100:
            raise Failure(f"{share * 100:.2f} % of a core, {median_ms:.1f} ms")
