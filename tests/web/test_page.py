"""The live page in a real browser: what it shows, at which widths, and what it never does."""

from __future__ import annotations

import json
import re
import signal
import threading
from typing import Any

import pytest

from kvstore import units
from kvstore.client import Client
from kvstore.protocol import outcomes
from tests.browser import CUT, OUTSIDE, Browser, Page, in_a_browser
from tests.kill import load
from tests.running import Place
from tests.web import told
from tests.web.asked import Serve, Watching, url_of, with_web
from tests.web.told import Told, breaker, served, session

WIDTHS = (1300, 420)
EVIL = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'


def opened(browser: Browser, url: str, width: int = 1300, dark: bool = False) -> Page:
    """The page, once it has shown what it was told."""
    page = browser.page(width, 900, dark)
    page.go(url)
    page.wait(
        "document.body?.dataset.state === 'live' && document.querySelector('#chart-tokens .legend li') !== null"
    )
    return page


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)}).innerText"))


# -- its files --


def page_files() -> dict[str, str]:
    return {path.name: path.read_text() for path in told.PAGE.iterdir()}


def test_its_files_name_nothing_outside_and_never_make_html_of_text() -> None:
    """No address of another server, no inline script or style, and no way from a string to markup."""
    files = page_files()
    assert {"index.html", "page.css", "page.js", "icon.svg"} <= set(files)
    for name, content in files.items():
        outside = re.sub(r"http://www\.w3\.org/2000/svg", "", content)
        assert not re.search(r"(https?|wss?)://|[\"'(]//|@import|url\(", outside), name
        forbidden = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc"
        )
        assert not re.search(forbidden, content), name
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src)", files["index.html"])


def test_each_colour_has_a_dark_one() -> None:
    """What is named in light is named in dark, and nothing else: no colour is left over from the other scheme."""
    light, dark = page_files()["page.css"].split("@media screen and (prefers-color-scheme: dark)", 1)
    named = [re.findall(r"--([\w-]+): #[0-9a-f]{6};", sheet) for sheet in (light, dark)]
    assert named[0] == named[1] and len(named[0]) == len(set(named[0])) > 20


# -- in a browser --


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_inside_the_window_and_nothing_is_asked_elsewhere(
    browser: Browser, width: int, dark: bool
) -> None:
    """With a sick disk, full tiers, a region, and hours of samples: no complaint, no request to others, nothing off-screen."""
    said = Told(
        told.live(region=REGION, events=EVENTS, breakers=SICK, queues=FULL), told.samples(gap=(600, 420))
    )
    with served(said) as url:
        page = opened(browser, url, width, dark)
        assert page.value(OUTSIDE) == []
        assert page.value(CUT) == []
        assert page.value("document.documentElement.scrollWidth") <= width
        for span in ("3600", "21600"):
            page.value(f"document.querySelector('[data-span=\"{span}\"]').click()")
            page.wait(
                f"document.querySelector('[data-span=\"{span}\"]').getAttribute('aria-pressed') === 'true'"
            )
            assert page.value(OUTSIDE) == []
        paper = page.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 24, 27)" if dark else "rgb(251, 251, 249)")
        assert page.heard() == []
        assert page.requests and all(address.startswith(url) for address in page.requests)


REGION = {
    "open": True, "problem": "", "name": "eu-west", "bucket": "s3://a-bucket-with-a-long-name-of-a-company/kv/eu-west",
    "packs": 12_034, "blocks": 903_211, "feed_age_s": 1.2, "feed_failures": 0,
}  # fmt: skip
EVENTS = {
    "endpoint": "tcp://*:5557", "problem": "", "batches": 1200, "stored_blocks": 9, "removed_blocks": 3,
    "waiting_blocks": 0, "lost_blocks": 4,
}  # fmt: skip
SICK = [breaker("nvme0 loads", "open", 3, "a read took longer than 2 s", 11.2), breaker("nvme0 stores"), breaker("nvme1 loads", "probing", 1, "I/O error")]  # fmt: skip
FULL = [
    {"name": "loads", "length": 65_536, "limit": 65_536},
    {"name": "tickets", "length": 4096, "limit": 4096},
]


