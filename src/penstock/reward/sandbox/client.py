"""Client of the verification server.

If no server can be reached it raises `SandboxError`: the rollout fails and is tried again later. Only a
server's own answer is a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import RewardError, SandboxError
from penstock.reward.retrying_client import RetryingClient
from penstock.reward.sandbox.verify import Verdict

ROUTE, BATCH_ROUTE = "/check_correctness", "/check_correctness_batch"
TOKEN_VARIABLE = "PENSTOCK_SANDBOX_TOKEN"


class VerificationClient:
    """Consumes solutions and test cases, produces the verdicts of a server."""

    def __init__(self, urls: Sequence[str], **settings: Any) -> None:
        """settings: those of a `RetryingClient`."""
        self._client = RetryingClient(
            "verification server", urls, ROUTE, unreachable=SandboxError, **settings
        )

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
        return _read_verdict(*await self._client.ask(request))

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()


def _read_verdict(url: str, reply: bytes) -> Verdict:
    """Read a reply; refuse any other form, so that a protocol error never looks like a zero."""
    try:
        fields = json.loads(reply)
        result, metadata = fields["result"], fields["metadata"]
    except (ValueError, TypeError, KeyError):
        raise RewardError(f"verification server {url}: the reply is not a verdict") from None
    valid = isinstance(result, list) and bool(result) and set(map(repr, result)) <= _CODES
    if not valid or not isinstance(metadata, list) or len(metadata) != len(result):
        raise RewardError(f"verification server {url}: got result {str(result)[:100]}")
    return Verdict(result, metadata)


_CODES = frozenset(map(repr, (1, 0, -1, -2)))
