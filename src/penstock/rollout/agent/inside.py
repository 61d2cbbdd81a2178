"""Runs inside an agent's own process, under any Python 3.9 or newer: standard library only.

    python inside.py DRIVER serve FILE.py:FUNCTION    one JSON line per rollout in, one out
    python inside.py DRIVER exec COMMAND ...          become the command

The process and those it starts end with the driver, whose process id is DRIVER, also if that is killed.
What the function prints goes to stderr. Before and after a tool call the process asks the driver, a line
out and a line in. `use_tool` is the one order of a tool call, in the driver too.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import sysconfig
import threading
import traceback
import types
import urllib.error
import urllib.request
from typing import Any


def end_with_driver(driver: int) -> None:
    """Fork a guardian that kills the process group when the driver, or this process, has ended."""
    ends = [os.pidfd_open(driver), os.pidfd_open(os.getpid())]
    if os.getppid() != driver:
        sys.exit("the driver has ended")
    if os.fork():
        for end in ends:
            os.close(end)
        return
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    select.select(ends, [], [])
    os.killpg(0, signal.SIGKILL)


class Refused(Exception):
    """The endpoint refused a request; `code` is OpenAI's."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


# -- tools ---------------------------------------------------------------------------------------


class ToolUnknown(Exception):
    """A tool was begun before a crash, and nobody knows whether it ended."""


async def use_tool(ask: Any, run: Any, call: Any, function: Any, unknown: Any) -> str:
    """Call a tool at most once, whatever happens to the driver; return its result as text.

    `ask` tells the driver what is about to happen or has happened, and returns its answer; `run` calls
    the function in a bounded time. `unknown` says what to do about a call that was only begun: "fail",
    "retry", "rebuild", or a function of the call's id that returns the result, or None if the call was
    never made.
    """
    call_id, name = str(call["id"]), str(call["function"]["name"])
    policy = unknown if isinstance(unknown, str) else "ask"
    begin = {"tool": "begin", "id": call_id, "name": name, "unknown": policy}
    reply = await ask(begin)
    if "asks" in reply:
        value = await run(unknown, call_id)
        if value is not None:
            text = result_text(value)
            await ask({"tool": "end", "id": call_id, "outcome": "done", "result": text})
            return text
        reply = await ask({**begin, "unknown": "retry"})
    if "done" in reply:
        return str(reply["done"])
    if "failed" in reply:
        raise recorded_error(reply["failed"])
    end = {"tool": "end", "id": call_id}
    try:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # refused below
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise TypeError(f"got the arguments {arguments!r}, allowed: a table")
        values = dict(arguments)
        if "idempotency_key" in inspect.signature(function).parameters:
            values["idempotency_key"] = str(call["id"])
        result = result_text(await run(function, **values))
    except Exception as error:  # whatever the user's tool raises is recorded, and raised again
        reason = f"{type(error).__name__}: {error}"
        await ask({**end, "outcome": "failed", "result": reason})
        raise
    await ask({**end, "outcome": "done", "result": result})
    return result


def result_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    """What JSON does not know, such as numpy's numbers: Python's own number or list, or else its text."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def recorded_error(reason: str) -> Exception:
    """An error with the class and the text of the recorded one, such as "ValueError: no such page"."""
    name, _, message = reason.partition(": ")
    base: Any = getattr(builtins, name, None)
    if not (isinstance(base, type) and issubclass(base, Exception)):
        base = RuntimeError
    methods = {"__init__": lambda self: None, "__str__": lambda self: message}
    try:
        error: Exception = type(name, (base,), methods)()
    except TypeError:  # a group of errors
        error = type(name, (RuntimeError,), methods)()
    return error


class Driver:
    """Asks the driver over the process's own pipes, one question at a time."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._asking = answers, threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._asking:  # the driver answers at once: it only writes to its journal
            self.send(message)
            reply = json.loads(sys.stdin.readline() or '{"error": "the driver has ended"}')
        if "unknown" in reply:
            raise ToolUnknown(reply["unknown"])
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return dict(reply)