def problem(kind: str, subject: str, text: str, level: str = "problem") -> dict[str, Any]:
    """As a daemon tells it."""
    since_s = told.NOW_S - 600
    return {
        "kind": kind,
        "subject": subject,
        "level": level,
        "text": text,
        "fix": "mend it",
        "since_s": since_s,
        "count": 3,
    }


@in_a_browser
def test_what_is_wrong_is_said_first(browser: Browser) -> None:
    """Each problem that the daemon tells of stands above all figures, with why, since when and what to do."""
    late, away = problem("feed", "na", "read 70 s ago", "warning"), problem("breaker", "nvme0 loads", "hangs")
    with served(Told(told.live(breakers=SICK, problems=[away, late]), told.samples(900))) as url:
        page = opened(browser, url)
        lines = text(page, "#attention").splitlines()
        assert lines == [
            "breaker nvme0 loads: hangs (for 10 min, 3 times)",
            "→ mend it",
            "feed na: read 70 s ago (for 10 min, 3 times)",
            "→ mend it",
        ]
        assert text(page, "#health") == "▲ 1 problem, 1 warning"
        assert "1 problem" in page.value("document.title")
        assert "■ off" in text(page, "#table-levels") and "▲ trying" in text(page, "#table-levels")


def node(host: str, state: str, **changes: Any) -> dict[str, Any]:
    """Of the region, as `kvstore region nodes` has it."""
    return {
        "region": "na", "writer": "0a1b2c3d4e5f", "host": host, "age_s": 65.0, "state": state, "dram_bytes": 1 << 30,
        "nvme_bytes": 0, "load_bytes_per_s": 0.0, "version": "1", "up_s": 7200.0, "sessions": 3, "dram_used_bytes": 1 << 29,
        "nvme_used_bytes": 0, "hit_ratio": 0.5, "problems": [], **changes,
    }  # fmt: skip


@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_nodes_of_the_region_are_a_table(browser: Browser, width: int) -> None:
    """Each as it has said itself, with its first problem, those that are not well first; one that never said how it is, too; why none is known; and no table and no
    question without a region."""
    wrong = {"kind": "disk", "subject": "nvme0", "text": EVIL, "level": "problem", "since_s": 0.0}
    silent = {"hit_ratio": None, "sessions": None, "up_s": None, "dram_used_bytes": None, "version": None}
    rows = [node("a", "ok"), node(EVIL, "problems", problems=[wrong]), node("", "silent", **silent)]
    said = Told(told.live(region=REGION), told.samples(900))
    said.nodes = {"nodes": rows, "problem": ""}
    with served(said) as url:
        page = opened(browser, url, width)
        page.wait("document.querySelectorAll('#table-nodes tbody tr').length === 3")
        first = page.value("[...document.querySelectorAll('#table-nodes tr td')].map((one) => one.innerText)")
        assert first[0] == EVIL and first[-9:][:5] == ["a", "ok", "65 s ago", "50.0 %", "50.0 %"]
        assert EVIL in text(page, "#table-nodes") and "0a1b2c3d" in text(page, "#table-nodes")
        assert page.value(OUTSIDE) == [] and page.heard() == [] and page.value("window.hurt ?? 0") == 0
    said = Told(told.live(region=REGION), told.samples(900))
    said.nodes = {"nodes": [], "problem": "no answer in time"}
    with served(said) as url:
        page = opened(browser, url, width)
        page.wait("document.querySelector('#table-nodes').innerText.includes('no answer in time')")
    alone = Told(told.live(), told.samples(900))
    with served(alone) as url:
        page = opened(browser, url, width)
        assert (
            page.value("document.querySelector('#table-nodes').hidden") and "/nodes.json" not in alone.asked
        )


