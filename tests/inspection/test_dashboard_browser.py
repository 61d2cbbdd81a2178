"""The dashboard in a real browser: every view, the keys, a phone, a run under way, and hostile texts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock
from penstock import AdamParams, Datum
from penstock.store.run_folder import RunFolder
from stages.browser import BROWSER, LivePage
from stages.dashboard_server import serving
from stages.hostile_run import MARKUP, make_hostile_run
from stages.made_run import make_run, metrics_of
from stages.made_service import MadeService
from stages.tiny_run import TINY, CrashServer

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

READY = "document.documentElement.dataset.ready === 'yes'"
REWARD_POINTS = "circle[data-chart='reward/mean'][data-series='reward/mean']"
REWARD_LINES = "svg[data-chart='reward/mean'] path.line"
NO_ERROR = "document.documentElement.dataset.error || ''"


def title(name: str) -> str:
    return f"document.querySelector('h1').textContent === {json.dumps(name)}"


def count(selector: str) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "first", steps=5, groups_per_step=3)
    make_run(root / "second", steps=700, groups_per_step=1, seed=5)
    for step, right in ((0, False), (5, True)):
        line = {
            "prompt_id": "p",
            "prompt": [{"role": "user", "content": "What is 1+1?"}],
            "prediction": "2" if right else "3",
            "ans_valid": right,
            "reward": float(right),
        }
        (root / "first" / "eval" / f"heldout-step-{step}.jsonl").write_text(json.dumps(line) + "\n")
    (root / "first" / "timeline").mkdir()
    event = {"lane": "trainer", "what": "train", "start": 1.0, "end": 9.0}
    (root / "first" / "timeline" / "events.jsonl").write_text(json.dumps(event) + "\n")
    return root


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    with LivePage(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: LivePage) -> LivePage:
    """Return an empty page of usual size; what a page stores belongs to its server's port."""
    browser.open("about:blank")
    browser.resize(1280, 900)
    return browser


def ask_twice_and_be_answered_in_the_other_order(page: LivePage) -> None:
    """Samples of words that no answer has: none is shown, though an older question is answered later."""
    page.value(
        """(() => {
          const real = window.fetch;
          window.held = new Promise((hold) => {
            window.fetch = (path, how) => path.includes("order=oldest")
              ? new Promise((give) => hold(() => real(path, how).then((reply) => {
                  give(reply.clone());
                  return reply.text();
                })))
              : real(path, how);
          });
          window.ask = (order, words) => {
            document.querySelector("select[name=order]").value = order;
            document.querySelector("input[name=words]").value = words;
            document.querySelector("form.filters").dispatchEvent(new Event("input"));
          };
          ask("oldest", "");
        })()"""
    )
    page.value("window.held.then((answer) => void (window.answerLate = answer))")
    page.value("ask('newest', 'words that no answer has')")
    page.until(f"{count('.group')} === 0")
    drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.value(f"answerLate().then(() => {drawn})")
    assert page.value(count(".group")) == 0


@pytest.mark.slow
def test_every_view_is_drawn_and_the_keys_lead_through_them(runs: Path, page: LivePage) -> None:
    with serving(runs) as client:
        page.open(client.address)
        page.until(READY)
        page.until(f"{count('.row')} === 2")
        page.press("/")
        page.value("document.activeElement.value = 'first finished'")
        page.value("document.activeElement.dispatchEvent(new Event('input'))")
        page.until(f"{count('.row')} === 1")
        page.press("Enter")
        page.until(title("first"))
        page.press("Escape")
        page.press("Escape")
        page.until(f"{count('.row')} === 2")
        page.until(f"{count('svg[data-chart]')} > 6")
        points = page.value(
            f"[...document.querySelectorAll({json.dumps(REWARD_POINTS)})].map((c) => c.dataset.value)"
        )
        rows = metrics_of(RunFolder(runs / "first"))
        assert [float(value) for value in points] == [
            pytest.approx(row["reward/mean"], rel=1e-6) for row in rows
        ]
        page.press("2")
        page.until(f"{count('.group')} === 8")
        ranks = page.value(
            "[...document.querySelector('.group').querySelectorAll('.sample')].map((s) => +s.dataset.reward)"
        )
        assert ranks == sorted(ranks, reverse=True)
        page.press("n")
        page.press("n")
        assert page.value("[...document.querySelectorAll('.walk')][1].classList.contains('here')")
        ask_twice_and_be_answered_in_the_other_order(page)
        page.press("3")
        page.until(f"{count('.sides')} === 1")
        assert page.value("document.querySelector('.sides').innerText").split() == [
            *("step", "0", "0", "3"),
            *("step", "5", "1", "2"),
        ]
        page.press("4")
        page.until(f"{count('.flow li')} === 6 && {count('.events tr')} > 5")
        page.press("5")
        page.until(f"{count('canvas[data-lane=trainer]')} === 1")
        page.press("6")
        page.until("document.querySelector('.config').textContent.includes('groups_per_step = 3')")
        assert page.value(NO_ERROR) == ""


