"""The report in a real browser: the drawn values are the run's, no script fails, no text becomes markup."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.inspection.dashboard.views import spread_groups
from penstock.inspection.record import read_run
from penstock.inspection.report import write_report
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


def view(browser: LivePage, report: Path, tab: str, drawn: str) -> Page:
    """One view of a report, once `drawn` is in it."""
    browser.open("about:blank")
    browser.open(f"{report.absolute().as_uri()}#/run/0/{tab}")
    browser.until(f"document.querySelectorAll({json.dumps(drawn)}).length > 0")
    return browser.shown()


@pytest.mark.slow
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


def test_every_step_shows_how_long_each_side_waited(page: Page, made: RunFolder) -> None:
    rows = metrics_of(made)
    for side, name in (("trainer", "consumer"), ("producer", "producer")):
        waits = {
            row["step"]: min(1.0, row[f"time/{name}_wait_s"] / row["time/step_s"]) for row in rows
        }
        assert points(page, "waited", f"waited/{side}") == pytest.approx(waits, rel=1e-5)


def test_settings_and_a_run_without_a_timeline_are_shown(
    made: RunFolder, browser: LivePage
) -> None:
    report = write_report([made])
    page = view(browser, report, "settings", ".config")
    assert "groups_per_step = 6" in "".join(page.texts["config card"])
    page = view(browser, report, "timeline", ".lanes .absent")
    assert "data-error" not in page.root


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
    page = view(browser, run.path / "report.html", "samples", ".group")
    groups = [attributes for attributes in page.all("article") if "data-group" in attributes]
    assert len(groups) == 30
    answers = browser.value(
        "[...document.querySelector('.group').querySelectorAll('.sample')]"
        ".map((sample) => [sample.dataset.rollout, +sample.dataset.reward])"
    )
    assert {name.rpartition(".")[0] for name, _ in answers} == {groups[0]["data-group"]}
    rewards = [reward for _, reward in answers]
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
    settings = [row["data-setting"] for row in page.all("tr") if "data-setting" in row]
    assert {"seed", "train.steps"} <= set(settings)
    assert "empty: metrics.jsonl is not there: no step was logged" in "".join(
        text for texts in page.texts.values() for text in texts
    )


SET = """
window.set = (selector, value) => {
  const field = document.querySelector(selector);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
"""


def test_smoothing_theme_and_hover_values_work(made: RunFolder, browser: LivePage) -> None:
    view(browser, write_report([made]), "overview", 'svg[data-chart="reward/mean"]')
    tip = browser.value(
        """(() => {
          const picture = document.querySelector('svg[data-chart="reward/mean"]');
          const box = picture.getBoundingClientRect();
          picture.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 14, clientY: box.top + 20 }));
          return document.querySelector(".tip").innerText;
        })()"""
    )
    assert "step 12" in tip
    assert f"{metrics_of(made)[-1]['reward/mean']:.4g}"[:4] in tip
    browser.value(f"(() => {{ {SET} set('input[type=range]', '0.9'); }})()")
    assert browser.value("document.querySelectorAll('path.line.raw').length") >= 8
    browser.value("document.getElementById('theme').click()")
    root = browser.shown().root
    assert root["data-theme"] in ("light", "dark")
    assert "data-error" not in root


def test_samples_are_chosen_by_step_outcome_and_words(made: RunFolder, browser: LivePage) -> None:
    view(browser, write_report([made]), "samples", ".group")
    groups = spread_groups(made)["groups"]
    of_step = [group for group in groups if group["answers"][0]["step"] == 12]
    browser.value(f"(() => {{ {SET} set('input[name=step]', '12'); }})()")
    browser.until(f"document.querySelectorAll('.group').length === {len(of_step)}")
    browser.value("set('input[name=step]', ''), set('select[name=state]', 'dropped')")
    browser.until("document.querySelectorAll('.group.dropped').length === 3")
    browser.value("set('input[name=words]', 'words that no answer has')")
    browser.until("document.querySelectorAll('.group').length === 0")
    assert "data-error" not in browser.shown().root