@in_a_browser
def test_tiles_say_what_the_samples_come_to(browser: Browser) -> None:
    """The hit rate, the tokens a second and the fill are those that anybody would compute from what was told."""
    said = Told(told.live(), told.samples(900))
    with served(said) as url:
        page = opened(browser, url)
        tiles = page.value("[...document.querySelectorAll('.figure')].map((one) => one.textContent)")
        tokens: dict[str, int] = {}
        for sample in said.samples[-12:]:
            for name, n in sample["tokens"].items():
                tokens[name] = tokens.get(name, 0) + n
        asked = sum(tokens.values()) - tokens["engine"]
        hits = tokens["dram"] + tokens["nvme"] + tokens["shared"]
        assert abs(float(tiles[0].split()[0]) - 100 * hits / asked) < 0.3
        assert abs(float(tiles[1].split()[0]) - sum(tokens.values()) / 60e3) < 1
        assert tiles[4:] == ["99.6 %", "66.2 %"]
        assert "Llama-3.1-70B" in text(page, "#table-models")


@in_a_browser
def test_a_page_that_is_opened_late_shows_the_last_figures_with_their_age(browser: Browser) -> None:
    """The daemon hung two hours ago, and the page is opened now: tiles, plots and tables are those of its last minutes, as a page
    shows them that was open then, in grey, and it says how old they are."""

    def figures(page: Page) -> list[str]:
        return list(page.value("[...document.querySelectorAll('.figure')].map((one) => one.textContent)"))

    said = Told(told.live(), told.samples(900))
    with served(said) as url:
        before = figures(opened(browser, url))
        said.up, said.problem, said.age_s = False, "no answer in time", 7200.0
        page = browser.page(1300, 900, False)
        page.go(url)
        page.wait(
            "document.body?.dataset.state === 'down' && document.querySelectorAll('.plot svg .layer').length > 3"
        )
        assert figures(page) == before and "nothing in the last" not in text(page, "#tiles")
        assert "The daemon does not answer" in text(page, "#attention") and "2 h ago" in text(page, "#facts")
        assert "Llama-3.1-70B" in text(page, "#table-models")


@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_newest_values_are_at_the_right_edge_and_in_the_legend(browser: Browser, width: int) -> None:
    """Plots end within two columns of their right edge, inside the window, and legends name the newest values."""
    with served(Told(told.live(), told.samples(3600))) as url:
        page = opened(browser, url, width)
        edges = page.value("""[...document.querySelectorAll('.plot svg')].map((svg) => {
            const ends = [...svg.querySelectorAll('.layer, .line')].map((one) => one.getBoundingClientRect().right);
            return [Math.max(...ends), svg.getBoundingClientRect().right];
        })""")
        assert len(edges) == 7
        for drawn, edge in edges:
            assert edge <= width
            assert edge - 20 < drawn <= edge
        assert "–" not in text(page, "#chart-tokens .legend")


@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_text_whatever_they_say(browser: Browser, width: int) -> None:
    """Markup, controls of direction and a thousand letters in every name: shown, never run, never wider than the window."""
    nasty = [EVIL, "\u202etxet\u2066 \x00\x1b[31m", "long" * 250, ""]
    live = told.live(
        region={**REGION, "name": EVIL, "bucket": "b" * 900, "problem": EVIL},
        events={**EVENTS, "problem": EVIL, "endpoint": EVIL},
        breakers=[breaker(f"{EVIL} loads", "open", 1, EVIL * 9, 2.0)],
        speeds=[told.speed(EVIL, 0.1, 1.0)],
        problems=[problem(EVIL, EVIL, EVIL * 9)],
        sessions=[{**session(name, 1), "model": name} for name in nasty * 16],
        sessions_total=10_000,
        host=EVIL,
        region_name=EVIL,
    )
    live["holdings"][0] |= {"kinds": 2, "differs": [{"field": EVIL, "values": nasty}]}
    for row, name in zip(live["tokens"] + live["prefixes"], nasty * 4, strict=False):
        row["model"], row["tenant"] = name, name[::-1]
    with served(Told(live, told.samples(900))) as url:
        page = opened(browser, url, width)
        assert EVIL in text(page, "#table-sessions")
        assert f"they differ in {EVIL}" in text(page, "#table-models .note")
        assert EVIL[:40] in text(page, "#attention")
        assert "\u202e" not in page.value("document.body.textContent")
        page.value("document.querySelector('#table-sessions .more').click()")
        assert page.value("document.querySelectorAll('#table-sessions tbody tr').length") == 64
        assert "9,936 are not listed" in text(page, "#table-sessions .note")
        assert page.value("document.querySelectorAll('main img, main script').length") == 0
        assert page.value("window.hurt ?? 0") == 0
        assert page.value(OUTSIDE) == []
        assert page.heard() == []
        assert all(address.startswith(url) for address in page.requests)


