"""Judging a model or recorded responses: evaluation passes, `penstock score`, `penstock generate`.

May import engines, rewards and data. Nothing here trains or changes weights.
"""
