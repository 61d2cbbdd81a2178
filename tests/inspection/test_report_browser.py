"""The report in a real browser: the drawn values are the run's, no script fails, no text becomes markup."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.inspection.report import write_report
from penstock.inspection.report.data import read_run
from penstock.inspection.report.page import render
from penstock.store.run_folder import RunFolder
from stages.browser import BROWSER, LivePage, Page
from stages.made_run import GROUP_SIZE, make_run, metrics_of

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")


def points(page: Page, chart: str, series: str, run: int = 0) -> dict[int, float]:
    found = page.all("circle", chart=chart, series=series, run=str(run))
    return {int(point["data-step"]): float(point["data-value"]) for point in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    """Return a page that shows one report after the other: a browser takes a second to start."""
    with LivePage(tmp_path_factory.mktemp("profile")) as live:
        yield live


@pytest.fixture(scope="module")
def page(made: RunFolder, browser: LivePage) -> Page:
    return browser.dump(write_report([made]))


def test_the_page_is_ready_without_an_error(page: Page) -> None:
    assert page.root.get("data-ready") == "yes"
    assert "data-error" not in page.root


@pytest.mark.parametrize(
    "name",
    [
        "reward/mean",
        "response_length/mean",
        "kl/mean",
        "entropy/mean",
        "clip/fraction",
        "grad_norm",
    ],
)
def test_drawn_curves_are_the_metrics(page: Page, made: RunFolder, name: str) -> None:
    expected = {row["step"]: row[name] for row in metrics_of(made)}
    assert points(page, name, name) == pytest.approx(expected, rel=1e-6)


def test_drawn_accuracy_and_staleness(page: Page, made: RunFolder) -> None:
    lines = (made.evaluations / "summary.jsonl").read_text().splitlines()
    held_out = {row["step"]: row["accuracy"] for row in map(json.loads, lines)}
    assert points(page, "accuracy", "eval/heldout") == pytest.approx(held_out)
    rows = metrics_of(made)
    training = {row["step"]: row["accuracy/mean"] for row in rows}
    assert points(page, "accuracy", "accuracy/mean") == pytest.approx(training, rel=1e-6)
    largest = {row["step"]: row["staleness/max"] for row in rows}
    assert points(page, "staleness", "staleness/max") == largest
    assert any(attributes.get("class") == "band" for _, attributes in page.elements)


def test_points_lie_where_their_values_say(page: Page) -> None:
    """A higher value is drawn higher on the page: checks the picture, not only its labels."""
    dots = page.all("circle", chart="reward/mean")
    ordered = sorted(dots, key=lambda dot: float(dot["data-value"]))
    heights = [float(dot["cy"]) for dot in ordered]
    assert heights == sorted(heights, reverse=True)
    assert len({dot["cx"] for dot in dots}) == len(dots)


def test_drawn_histograms_and_fates_are_the_journals(page: Page, made: RunFolder) -> None:
    record = read_run(made)
    bars = [bar for bar in page.all("rect", run="0") if "data-staleness" in bar]
    assert {int(b["data-staleness"]): int(b["data-count"]) for b in bars} == record.staleness
    fates = {r["data-fate"]: int(r["data-count"]) for r in page.all("rect") if "data-fate" in r}
    assert fates == record.groups
    drops = {r["data-drop"]: int(r["data-count"]) for r in page.all("tr") if "data-drop" in r}
    assert drops == record.drops
    shapes = [p for p in page.all("path", run="0") if "data-counts" in p]
    trained, finished = (sum(map(int, shape["data-counts"].split())) for shape in shapes)
    assert (trained, finished) == (72 * GROUP_SIZE, 76 * GROUP_SIZE)


def test_the_timeline_has_every_step(page: Page, made: RunFolder) -> None:
    slots = [g for g in page.all("g") if "data-trainer-waited" in g]
    rows = metrics_of(made)
    assert [int(slot["data-step"]) for slot in slots] == [row["step"] for row in rows]
    for slot, row in zip(slots, rows, strict=True):
        waited = row["time/consumer_wait_s"]
        assert float(slot["data-trainer-waited"]) == pytest.approx(waited, rel=1e-5)
        assert float(slot["data-trained"]) == pytest.approx(row["time/step_s"] - waited, rel=1e-5)


def test_no_text_of_a_run_becomes_markup(
    made: RunFolder, tmp_path: Path, browser: LivePage
) -> None:
    hostile = "</script ><!--<script></script\t><img id=pwned src=x onerror='document.documentElement.dataset.pwned=1'>"
    record = read_run(made)
    record.name = hostile
    record.config = record.missing = [hostile]
    record.drops = {hostile: 1}
    for sample in record.samples:
        sample.update(
            prompt=hostile, response=hostile, note=hostile, task=hostile, parts={hostile: 1}
        )
    (tmp_path / "page.html").write_text(render([record]))
    page = browser.dump(tmp_path / "page.html")
    assert page.root.get("data-ready") == "yes"
    assert "data-pwned" not in page.root
    assert not page.all("img")
    assert hostile in page.texts["response"]


def test_findings_stand_on_top_samples_are_grouped_and_no_chart_is_empty(
    made: RunFolder, tmp_path: Path, browser: LivePage
) -> None:
    """The made run's answers are in no verdict, its rewards are equal, and its KL is always 0."""
    run = RunFolder(shutil.copytree(made.path, tmp_path / "ill"))
    rows = [
        {k: v for k, v in row.items() if k != "accuracy/mean"}
        | {"groups/zero_variance": 1.0, "reward/std": 0.0, "reward/mean": 0.5, "kl/mean": 0.0}
        for row in metrics_of(run)
    ]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = run.evaluations / "summary.jsonl"
    lines = [json.loads(line) | {"accuracy": None} for line in summary.read_text().splitlines()]
    summary.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = browser.dump(write_report([run]))
    assert (page.root.get("data-ready"), page.root.get("data-error")) == ("yes", None)
    [finding] = page.all("article", finding="equal_rewards")
    assert finding["data-since"] == "1"
    tags = [attributes.get("class", "") for _, attributes in page.elements]
    assert tags.index("finding") < tags.index("tiles")
    charts = {picture.get("data-chart") for picture in page.all("svg")}
    assert "reward/mean" in charts
    assert not charts & {"accuracy", "kl/mean"}
    held_out = {line["step"]: line["reward"] for line in lines}
    assert points(page, "reward/mean", "eval/heldout") == pytest.approx(held_out)
    assert "absent" not in tags
    groups = [attributes for attributes in page.all("article") if "data-group" in attributes]
    shown = [div for div in page.all("div") if "data-rollout" in div]
    assert len(groups) == 6
    assert [div["data-rollout"].rpartition(".")[0] for div in shown[:GROUP_SIZE]] == [
        groups[0]["data-group"]
    ] * GROUP_SIZE
    rewards = [float(div["data-reward"]) for div in shown[:GROUP_SIZE]]
    assert rewards == sorted(rewards, reverse=True)