@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_node_with_many_disks_and_tenants_fits(browser: Browser, width: int) -> None:
    """Sixteen disks, 64 models and tenants: the six slowest disks are drawn, and tables begin with ten rows."""
    live = told.live(
        breakers=[breaker(f"nvme{n} {way}") for n in range(16) for way in ("loads", "stores")],
        speeds=[told.speed(f"nvme{n}", 0.0003, 5.0) for n in range(16)],
    )
    live["tokens"] = [{**live["tokens"][0], "model": f"model-{n}", "tenant": f"t{n}"} for n in range(64)]
    samples = told.samples()
    for sample in samples:
        sample["loads"] = {f"nvme{n}": [9, 0.001, 0.01 * (1 + n * 7 % 16)] for n in range(16)}
    with served(Told(live, samples)) as url:
        page = opened(browser, url, width)
        names = text(page, "#chart-loads .legend").split()
        assert [name for name in names if name.startswith("nvme")] == [
            f"nvme{n}" for n in range(16) if n * 7 % 16 >= 10 for _ in range(2)
        ]
        assert page.value("document.querySelectorAll('#table-models tbody tr').length") == 10
        assert page.value(OUTSIDE) == [] and page.value(CUT) == []
        page.value("document.querySelector('[data-span=\"21600\"]').click()")
        page.wait(
            "document.querySelector('#chart-tokens .layer').getBoundingClientRect().width > innerWidth / 2"
        )


@in_a_browser
def test_a_fresh_daemon_is_said_in_words(browser: Browser) -> None:
    """Without one lookup the page says what there is nothing of, instead of drawing nothing."""
    live = told.live(
        tokens=[], prefixes=[], sessions=[], sessions_total=0, speeds=[], breakers=[], uptime_s=2.0
    )
    with served(Told(live, [])) as url:
        page = opened(browser, url)
        assert "No engine is connected. Nobody asked for anything" in text(page, "#attention")
        assert "No engine has asked for anything" in text(page, "#chart-tokens")
        assert "There is no level below DRAM" in text(page, "#table-levels")
        assert "No prefix was hit" in text(page, "#table-prefixes")
        assert not re.search(r"NaN|undefined|null|Infinity", text(page, "body"))
        assert page.heard() == []


@in_a_browser
def test_a_daemon_that_never_answered_is_said_in_words(browser: Browser) -> None:
    """A page that is opened before its daemon runs says that and why, and shows no figures that nobody gave."""
    said = Told(None, [])
    said.problem = "no daemon at /run/kvstore/kvstore.sock"
    with served(said) as url:
        page = browser.page()
        page.go(url)
        page.wait("document.body?.dataset.state === 'down'", 5.0)
        assert "no daemon at /run/kvstore/kvstore.sock. It may not be running" in text(page, "#attention")
        assert set(page.value("[...document.querySelectorAll('.figure')].map((one) => one.textContent)")) == {
            "–"
        }
        assert page.heard() == []
        said.live, said.up = told.live(), True
        page.wait("document.querySelector('#health').textContent === '● healthy'", 10.0)


