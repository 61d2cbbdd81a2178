"""Training: from a batch of groups to one update of the policy, and its checkpoint state.

A new per-step metric goes into `metrics.py`. May import algo, weights, models and data; it knows
no engine, no journal and no process but its own ranks.
"""
