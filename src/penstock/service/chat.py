"""Chats with the base model, as clients of OpenAI and Anthropic ask for them: a frozen judge, or an agent's model.

Each request has a session of its own (`rollout/agent/session.py`), for which the engine of the service samples in the
turns of the base. Nothing is logged: a request that is repeated is sampled again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import InferenceEngine
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.dialects import DIALECTS
from penstock.rollout.agent.endpoint import RequestError, respond
from penstock.rollout.agent.session import KeptCalls, Limits, Session
from penstock.service.core import ServiceCore
from penstock.service.samplers import sampling_params
from penstock.serving import json_response
from penstock.types import Rollout

_SAMPLING = ("temperature", "top_p", "top_k", "stop")
_MOST_S = 3600.0  # for one answer; a client gives up sooner, and its answer is sampled to the end


class Chats:
    """Consumes requests in one of `DIALECTS`, produces their responses."""

    def __init__(self, core: ServiceCore) -> None:
        self._core = core

    @cached_property
    def _bridge(self) -> Bridge:
        return Bridge(ChatTemplate.from_config(self._core.config.model))

    async def answer(self, request: Request) -> Response:
        """The response to a request; its error in the form that the client reads."""
        dialect = DIALECTS[request.url.path]
        try:
            _, response = await respond(dialect, self._open, request)
        except RequestError as refusal:
            return json_response(dialect.error(str(refusal), refusal.code), refusal.status)
        return response

    def _open(self, body: Any) -> Session:
        """The session of one request, with the sampling settings of its body."""
        fields = body if isinstance(body, Mapping) else {}
        self._core.check_base(fields.get("model") or self._core.base_names[0], "model")
        given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
        longest, seed = self._core.models.longest, fields.get("seed")
        seed = seed if isinstance(seed, int) else secrets.randbits(31)
        name, nothing = f"chat-{secrets.token_hex(8)}", np.zeros(0, np.int32)
        return Session(
            Rollout(rollout_id=name, prompt_ids=nothing, seed=seed),
            engine=cast(InferenceEngine, self._core.samplers),
            bridge=self._bridge,
            sampling=sampling_params(given, longest),
            limits=Limits(
                max_turns=1 << 30,
                max_context=longest,
                max_positions=longest,
                turn_timeout_s=_MOST_S,
            ),
            recorder=KeptCalls(),
        )
