"""A completions server that echoes the log-probs of a prompt, as vLLM does, over a model of this process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from penstock.data.chat import load_tokenizer


class EchoServer:
    """Answers over a socket; `faults` are given first: a status, or the text of an answer."""

    def __init__(self, model: Path, tokenizer: str, *faults: int | str) -> None:
        from transformers import AutoModelForCausalLM

        self.faults, self.bodies = list(faults), list[dict[str, Any]]()
        self.keys: list[str | None] = []
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._tokenizer = load_tokenizer(tokenizer)
        self._lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.keys.append(self.headers["Authorization"])
                status, text = outer._answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> EchoServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        with self._lock:
            self.bodies.append(body)
            is_scored = isinstance(body["prompt"], list) and len(self.bodies) > 2  # not the start's
            fault = self.faults.pop(0) if self.faults and is_scored else None
            if isinstance(fault, int):
                return fault, b"{}"
            if fault is not None:
                return 200, fault.encode()
            assert path == "/v1/completions"
            assert body["echo"]
            assert body["model"] == "big"
            return 200, json.dumps({"choices": [self._choice(body["prompt"])]}).encode()

    def _choice(self, prompt: list[int] | str) -> dict[str, Any]:
        """The prompt's tokens with their log-probs, and one more, which was sampled."""
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False)
        ids = torch.tensor([*prompt, 1])
        with torch.no_grad():
            rows = self._model(ids[None]).logits[0, :-1].log_softmax(-1)
        values = rows.gather(-1, ids[1:, None])[:, 0].tolist()
        names = [f"token_id:{token}" for token in ids.tolist()]
        return {"text": "", "logprobs": {"tokens": names, "token_logprobs": [None, *values]}}
