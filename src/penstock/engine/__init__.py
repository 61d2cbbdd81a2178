"""Inference engines: one protocol, several backends. The table names them; nothing heavy is imported here."""

ENGINES: dict[str, str] = {
    "transformers": "penstock.engine.transformers_engine:TransformersEngine",
    "vllm": "penstock.engine.vllm_engine:VllmEngine",
    "openai": "penstock.engine.openai_engine:OpenAIEngine",
}
