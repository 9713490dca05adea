"""The report of a dump in headless Chromium: no network, no errors, on a desk and on a phone, light and dark."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_dumps import IDENTITY, make_dump, states_of, write_whole
from playwright.sync_api import Browser, sync_playwright

from actors.capture.statistics import StateStatistics
from cluster.page.build import report
from cluster.page.facts import read_facts
from cluster.page.plots import norms as norms_figure
from cluster.page.plots import outliers
from cluster.page.statistics import read_statistics
from cluster.preview import Stretch
from cluster.statistics import STATISTICS_KEY
from storage.dump import create_dump
from storage.errors import OutputError
from storage.files import Store
from storage.layout import Layout
from storage.reader import open_dump
from storage.shard import ShardWriter

pytestmark = pytest.mark.slow

PATIENCE_MS = 120_000
LAYOUT = Layout(states=(0, 2, "final"), hidden_size=64, chunk_rows=4, shard_rows=256)
HOSTILE = "</script><script>document.title = 'hacked'</script>"
TIMELINE = [
    {"s": 2.0 * i, "captured_tokens": 100 * i, "committed_tokens": 90 * i, "in_flight_bytes": 5, "engines": 1,
     "busy_s": 1.9 * i, "waiting_s": 0.1 * i, "write_s": 0.4 * i, "seal_s": 0.2 * i, "ring_wait_s": 0.0,
     "bottleneck": "engine"}
    for i in range(12)
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], check=True)
    program = shutil.which("chromium")
    with sync_playwright() as playwright:
        # Whatever isn't on the page has nowhere to come from.
        offline = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
        started = playwright.chromium.launch(executable_path=program, args=offline)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    store = make_dump(folder, [9, 20, 30, 64, 100], layout=LAYOUT, skipped=[1])
    store.replace("run.json", json.dumps({"work_seconds": 24.0, "timeline": TIMELINE}).encode())
    with pytest.MonkeyPatch.context() as patch:
        # The made-up model has no tokenizer; other people's text is what could break out of the page.
        patch.setattr("cluster.page.facts.load_tokenizer", lambda path: object())
        pieces = (Stretch(HOSTILE, False), Stretch("an answer", True))
        patch.setattr("cluster.page.facts.stretches", lambda tokenizer, ids, mask: pieces)
        report(str(folder), None)
    return folder / "report.html"


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_the_page_renders_without_the_network(
    browser: Browser, page_file: Path, width: int, scheme: Any
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#plot-norms .main-svg")
    assert said == []
    assert asked == [page_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    assert page.locator(".js-plotly-plot").count() == 4
    for plot in page.locator(".js-plotly-plot").all():
        box = plot.bounding_box()
        assert box is not None
        assert 250 < box["width"] <= width
        drawn = plot.locator(".main-svg").first.bounding_box()
        assert drawn is not None
        assert drawn["width"] == box["width"], "it is drawn over its neighbour"
    text, back = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (brightness(text) > brightness(back)) == (scheme == "dark")
    axis = page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")
    assert (brightness(axis) > brightness(back)) == (scheme == "dark"), (
        "plots keep the other scheme's colours"
    )
    context.close()


def brightness(colour: str) -> float:
    return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3]))


def test_samples_can_be_browsed_and_are_text_only(browser: Browser, page_file: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(page_file.as_uri())
    page.locator("#list button").nth(1).click()
    assert page.locator("#sample-id").inner_text() == "sample 2/../é"
    assert page.locator("#sample-text").inner_text() == HOSTILE + "an answer"
    assert page.locator("#sample-text mark").inner_text() == "an answer"
    assert page.title() != "hacked"
    page.locator("#filter").fill("sample 4")
    assert page.locator("#list button:visible").count() == 1


def test_the_page_says_what_is_missing(page_file: Path, tmp_path: Path) -> None:
    text = page_file.read_text()
    assert "5 rows = <b>4</b> committed + <b>1</b> skipped + <b>0</b> failed" in text
    assert "too long" in text
    assert "Not verified yet" in text
    make_dump(tmp_path, [9, 9], finish=False)
    report(str(tmp_path), None)
    assert "not finished" in (tmp_path / "report.html").read_text()


def test_statistics_are_those_of_the_states(tmp_path: Path) -> None:
    make_dump(tmp_path, [9, 20, 30], layout=LAYOUT)
    dump = open_dump(str(tmp_path))
    found = read_statistics(dump, {})
    assert found is not None
    expected = np.concatenate([s.states(2).float().norm(dim=-1).numpy() for s in dump])
    assert found.tokens == 59
    np.testing.assert_allclose(found.states[1].norms.values, np.sort(expected), rtol=1e-6)
    assert (found.counted_tokens, found.sampled) == (0, ["0", "2", "final"])


def test_norms_are_those_that_engines_counted_and_sampled_only_where_none_did(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [9, 20, 30], layout=LAYOUT)
    counter = StateStatistics(LAYOUT)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((64_000, 64)).astype(np.float32) * scale for scale in (1, 4, 1)]
    counter.look([(v.view(np.uint32) >> 16).astype(np.uint16) for v in values])
    told = counter.summary()
    del told["final"]
    kept = {run: {"engine-0": {"states": told, "alarms": 0}} for run in ("first", "second")}
    store.replace(STATISTICS_KEY, json.dumps(kept).encode())
    found = read_facts(str(tmp_path)).statistics
    assert found is not None
    assert (found.counted_tokens, found.sampled) == (4000, ["final"])
    norms = np.linalg.norm(values[1][::32], axis=1)
    for q in (1, 50, 99):
        assert found.states[1].norms.percentile(q) == pytest.approx(np.percentile(norms, q), rel=0.05)
    drawn = np.asarray(norms_figure(found).data[1].y)
    assert drawn.sum() == pytest.approx(1)
    assert (np.diff(np.flatnonzero(drawn > 0.01)) == 1).all(), "bins between those of the count are empty"
    report(str(tmp_path), None)
    text = " ".join((tmp_path / "report.html").read_text().split())
    assert "Norms are of 4,000 tokens that the engines counted while they collected" in text
    assert "those of final weren't counted" in text.replace("&#39;", "'")


def test_outlier_channels_are_those_far_over_the_median(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    create_dump(store, IDENTITY, LAYOUT, {})
    writer = ShardWriter(store, LAYOUT, "run", "writer-0", 20_000)
    bits = states_of(LAYOUT, 0, 40)
    bits[1, :, 17] = 0x42C8  # 100 as bfloat16
    write_whole(writer, 0, bits)
    writer.seal_all()
    found = read_statistics(open_dump(str(tmp_path)), {})
    assert found is not None
    assert [[c.index for c in s.outliers] for s in found.states] == [[], [17], []]
    assert 50 < found.states[1].outliers[0].ratio < 300
    assert outliers(found).data[1].x == (17,)


def test_a_report_that_cant_be_written_says_where(tmp_path: Path) -> None:
    make_dump(tmp_path, [9])
    with pytest.raises(OutputError, match="no/such"):
        report(str(tmp_path), str(tmp_path / "no/such/file.html"))