def test_a_key_that_comes_with_the_list_is_for_the_run_that_opens(
    runs: Path, page: LivePage
) -> None:
    with serving(runs) as client:
        page.open(client.address)
        press = "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'x' }))"
        page.until(f"{READY} && {press}")  # before the browser does anything else
        page.until(f"{count('.row.open input:checked')} === 1")
        assert page.value(NO_ERROR) == ""


@pytest.mark.slow
def test_runs_are_compared_and_a_long_one_is_thinned(runs: Path, page: LivePage) -> None:
    with serving(runs) as client:
        page.open(client.address)
        page.until(READY)
        for key in "xjxkxxc":
            page.press(key)
        page.until("document.querySelector('h1').textContent === '2 runs compared'")
        page.until(f"{count('tr[data-setting]')} === 3 && {count('.verdict')} === 1")
        keys = (
            "[...document.querySelectorAll('tr[data-setting]')].map((row) => row.dataset.setting)"
        )
        assert page.value(keys) == ["seed", "train.groups_per_step", "train.steps"]
        page.until(f"{count(REWARD_LINES)} >= 2")
        points = page.value(
            f"[...document.querySelectorAll({json.dumps(REWARD_LINES)})].map((p) => p.getAttribute('d').split('L').length)"
        )
        points = max(points)
        assert 300 < points <= 400
        assert page.value(NO_ERROR) == ""


@pytest.mark.slow
def test_a_phone_shows_the_list_or_one_run_and_dark_and_light(runs: Path, page: LivePage) -> None:
    page.resize(390, 844)
    shown = "getComputedStyle(document.getElementById('{}')).display !== 'none'"
    with serving(runs) as client:
        page.open(client.address)
        page.until(f"{READY} && {count('.row')} === 2")
        assert page.value(shown.format("list"))
        assert not page.value(shown.format("page"))
        page.value(
            "[...document.querySelectorAll('.row a')].find((a) => a.innerText.startsWith('first')).click()"
        )
        page.until(title("first"))
        page.until(f"{count('svg[data-chart]')} > 6")
        for key in "123456":
            page.press(key)
            page.until(f"document.querySelector('.tabs .on').title.endsWith('({key})')")
            assert page.value("document.documentElement.scrollWidth") == 390
        assert not page.value(shown.format("list"))
        colour = "getComputedStyle(document.body).backgroundColor"
        before = page.value(colour)
        page.press("t")
        assert page.value(colour) != before
        page.press("?")
        assert page.value("document.getElementById('help').open")
        page.press("Escape")
        page.value("document.getElementById('back').click()")
        page.until(shown.format("list"))
        assert page.value(NO_ERROR) == ""


GATED_REWARD = """
import fcntl

def score(rollout, prompt):
    if rollout.rollout_id.startswith("train:"):  # no trial before the run
        with open({gate!r}) as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # waits until the test has seen the run begin
    return float(rollout.seed % 2)
"""


@pytest.mark.slow
def test_a_run_under_way_appears_and_grows(
    tmp_path: Path, page: LivePage, server: CrashServer
) -> None:
    """From the command to the page: the row comes when the run begins, a point with every step."""
    gate, reward = tmp_path / "gate", tmp_path / "gated.py"
    gate.touch()
    reward.write_text(GATED_REWARD.format(gate=str(gate)))
    words = [
        word for word in TINY if not word.startswith(("run.", "train.steps", "tasks.train.rewards"))
    ]
    own = f"tasks.train.rewards=[{{type='{reward}:score'}}]"
    command = ["train", *words, own, "train.steps=3", f"run.dir={tmp_path}/runs", "run.name=fresh"]
    (tmp_path / "runs").mkdir()
    with (
        serving(tmp_path / "runs") as client,
        ThreadPoolExecutor(1) as beside,
        gate.open() as shut,  # closed first, which lets the run end
    ):
        fcntl.flock(shut, fcntl.LOCK_EX)
        page.open(client.address)
        page.until(
            f"{READY} && document.querySelector('.absent').textContent.includes('penstock train')"
        )
        run = beside.submit(server.run, *command)
        page.until("document.querySelector('.row').dataset.state === 'training'")
        page.until(title("fresh"))
        fcntl.flock(shut, fcntl.LOCK_UN)
        assert run.result() == 0, server.output()
        page.until("document.querySelector('.row').dataset.state === 'finished'")
        page.until(f"{count(REWARD_POINTS)} === 3")
        assert page.value(NO_ERROR) == ""


