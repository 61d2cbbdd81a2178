"""Runs inside an agent's own process, under any Python 3.9 or newer: standard library only.

    python inside.py PIPE serve FILE.py:FUNCTION    one JSON line per rollout in, one out
    python inside.py PIPE exec COMMAND ...          become the command

The process and those it starts end with the driver, also if that is killed: it holds the other end of
PIPE. What the function prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import types
import urllib.error
import urllib.request
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1


def end_with_driver(pipe: int) -> None:
    """Fork a guardian that kills this process and those it starts when the driver closes its end of a pipe.

    The kernel closes that end when the driver is killed. The guardian itself ends with this process.
    """
    if os.fork():
        os.close(pipe)
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


class Refused(Exception):
    """The endpoint refused a request; `code` is OpenAI's."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class Model:
    """The model that a sync function gets; `chat` of an async function's is awaited."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.base_url, self.api_key = given["base_url"], given["api_key"]
        self.name, self.seed, self.earned = given["name"], given["seed"], 0.0

    def reward(self, value: float) -> None:
        self.earned += float(value)

    def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Any:
        """Return the assistant's message."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if max_tokens:
            body["max_tokens"] = max_tokens
        message = self._post("/chat/completions", body)["choices"][0]["message"]
        return {**message, "content": message["content"] or ""}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.base_url + path,
            json.dumps(body).encode(),
            {"Authorization": "Bearer " + self.api_key, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            told = json.loads(error.read() or b"{}").get("error", {})
            raise Refused(told.get("message", str(error)), told.get("code")) from None


class AsyncModel(Model):
    """The model that an async function gets."""

    async def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Any:
        return await asyncio.to_thread(super().chat, messages, tools, max_tokens)


def load(target: str) -> Any:
    """Return the function that `file.py:name` or `module:name` names."""
    module_name, _, name = target.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("penstock_agent", module_name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["penstock_agent"] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(module_name)))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(module_name)
    return getattr(module, name)


def call(function: Any, given: dict[str, Any]) -> str:
    """Call the function for one rollout; return the line that the driver gets."""
    task = types.SimpleNamespace(**given["task"])
    try:
        if inspect.iscoroutinefunction(function):
            model: Model = AsyncModel(given)
            result = asyncio.run(function(task, model, **given["options"]))
        else:
            model = Model(given)
            result = function(task, model, **given["options"])
        return json.dumps({"result": result, "earned": model.earned})
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def serve(target: str) -> None:
    """Answer one line after another until the driver closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the agent prints
    try:
        function = load(target)
    except Exception as error:
        answers.write(json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        return
    kind = "async" if inspect.iscoroutinefunction(function) else "sync"
    answers.write(json.dumps({"ready": kind}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(call(function, json.loads(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    end_with_driver(int(sys.argv[1]))
    if sys.argv[2] == "exec":
        os.execvp(sys.argv[3], sys.argv[3:])
    serve(sys.argv[3])
