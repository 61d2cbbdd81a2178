"""vLLM as an engine. `engine.py` is the only file of the project that imports vllm."""
