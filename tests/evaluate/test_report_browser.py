"""The report's page in a real browser: it loads nothing, fits phones and laptops, and can be read in both themes."""

import io
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Page, sync_playwright
from synthetic_documents import whole, written

from lmcache_kvcmas.evaluate.page import run_report

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PHONE, LAPTOP = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it, and with names that are long, and that no source of the page expected."""
    folder = tmp_path_factory.mktemp("report")
    document = whole()
    long = "attention+head+with+a+name+that+goes+on+and+on"
    for summaries in (document["summary"], *document["edges"].values()):
        summaries[long] = summaries["rival"]
        summaries["方法 <b>"] = summaries["near"]
    document["edges"]["a-role-with-quite-a-long-name:<img src=x onerror=alert(1)>"] = document["edges"]["solver:critic"]
    document["run"]["command"] = "kvcmas evaluate " + "--edge planner:solver " * 20 + "x" * 300
    run_report(written(folder, document), folder / "report.html", None)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is there: sh tests/install_chromium.sh")
    with sync_playwright() as playwright:
        # Root has no sandbox; the page is the test's own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[PHONE, LAPTOP], ids=["phone", "laptop"])
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def page(browser: Browser, file: Path, size: tuple[int, int], scheme: str) -> Iterator[Page]:
    with opened(browser, file, size, scheme) as page:
        yield page


class opened:  # noqa: N801
    """The page, all its folds open, and what was asked for and complained of on the way."""

    def __init__(self, browser: Browser, file: Path, size: tuple[int, int], scheme: str) -> None:
        view = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=view, color_scheme=scheme)  # type: ignore[arg-type]
        self.file = file

    def __enter__(self) -> Page:
        page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.goto(self.file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        return page

    def __exit__(self, *raised: object) -> None:
        self.context.close()


def test_it_asks_for_nothing_and_complains_of_nothing(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str
) -> None:
    visit = opened(browser, file, size, scheme)
    with visit as page:
        page.wait_for_load_state("networkidle")
        assert visit.asked == [file.as_uri()]
        assert visit.complaints == []


def test_it_never_scrolls_sideways(page: Page, size: tuple[int, int]) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert (
        page.evaluate(
            """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('svg'))
           .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
        )
        == []
    )


def test_one_variant_of_each_chart_is_seen(page: Page) -> None:
    seen = page.evaluate(
        """[...document.querySelectorAll('figure')].map(f =>
           [...f.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().height > 60).length)"""
    )
    assert len(seen) >= 12
    assert set(seen) == {1}


def test_text_in_charts_is_large_enough_and_whole(page: Page) -> None:
    small, outside = page.evaluate(
        """() => {
            const small = [], outside = []
            for (const svg of document.querySelectorAll('svg.chart')) {
                const box = svg.getBoundingClientRect()
                if (!box.width) continue
                const scale = box.width / svg.viewBox.baseVal.width
                for (const text of svg.querySelectorAll('text')) {
                    const at = text.getBoundingClientRect()
                    const size = parseFloat(getComputedStyle(text).fontSize) * scale
                    if (size < 9.95) small.push([svg.id, text.textContent, size])
                    const wide = at.left >= box.left - 1 && at.right <= box.right + 1
                    if (!wide || at.top < box.top - 2 || at.bottom > box.bottom + 2)
                        outside.push([svg.querySelector('title').textContent, text.textContent])
                }
            }
            return [small, outside]
        }"""
    )
    assert small == []
    assert outside == []


def test_text_stands_out_from_what_is_behind_it(page: Page) -> None:
    """WCAG AA: 4.5 to 1. In charts the stripe behind our methods is the nearest colour to any text, so it counts."""
    weak = page.evaluate(
        """() => {
            const rgb = c => c.match(/[\\d.]+/g).map(Number)
            const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4
            const light = c => {
                const [r, g, b] = rgb(c).slice(0, 3).map(v => linear(v / 255))
                return .2126 * r + .7152 * g + .0722 * b
            }
            const contrast = (a, b) => {
                const [x, y] = [light(a), light(b)].sort((p, q) => q - p)
                return (x + .05) / (y + .05)
            }
            const behind = e => {
                for (; e; e = e.parentElement) {
                    const c = rgb(getComputedStyle(e).backgroundColor)
                    if (c.length < 4 || c[3] > 0) return getComputedStyle(e).backgroundColor
                }
                return 'rgb(255, 255, 255)'
            }
            const probe = document.body.appendChild(document.createElement('i'))
            probe.style.color = 'var(--ours-stripe)'
            const stripe = getComputedStyle(probe).color
            probe.remove()
            const weak = []
            for (const e of document.querySelectorAll('body *')) {
                if (!e.getBoundingClientRect().width || e.closest('.skip, caption')) continue
                if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue
                const text = e instanceof SVGElement
                if (text && e.tagName !== 'text') continue
                const ink = getComputedStyle(e)[text ? 'fill' : 'color']
                const worst = Math.min(contrast(ink, behind(e)), text ? contrast(ink, stripe) : 99)
                if (worst < 4.5) weak.push([e.textContent.slice(0, 40), ink, worst])
            }
            return weak
        }"""
    )
    assert weak == []


def test_charts_change_with_the_theme_and_are_not_blank(browser: Browser, file: Path, size: tuple[int, int]) -> None:
    shots: dict[str, list[Image.Image]] = {}
    for scheme in ("light", "dark"):
        with opened(browser, file, size, scheme) as page:
            charts = page.locator("figure:visible").all()
            shots[scheme] = [Image.open(io.BytesIO(chart.screenshot())).convert("L") for chart in charts]
    assert len(shots["light"]) == len(shots["dark"]) >= 12
    for light, dark in zip(shots["light"], shots["dark"], strict=True):
        assert ImageStat.Stat(light).mean[0] > 200
        assert ImageStat.Stat(dark).mean[0] < 80
        assert min(ImageStat.Stat(light).stddev[0], ImageStat.Stat(dark).stddev[0]) > 5
        assert light.size == dark.size
        assert ImageStat.Stat(ImageChops.difference(light, dark)).mean[0] > 100


def test_headings_and_pictures_are_named(page: Page) -> None:
    """What a screen reader goes by."""
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    unnamed = page.evaluate(
        """[...document.querySelectorAll('svg.chart')].filter(s => s.getAttribute('aria-labelledby').split(' ')
           .some(i => !document.getElementById(i)?.textContent)).length"""
    )
    assert unnamed == 0
    assert page.locator("svg.chart:visible").first.get_attribute("role") == "img"