@pytest.mark.slow
def test_a_service_shows_its_models_and_draws_each_loss_when_it_is_there(
    tmp_path: Path, page: LivePage
) -> None:
    ids = [1, 5, 6, 7, 8, 9]
    datum = Datum(ids[:-1], {"target_tokens": ids[1:], "weights": [1.0] * 5})
    points = count("circle[data-chart='loss:sum']")
    with (
        penstock.Service("demo", folder=tmp_path / "mine") as service,
        serving(tmp_path) as client,
    ):
        first, second = (service.create_lora_training_client(rank=rank) for rank in (2, 4))
        losses = [model.forward_backward([datum], "cross_entropy") for model in (first, second)]
        shown = [loss.result().metrics["loss:sum"] for loss in losses]
        page.open(client.address)
        page.until(f"document.querySelector('.row')?.dataset.state === 'serving' && {points} === 2")
        assert page.value("document.querySelector('.row-facts').textContent").startswith(
            "2 models of demo"
        )
        rows = "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.innerText)"
        for model, row in zip((second, first), page.value(rows), strict=True):  # the newest first
            assert model.model_id in row
        values = "[...document.querySelectorAll('circle[data-chart]')].map((c) => +c.dataset.value)"
        assert sorted(page.value(values)) == [
            pytest.approx(loss, rel=1e-6) for loss in sorted(shown)
        ]
        second.optim_step(AdamParams(learning_rate=1e-3)).result()
        second.forward_backward([datum], "cross_entropy").result()
        page.until(f"{points} === 3 && {count('circle[data-chart=grad_norm]')} === 1")
        assert page.value(NO_ERROR) == ""
    with serving(tmp_path) as client:
        page.open(client.address)
        page.until("document.querySelector('.row').dataset.state === 'stopped'")


def test_no_text_of_a_hostile_service_becomes_markup(tmp_path: Path, page: LivePage) -> None:
    made = MadeService(tmp_path / "mine", model=MARKUP)
    model = made.model(MARKUP)
    made.fail(model, 1, MARKUP, MARKUP, MARKUP)
    made.wait(model, 2, MARKUP, MARKUP)
    made.close()
    with serving(tmp_path) as client:
        page.open(client.address)
        page.until(f"{count('.queue')} === 1 && {count('.events tr[data-outcome=failed]')} === 1")
        assert MARKUP[:200] in page.value("document.getElementById('page').textContent")
        assert page.value(count("img, iframe, base, object, embed")) == 0
        assert page.value(count("script")) == 2
        assert page.value("document.documentElement.dataset.pwned || ''") == ""
        assert page.value(NO_ERROR) == ""


def test_no_text_of_a_hostile_run_becomes_markup(tmp_path: Path, page: LivePage) -> None:
    make_hostile_run(tmp_path / "runs")
    with serving(tmp_path / "runs") as client:
        page.open(client.address)
        page.until(f"{READY} && {count('.row')} === 1")
        for key, drawn in {
            "1": "svg[data-chart]",
            "2": ".group",
            "3": ".filters",
            "4": ".events tr",
            "5": "canvas",
            "6": ".config",
        }.items():
            page.press(key)
            page.until(f"{count(drawn)} > 0")
            text = page.value("document.body.textContent")
            assert "pwned" in text
            if key == "2":
                assert MARKUP in text
            assert page.value(count("img, iframe, base, object, embed")) == 0
            assert page.value(count("script")) == 2  # the data, of which there is none, and our own
            assert page.value(count("a:not([href^='#/']):not([href^='/report/'])")) == 0
        assert page.value("document.documentElement.dataset.pwned || ''") == ""
        assert page.value(NO_ERROR) == ""
