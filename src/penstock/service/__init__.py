"""A service for training loops of users: the Tinker SDK's protocol, with every command in a log.

    HTTP (server.py) or Python (client.py) -> commands (core.py), logged first (store/command_log.py)
        -> trainer's thread: models.py (losses in batches.py)
        -> engines: samplers.py, adapters.py   <- chats (chat.py)

Engines, trainer and weights are those of `penstock train`. A command is durable before it is answered, commands
of a model run in the order of their numbers and once, and a killed server goes on from checkpoint and log.
"""

from __future__ import annotations
