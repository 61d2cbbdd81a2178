"""Whose turn it is: clients share the trainer and the engines, whatever each of them has asked for."""

from __future__ import annotations

from collections import OrderedDict, deque

from penstock.store.command_log import Command


class Turns:
    """Commands that may run: owners take turns, and then the lines of an owner."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, deque[Command]]] = OrderedDict()

    def add(self, command: Command) -> None:
        lines = self._owners.setdefault(command.owner, OrderedDict())
        lines.setdefault(command.line, deque()).append(command)

    def holds(self, line: str) -> bool:
        """Whether a command of this line waits for its turn."""
        return any(line in lines for lines in self._owners.values())

    def next(self) -> Command | None:
        """The command whose turn it is; its owner and its line are the last ones then."""
        if not self._owners:
            return None
        owner, lines = self._owners.popitem(last=False)
        line, commands = lines.popitem(last=False)
        command = commands.popleft()
        if commands:
            lines[line] = commands
        if lines:
            self._owners[owner] = lines
        return command
