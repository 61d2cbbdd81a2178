"""Any server that speaks /v1/completions with token ids, or several of them, as one engine."""