async def run_here(limit: float, function: Any, /, *positional: Any, **keywords: Any) -> Any:
    """Call a tool in this process; one that is not async is interrupted by a signal when it is late."""
    late = f"no result after {limit:g} s (tool_timeout_s)"
    if inspect.iscoroutinefunction(function):
        try:
            return await asyncio.wait_for(function(*positional, **keywords), limit)
        except asyncio.TimeoutError:  # noqa: UP041 (another class before Python 3.11)
            raise TimeoutError(late) from None
    if threading.current_thread() is not threading.main_thread():
        return function(*positional, **keywords)

    def interrupt(*_: Any) -> None:
        raise TimeoutError(late)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return function(*positional, **keywords)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- the model -----------------------------------------------------------------------------------


class Model:
    """The model that a sync function gets; `chat` and `tool` of an async function's are awaited."""

    def __init__(self, job: dict[str, Any], driver: Driver) -> None:
        self.base_url, self.api_key = job["base_url"], job["api_key"]
        self.name, self.seed, self.earned = job["name"], job["seed"], 0.0
        self._driver, self._limit = driver, job["tool_timeout_s"]

    def tool(self, call: Any, function: Any, unknown: Any = "fail") -> Any:
        """The result of a tool call as text; the journal has it before and after the call."""
        return asyncio.run(self._use(call, function, unknown))

    async def _use(self, call: Any, function: Any, unknown: Any) -> str:
        run = functools.partial(run_here, self._limit)
        return await use_tool(self._driver.ask, run, call, function, unknown)

    def reward(self, value: float) -> None:
        self.earned += float(value)

    def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Any:
        """The assistant's message."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if max_tokens:
            body["max_tokens"] = max_tokens
        request = urllib.request.Request(
            self.base_url + "/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": "Bearer " + self.api_key, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                message = json.load(answer)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            fault = json.loads(error.read() or b"{}").get("error", {})
            raise Refused(fault.get("message", str(error)), fault.get("code")) from None
        return {**message, "content": message["content"] or ""}


class AsyncModel(Model):
    """The model that an async function gets."""

    async def chat(self, messages: Any, tools: Any = None, max_tokens: int | None = None) -> Any:
        return await asyncio.to_thread(super().chat, messages, tools, max_tokens)

    async def tool(self, call: Any, function: Any, unknown: Any = "fail") -> Any:
        return await self._use(call, function, unknown)


# -- the process ---------------------------------------------------------------------------------


def load(target: str) -> Any:
    """The function that `file.py:name` or `module:name` names."""
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


def run(loop: asyncio.AbstractEventLoop, rollout: Any) -> Any:
    """The result of a coroutine, and end the tasks that it left.

    All rollouts of a process share one loop: client libraries keep connections from one to the next.
    """
    try:
        return loop.run_until_complete(rollout)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))


def call(
    function: Any, job: dict[str, Any], driver: Driver, loop: asyncio.AbstractEventLoop
) -> dict[str, Any]:
    """Call the function for one rollout; return what the driver gets."""
    task = types.SimpleNamespace(**job["task"])
    try:
        if inspect.iscoroutinefunction(function):
            model: Model = AsyncModel(job, driver)
            result = run(loop, function(task, model, **job["options"]))
        else:
            model = Model(job, driver)
            result = function(task, model, **job["options"])
        result = json.loads(json.dumps(result, default=_as_json))
        return {"result": result, "earned": model.earned}
    except Exception as error:  # whatever the user's function raises is its rollout's outcome
        traceback.print_exc()  # to stderr, which the driver keeps
        return {"error": f"{type(error).__name__}: {error}{place_of(error)}"}


def place_of(error: BaseException) -> str:
    """ " (file:line)" of the user's code that raised; empty if there is none."""
    libraries = (__file__, *(sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")), "<")
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""


def serve(target: str) -> None:
    """Answer one line after another until the driver closes the pipe."""
    driver = Driver(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what the agent prints
    try:
        function = load(target)
    except Exception as error:  # whatever the user's module raises is why no rollout can begin
        driver.send({"refused": f"{type(error).__name__}: {error}"})
        return
    kind = "async" if inspect.iscoroutinefunction(function) else "sync"
    driver.send({"ready": kind})
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for line in iter(sys.stdin.readline, ""):
        driver.send(call(function, json.loads(line), driver, loop))


if __name__ == "__main__":
    # a script's folder comes first: `import gym` of an agent would find the module beside this file
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    end_with_driver(int(sys.argv[1]))
    if sys.argv[2] == "exec":
        os.execvp(sys.argv[3], sys.argv[3:])
    serve(sys.argv[3])
