"""code: a response is right when its program passes the prompt's tests.

Runs in sandboxes on this machine or on verification servers. Broken test cases and servers that do not
answer make the rollout fail; only a verdict gives a value.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from penstock.config.secrets import from_environment
from penstock.errors import RewardError, SandboxError
from penstock.reward.protocol import Extract, Reward, ValueOptions
from penstock.reward.retrying_client import RetryingClient
from penstock.reward.sandbox.inside.judging import PASS
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import ROUTE, TOKEN_VARIABLE, SandboxSettings
from penstock.reward.sandbox.verify import Verdict, read_tests, verify
from penstock.types import Prompt, Rollout, Score

# possessive repeats, so that no text of a model takes more than linear time
_FENCE = re.compile(r"(?P<fence>`{3,}+|~{3,}+)\s*+(?P<language>[^\s`{]*+)[^`]*+$")
_PYTHON = frozenset({"python", "python3", "py", "py3"})
_CODES = frozenset(map(repr, (1, 0, -1, -2)))  # of a server's verdict


class CodeOptions(ValueOptions):
    credit: Literal["all", "share"] = "all"
    """all: every test must pass; share: the value grows with the share of tests that pass."""
    source: Literal["block", "response"] = "block"
    """block: the last fenced python block; response: the whole text is the program."""
    timeout_s: float = Field(6.0, gt=0)
    """Wall time of one test."""
    servers: tuple[str, ...] = ()
    """URLs of verification servers, with or without /check_correctness; empty: sandboxes on this machine."""
    token_variable: str = TOKEN_VARIABLE
    """Environment variable that holds the servers' bearer token; the default may be unset."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Longest wait for one reply of a server."""
    retries: int = Field(5, ge=0)
    """Further attempts when a server does not answer."""
    sandbox: SandboxSettings = SandboxSettings()
    """Limits of sandboxes on this machine; see docs/rewards.md."""


class CodeReward(Reward):
    """Consumes finished rollouts, runs their programs, produces a Score with a code per test."""

    Options = CodeOptions
    lowest_when_truncated = True

    def __init__(self, options: CodeOptions, *, max_tokens: int) -> None:
        self._settings = options
        self._pool = SandboxPool(options.sandbox)
        self._threads: ThreadPoolExecutor | None = None
        self._client: VerificationClient | None = None
        if options.servers:
            self._client = VerificationClient(
                options.servers,
                token=from_environment(
                    "token_variable", options.token_variable, default=TOKEN_VARIABLE
                ),
                request_timeout_s=options.request_timeout_s,
                retries=options.retries,
            )

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Run the program of one response against the prompt's tests."""
        read_tests(prompt.test_cases)  # broken test cases are a fault, whatever the response is
        if rollout.finish_reason == "length":
            return self._score(False, 0.0, "truncated")
        in_block = self._settings.source == "block"
        extract = python_block(rollout.text) if in_block else Extract(rollout.text, True)
        if extract.answer is None:
            return self._score(extract.format_ok, 0.0, extract.note)
        verdict = await self._verify(prompt, extract.answer)
        share = verdict.result.count(PASS) / len(verdict.result)
        score = self._score(extract.format_ok, share, _note(verdict))
        return replace(score, parsed=extract.answer, tests=tuple(verdict.result))

    async def _verify(self, prompt: Prompt, source: str) -> Verdict:
        assert prompt.test_cases is not None
        stop = self._settings.credit == "all"
        if self._client is not None:
            return await self._client.check(
                prompt.test_cases, source, self._settings.timeout_s, stop
            )
        if self._threads is None:
            workers = self._settings.sandbox.workers
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="code")
        return await asyncio.get_running_loop().run_in_executor(
            self._threads,
            verify,
            self._pool,
            prompt.test_cases,
            source,
            self._settings.timeout_s,
            stop,
        )

    def _score(self, format_ok: bool, share: float, note: str) -> Score:
        settings = self._settings
        earned = share if settings.credit == "share" else float(share == 1.0)
        value = settings.wrong + earned * (settings.right - settings.wrong)
        parts = {"share": share}
        return Score(
            value=value, parts=parts, format_ok=format_ok, answer_ok=share == 1.0, note=note
        )

    async def close(self) -> None:
        """End the sandboxes and connections."""
        if self._client is not None:
            await self._client.close()
        pool, self._pool = self._pool, SandboxPool(self._settings.sandbox)
        threads, self._threads = self._threads, None
        # first, so that running programs end with their sandboxes
        await asyncio.to_thread(pool.close)
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)


class VerificationClient(RetryingClient):
    """Consumes solutions and test cases, produces the verdicts of a server."""

    def __init__(self, urls: Sequence[str], **settings: Any) -> None:
        super().__init__("verification server", urls, ROUTE, unreachable=SandboxError, **settings)

    async def check(
        self,
        test_cases: Mapping[str, Any],
        source: str,
        timeout_s: float,
        stop_at_failure: bool = False,
    ) -> Verdict:
        """The verdict of the first server that answers; raise SandboxError if none does."""
        request = {
            "in_outs": dict(test_cases),
            "generation": source,
            "timeout": timeout_s,
            "stop_at_failure": stop_at_failure,
        }
        url, reply = await self.ask(request)
        try:  # any other form is refused, so that a protocol error never looks like a zero
            fields = json.loads(reply)
            result, metadata = fields["result"], fields["metadata"]
        except (ValueError, TypeError, KeyError):
            raise RewardError(f"verification server {url}: the reply is not a verdict") from None
        valid = isinstance(result, list) and bool(result) and set(map(repr, result)) <= _CODES
        if not valid or not isinstance(metadata, list) or len(metadata) != len(result):
            raise RewardError(f"verification server {url}: got result {str(result)[:100]}")
        return Verdict(result, metadata)


def _note(verdict: Verdict) -> str:
    if verdict.passed:
        return f"{len(verdict.result)} of {len(verdict.result)} tests pass"
    index = next(i for i, code in enumerate(verdict.result) if code != PASS)
    reason = str(verdict.metadata[index].get("note", ""))[:200]
    passed = verdict.result.count(PASS)
    return f"{passed} of {len(verdict.result)} tests pass; test {index}: {reason}"


def python_block(text: str) -> Extract:
    """The last fenced python block; without one, the last fence that names no language."""
    blocks = list(_fenced_blocks(text))
    python = [body for language, body in blocks if language in _PYTHON]
    candidates = python or [body for language, body in blocks if not language]
    if not candidates:
        return Extract(None, False, "no fenced python block")
    return Extract(candidates[-1], True)


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    fence, language, body = "", "", list[str]()
    for line in text.split("\n"):
        bare = line.strip()
        if fence and bare.startswith(fence) and not bare.strip(fence[0]):
            yield language, "\n".join(body) + "\n"
            fence = ""
        elif fence:
            body.append(line)
        elif match := _FENCE.match(bare):
            fence, language, body = match["fence"], match["language"].lower(), []
