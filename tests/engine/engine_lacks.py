"""What each engine cannot do. The contract tests honour it and docs/engines.md must say the same."""

CAPABILITIES = {
    "stop strings": "stop strings end a response",
    "weight updates": "new weights while it runs",
    "digest": "confirms the digest of what it loaded",
    "hold": "pause `keep`: running responses go on under new weights",
    "partials": "an aborted response comes back with its tokens so far",
    "live tokens": "token counts while a response is being made",
    "same bits": "a rollout has the same bits in any batch",
}

# by engine; for openai by what serves, as much depends on that
LACKS: dict[str, frozenset[str]] = {
    "transformers": frozenset(),
    "vllm": frozenset({"same bits"}),
    "openai, vLLM serves": frozenset({"same bits"}),
    "openai, others": frozenset({"digest", "same bits"}),
}