def test_several_runs_lie_over_each_other_and_one_may_be_empty(
    made: RunFolder, tmp_path: Path, browser: LivePage
) -> None:
    other = make_run(tmp_path / "other", steps=7, groups_per_step=2, seed=5)
    (tmp_path / "empty").mkdir()
    folders = [made, other, RunFolder(tmp_path / "empty")]
    page = browser.dump(write_report(folders, tmp_path / "all.html"))
    assert (page.root.get("data-ready"), page.root.get("data-error")) == ("yes", None)
    assert len(points(page, "reward/mean", "reward/mean", 0)) == 12
    assert len(points(page, "reward/mean", "reward/mean", 1)) == 7
    assert "empty: metrics.jsonl is not there: no step was logged" in "".join(
        text for texts in page.texts.values() for text in texts
    )


ACTIONS = """
const set = (selector, value) => {
  const field = document.querySelector(selector);
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const note = (name, value) => document.documentElement.setAttribute("data-" + name, value);
set('select[name="step"]', "12");
set('input[name="reward-from"]', "0.5");
note("kept", document.getElementById("sample-count").textContent.split(" ")[0]);
set('input[type="range"]', "0.9");
note("smooth", document.querySelectorAll("path.line.raw").length);
document.querySelector(".theme").click();
const picture = document.querySelector('svg[data-chart="reward/mean"]');
const box = picture.getBoundingClientRect();
picture.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 14, clientY: box.top + 20 }));
note("tip", document.querySelector(".tip").innerText);
"""


def test_filters_smoothing_theme_and_hover_values_work(
    made: RunFolder, tmp_path: Path, browser: LivePage
) -> None:
    text = write_report([made], tmp_path / "page.html").read_text()
    head, policy, rest = text.partition('<meta http-equiv="Content-Security-Policy"')
    text = head + "<meta " + rest.replace("</body>", f"<script>{ACTIONS}</script></body>")
    assert policy
    (tmp_path / "page.html").write_text(text)
    root = browser.dump(tmp_path / "page.html").root
    samples = read_run(made).samples
    right = Counter(s["step"] for s in samples if s["reward"] is not None and s["reward"] >= 0.5)
    assert int(root["data-kept"]) == right[12]
    assert int(root["data-smooth"]) >= 8
    assert root["data-theme"] in ("light", "dark")
    last = metrics_of(made)[-1]["reward/mean"]
    assert "step 12" in root["data-tip"]
    assert f"{last:.4g}"[:4] in root["data-tip"]
    assert "data-error" not in root
