"""Inference engines: one protocol, one package per backend.

`protocol.py` is the contract, `ENGINES` the table; a new backend is one package and one table line.
May import weights and models. `workers/pool/` combines several engines into one; `reward/` scores.
"""

ENGINES: dict[str, str] = {
    "transformers": "penstock.engine.transformers.engine:TransformersEngine",
    "vllm": "penstock.engine.vllm.engine:VllmEngine",
    "openai": "penstock.engine.openai.engine:OpenAIEngine",
}