@in_a_browser
def test_one_sample_can_be_seen(browser: Browser) -> None:
    """Five seconds after the start there is a column in each layer, and each line can be seen."""
    with served(Told(told.live(), told.samples(5))) as url:
        page = opened(browser, url)
        assert page.value("document.querySelectorAll('#chart-tokens .layer').length") >= 3
        width = page.value("document.querySelector('#chart-tokens .layer').getBoundingClientRect().width")
        assert 1 < width < 20
        marks = page.value("""[...document.querySelectorAll('#chart-calls .line:not(.key .line), #chart-calls circle')]
            .map((one) => one.getBoundingClientRect().width)""")
        assert len(marks) == 4 and min(marks) > 1


@in_a_browser
def test_a_time_without_a_daemon_is_a_gap(browser: Browser) -> None:
    """Where nobody counted there is a box that says so, and no line runs across; an idle time is no gap."""
    with served(Told(told.live(), told.samples(gap=(600, 420)))) as url:
        page = opened(browser, url)
        box, words = page.value("""(() => { const svg = document.querySelector('#chart-bytes svg');
            return [svg.querySelectorAll('.gap').length, svg.textContent.includes('no answer')]; })()""")
        assert (box, words) == (1, True)
        assert (
            page.value("document.querySelector('#chart-bytes .line').getAttribute('d').match(/M/g).length")
            == 2
        )
    idle = [{**sample, "tokens": {}, "lookups": 0, "bytes": {}} for sample in told.samples(900)]
    with served(Told(told.live(), idle)) as url:
        page = opened(browser, url)
        assert page.value("document.querySelectorAll('.gap').length") == 0


@in_a_browser
def test_every_plot_can_be_read_with_the_keyboard(browser: Browser) -> None:
    """Tab reaches the plots, arrow keys go through the columns, and all legends show the same moment."""
    with served(Told(told.live(), told.samples(900))) as url:
        page = opened(browser, url)
        page.value("document.querySelector('#pause').focus()")
        page.press("Tab")
        assert page.value("document.activeElement.closest('figure')?.id") == "chart-tokens"
        page.press("Home")
        for _ in range(5):
            page.press("ArrowRight")
        moments = page.value("[...document.querySelectorAll('.at')].map((one) => one.textContent)")
        assert len(set(moments)) == 1 and re.fullmatch(r"\d\d:\d\d:\d\d UTC", moments[0])
        label = page.value("document.activeElement.getAttribute('aria-label')")
        assert moments[0] in label and "DRAM" in label
        page.press("Escape")
        assert text(page, "#chart-bytes .at") == "now"


@in_a_browser
def test_it_asks_nothing_while_paused_or_hidden(browser: Browser) -> None:
    """Pause and a hidden tab stop the polling; both go on at once afterwards."""
    said = Told(told.live(), told.samples(900))
    with served(said) as url:
        page = opened(browser, url)
        page.value("document.querySelector('#pause').click()")
        assert "paused at" in text(page, "#facts")
        assert is_silent(page, said)
        page.value("document.querySelector('#pause').click()")
        page.until(lambda: len(said.asked) > 0, "asked after the pause")
        page.value("""(() => { Object.defineProperty(document, 'hidden', {value: true, configurable: true});
            document.dispatchEvent(new Event('visibilitychange')); })()""")
        assert is_silent(page, said)
        page.value(
            "(() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); })()"
        )
        page.until(lambda: len(said.asked) > 0, "asked when it is seen again")


def is_silent(page: Page, said: Told) -> bool:
    """Whether nothing is asked for as long as three polls take, by the page's own clock."""
    page.value("new Promise((done) => setTimeout(done, 300))")  # what was under way
    said.asked.clear()
    page.value("new Promise((done) => setTimeout(done, 6500))")
    return not said.asked


