"""No secret reaches a file, an output or a command line: options name an environment variable."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock import cli
from penstock.config import Config
from penstock.config.secrets import refuse_secrets
from penstock.config.source import load_config
from penstock.engine.openai.server import Server
from penstock.errors import UserError
from penstock.reward.code import VerificationClient
from penstock.store.run_folder import create
from stages.tiny_run import TINY

SECRET = "open-sesame-9Q7xT2"


class EchoingServer(BaseHTTPRequestHandler):
    """A verification server that answers its first request with what it was sent, as some proxies do."""

    seen: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        given = self.headers["Authorization"]
        first = not self.seen
        self.seen.append(given)
        reply = {"result": [1], "metadata": [{"note": "fine"}]}
        body = f"refused: {given}".encode() if first else json.dumps(reply).encode()
        self.send_response(400 if first else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (EchoingServer,), {"seen": []})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", handler.seen
    listening.shutdown()
    thread.join()
    listening.server_close()


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def test_a_run_with_a_token_writes_and_prints_it_nowhere(
    server: tuple[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    url, seen = server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    line = {
        "messages": [{"role": "user", "content": "11+12"}],
        "test_cases": {"inputs": [""], "outputs": [""]},
    }
    Path("code.jsonl").write_text(json.dumps(line) + "\n")
    options = f"{{source='response', servers=['{url}'], token_variable='MY_TOKEN'}}"
    words = [
        *(word for word in TINY if "tasks.train" not in word),
        "train.steps=1",
        "sampling.max_tokens=40",
        "run.name=r",
        "tasks.train.data=code.jsonl",
        f"tasks.train.rewards=[{{type='code', options={options}}}]",
    ]
    assert penstock(monkeypatch, "train", *words) == 0
    assert seen
    assert set(seen) == {f"Bearer {SECRET}"}
    files = [path for path in (tmp_path / "runs" / "r").rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert any(b"refused: Bearer ***" in path.read_bytes() for path in files)  # in the journal
    assert SECRET not in "".join(capfd.readouterr())


def test_clients_of_servers_do_not_show_their_keys() -> None:
    urls = ["http://127.0.0.1:1"]
    assert SECRET not in repr(Server(urls[0], 1.0, SECRET))
    assert SECRET not in repr(VerificationClient(urls, token=SECRET))


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = create(load_config(None, [f"run.dir={tmp_path}"]).config)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "setting",
    [
        f"tasks.train.rewards=[{{type='code', options={{token='{SECRET}'}}}}]",
        f"tasks.train.rewards=[{{type='me.py:f', options={{judge_api_key='{SECRET}'}}}}]",
        f"engine.options.api_key={SECRET}",
        f"engine.options.headers={{Authorization='Bearer {SECRET}'}}",
        f"engine.options.urls=['http://me:{SECRET}@host:8000']",
        f"tasks.train.agent_options.judge=sk-{SECRET}-0123456789",
        f"tasks.train.agent_options.judge=gsk_{SECRET.replace('-', '')}0123456789",
        f"tasks.train.agent_options.judge=AIza{SECRET}0123456789",
        f"tasks.train.agent_options.judge=eyJhbGciOiJI.eyJzdWIiOiIx.{SECRET}",
        f"tasks.train.agent_options.words=['-H', 'Authorization: Bearer {SECRET}']",
        f"tasks.train.agent_options.command=['env', 'OPENAI_API_KEY=sk-{SECRET}0123456789', 'run']",
        f"tasks.train.agent_options.words=['-H', 'X-Api-Key: {SECRET}']",
        f"tasks.train.agent_options.command=['judge', '--api-key', '{SECRET}']",
        f"tasks.train.agent_options.command=['judge', '--token={SECRET}']",
        f"tasks.train.agent_options.judge=xai-{SECRET.replace('-', '')}0123456789",
        f"tasks.train.agent_options.judge='-----BEGIN PRIVATE KEY----- {SECRET}'",
        f"engine.options.headers={{x-api-key='{SECRET}'}}",
        f"engine.options.urls=['https://{SECRET}@host']",
        f"engine.options.judge='https://host/v1?api_key={SECRET}'",
        f"engine.options.judge='https://host/v1?a=1&token={SECRET}'",
        f"engine.options.judge='https://host/v1?key={SECRET}'",
        f"engine.options.judge='https://host/v1?sig={SECRET}'",
    ],
)
def test_a_secret_in_a_config_is_refused_and_not_repeated(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "config", "eval"):
        assert penstock(monkeypatch, command, setting) == 2
        said = "".join(capsys.readouterr())
        assert setting.partition("=")[0] in said
        assert "environment variable" in said
        assert SECRET not in said


def test_a_key_of_wandb_is_refused() -> None:
    with pytest.raises(UserError, match="got a secret"):
        refuse_secrets({"track": {"wandb": {"key": "0123456789abcdef" * 2 + "01234567"}}})


def test_a_config_made_in_python_cannot_bring_a_secret_into_a_run_folder(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path)}, "engine": {"options": {"password": SECRET}}}
    )
    with pytest.raises(UserError, match=r"engine\.options\.password: got a secret"):
        create(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "harmless",
    [
        {"stop_token": "<end>", "max_tokens": 4, "answer_key": "x", "token_variable": "MY_TOKEN"},
        {"path": "sk-models-of-our-team-2026"},
        {"command": ["judge", "--token-file", "/home/me/keys/token-2026", "--token", "$MY_TOKEN"]},
        {
            "rubric": "A good answer has no password, and names the token: 1 point for each, 3 at most."
        },
        {"url": "http://host:8000/v1", "text": "see https://a.b/c:d@e"},
        {"repository": "ssh://git@host/models", "page": "https://host/list?page=2&tokens=9"},
        {"revision": "0123456789abcdef0123456789abcdef01234567", "key": "question"},
    ],
)
def test_what_only_looks_like_a_secret_is_allowed(harmless: dict[str, object]) -> None:
    refuse_secrets({"options": harmless})


def test_a_variable_that_is_not_set_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    options = "{servers=['http://127.0.0.1:1'], token_variable='NOT_SET'}"
    setting = f"tasks.train.rewards=[{{type='code', options={options}}}]"
    assert penstock(monkeypatch, "train", setting) == 2
    assert "token_variable: got 'NOT_SET'" in capsys.readouterr().err
