"""The engine that ships, which knows what a judge should say: the longer response is better."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.engine.transformers.engine import TransformersEngine
from penstock.types import VersionSegment

JUDGING_ENGINE = f"{__file__}:JudgingEngine"


class JudgingEngine(TransformersEngine):
    """Answers the prompts of a judge with a verdict, and samples for all others."""

    _chat: ChatTemplate | None = None

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        verdicts = [self._verdict(request) for request in requests]
        if None in verdicts:
            return await super().generate_many(requests)
        return [verdict for verdict in verdicts if verdict is not None]

    def _verdict(self, request: GenerationRequest) -> Generation | None:
        self._chat = self._chat or ChatTemplate(load_tokenizer("demo"))
        text = self._chat.decode_prompt(request.prompt_ids)
        word = re.search(r"VERDICT-\w+:", text)
        if word is None:
            return None
        material: dict[str, Any] = json.loads(text[text.index('{"question"') :].split("<assis")[0])
        lengths = [len(response) for response in material["responses"]]
        best_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        order = ", ".join(str(number + 1) for number in best_first)
        ids = self._chat.encode_text(f"I counted.\n{word[0]} {order}").astype(np.int32)
        zeros_N, segments = np.zeros(len(ids), np.float32), (VersionSegment(0, len(ids)),)
        return Generation(request.request_id, ids, zeros_N, segments, "stop")