class Held(Told):
    """Answers when it may."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.live_answers, self.history_answers = threading.Event(), threading.Event()
        self.live_answers.set()
        self.history_answers.set()

    def live_json(self) -> dict[str, Any]:
        self.live_answers.wait(2.0)
        return super().live_json()

    def history_json(self, since_s: float) -> dict[str, Any]:
        self.history_answers.wait(2.0)
        return super().history_json(since_s)


@in_a_browser
def test_a_span_chosen_while_another_is_asked_for_is_asked_for_too(browser: Browser) -> None:
    """An answer about the span before it does not count as one about the new one."""
    said = Held(told.live(), told.samples(900))
    with served(said) as url:
        page = opened(browser, url)
        said.asked.clear()
        said.history_answers.clear()
        page.until(lambda: any("history" in path for path in said.asked), "the history is asked for")
        said.live_answers.clear()
        page.value("document.querySelector('[data-span=\"3600\"]').click()")
        said.history_answers.set()
        page.value("new Promise((done) => setTimeout(done, 300))")
        said.live_answers.set()
        asked = re.compile(r"since=([\d.]+)")
        page.until(
            lambda: any(float(since) < told.NOW_S - 3600 for since in asked.findall(" ".join(said.asked))),
            "the hour is asked for",
        )


@in_a_browser
def test_nothing_moves_when_figures_change(browser: Browser) -> None:
    """Polls with other figures shift no element of the page; without wish for motion nothing is animated."""
    said = Told(told.live(), told.samples(900))
    with served(said) as url:
        page = opened(browser, url)
        page.value("""new PerformanceObserver((list) => {
            window.shift = (window.shift ?? 0) + list.getEntries().reduce((sum, one) => sum + one.value, 0);
        }).observe({type: 'layout-shift'})""")
        said.live = told.live(uptime_s=123_456.0)
        assert said.live is not None
        said.live["tiers"][0]["used_bytes"] = 3
        said.live["tokens"][0]["tokens"]["dram"] *= 1000
        page.wait("document.querySelector('#facts').textContent.includes('34.3 h')")
        page.value("new Promise((done) => setTimeout(done, 300))")
        assert page.value("window.shift ?? 0") < 0.001
        page.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}]
        )
        moving = "[...document.querySelectorAll('*')].filter((one) => getComputedStyle(one).transitionDuration !== '0s').length"
        assert page.value(moving) == 0


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_outcome_is_what_it_is_everywhere(browser: Browser, dark: bool) -> None:
    """outcomes.js has the hits and misses of kvstore/protocol/outcomes.py; no colour stands for two of them."""
    with served(Told(told.live(), told.samples(5))) as url:
        page = opened(browser, url, dark=dark)
        theirs = page.value("import('/outcomes.js').then((its) => its.HITS.map(([tier]) => tier))")
        assert theirs == [outcomes.NAMES[outcome] for outcome in outcomes.HITS]
        coloured = page.value("import('/outcomes.js').then((its) => its.REASONS.map(([reason]) => reason))")
        assert set(coloured) <= set(outcomes.NAMES[1:]) - set(theirs)
        ones = json.dumps(dict.fromkeys(outcomes.NAMES, 1))
        parts = page.value(f"import('/outcomes.js').then((its) => its.parts({ones}))")
        assert sum(tokens for _, _, tokens in parts) == outcomes.OUTCOMES
        assert page.value(f"import('/outcomes.js').then((its) => its.hitRatio({ones}))") == pytest.approx(
            len(outcomes.HITS) / (outcomes.OUTCOMES - 1)
        )
        drawn = [
            page.value(f"getComputedStyle(document.body).getPropertyValue('--{colour}')")
            for colour, _, _ in parts
        ]
        assert "" not in drawn and len(set(drawn)) == len(drawn)


@in_a_browser
def test_figures_read_as_everywhere(browser: Browser) -> None:
    """units.js says every quantity in the words of kvstore/units.py."""
    numbers = [
        *(0, 1, 9, 12.4, 99.4, 99.6, 999, 999.6, 1000, 1023),
        *(1024, 1536, 12_345, 99_950, 1 << 20, 5e9, 1.5e12, 3e14),
    ]
    pairs: dict[str, Any] = {
        "bytes": units.format_bytes, "count": units.count, "shortCount": units.short_count, "duration": units.format_duration,
    }  # fmt: skip
    with served(Told(told.live(), told.samples(5))) as url:
        page = opened(browser, url)
        for name, ours in pairs.items():
            for number in numbers:
                if name == "duration" and number > 1e9:
                    continue
                theirs = page.value(f"import('/units.js').then((units) => units.{name}({number}))")
                assert theirs == ours(number), (name, number)
        for ratio in (0, 0.0001, 0.1234, 0.5, 0.9996, 1):
            theirs = page.value(f"import('/units.js').then((units) => units.percent({ratio}))")
            assert theirs == units.percent(ratio)
        for amount in (None, 0, 0.0149, 0.0015, 0.00001, 0.126, 0.9999, 12.3456, -0.0149, 12_345.6):
            theirs = page.value(
                f"import('/units.js').then((units) => units.money({json.dumps(amount)}, 'EUR'))"
            )
            assert theirs == units.money(amount, "EUR"), amount
        for at_s in (0, 951_782_340, told.NOW_S):
            theirs = page.value(f"import('/units.js').then((units) => units.moment({at_s}))")
            assert theirs == units.format_time(at_s)


# -- before a real daemon --


@in_a_browser
def test_a_real_daemon_is_shown(browser: Browser, place: Place, serve: Serve) -> None:
    """What an engine stored and loaded a moment ago is on the page of its daemon, and its names with it."""
    daemon = serve(place, *with_web(place))
    with Client(daemon.socket, label="an engine") as client:
        space = load.namespace(client)
        hashes = load.chain(1)
        client.put(space, hashes, b"", [load.content(one) for one in hashes])
        page = opened(browser, url_of(daemon))
        client.lookup([space], hashes, ticket=1, tokens=32 * len(hashes))
        page.until(lambda: "kill loop" in text(page, "#table-prefixes"), "the prefix is listed")
        assert "an engine" in text(page, "#table-sessions")
        assert "100.0 %" in text(page, "#table-models")
        page.wait("document.querySelectorAll('#chart-tokens .layer.c-dram').length === 1")
        assert page.value(OUTSIDE) == []
        assert page.heard() == []


@in_a_browser
def test_a_daemon_that_was_killed_is_said_within_five_seconds(
    browser: Browser, place: Place, serve: Serve
) -> None:
    """After kill -9 the page says since when there is no answer and keeps the last figures; it comes back by itself."""
    daemon = serve(place, *place.arguments)
    with Watching(daemon.socket) as watching:
        page = opened(browser, watching.url)
        daemon.stop(signal.SIGKILL)
        page.wait("document.querySelector('#health').textContent === '■ no answer'", 5.0)
        assert re.search(r"The daemon does not answer: since \d\d:\d\d:\d\d UTC", text(page, "#attention"))
        assert "of 16 MiB" in text(page, "#tiles").replace("\u00a0", " ")
        assert page.value("document.body.dataset.state") == "down"
        serve(place, *place.arguments)
        page.wait("document.querySelector('#health').textContent === '● healthy'", 15.0)


@in_a_browser
def test_a_web_process_that_went_with_its_daemon_is_said_too(
    browser: Browser, place: Place, serve: Serve
) -> None:
    """Nothing listens any more: the page says so within five seconds, and finds the next daemon on the same port."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    page = opened(browser, url)
    daemon.stop(signal.SIGKILL)
    page.wait("document.querySelector('#health').textContent === '■ no answer'", 5.0)
    serve(place, *with_web(place, listen=url.split("/")[2]))
    page.wait("document.querySelector('#health').textContent === '● healthy'", 60.0)
