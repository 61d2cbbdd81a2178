"""Assert-style tests in one sandbox, the code they test in another. Inside the sandbox.

The tests' process holds `RemoteObject` stand-ins for the functions and objects of the solution; each use is a
message to the solution's process, and plain data comes back. So the solution never shares an
interpreter with the tests: it cannot see them, patch them, end them, or answer with an object that
equals everything.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

from penstock.sandbox.inside import codec
from penstock.sandbox.inside.wire import Closed, Pipe

_MUTABLE = (list, dict, set, bytearray)


def _call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "contains": operator.contains,
    "eq": operator.eq,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
}


class SolutionServer:
    """The solution's side: executes the tests' requests, one at a time."""

    def __init__(self, link: Pipe, namespace: dict[str, Any]) -> None:
        self._link, self._namespace = link, namespace
        self._objects: list[Any] = []

    def serve(self) -> None:
        """Answer requests until the tests close the connection."""
        while True:
            try:
                request = self._link.receive()
            except Closed:
                return
            self._link.send(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "names":
                found = {n: self._namespace[n] for n in request["names"] if n in self._namespace}
                return {"value": {name: self._encode(value) for name, value in found.items()}}
            arguments = [codec.decode(form, self._find) for form in request["args"]]
            value = self._encode(_OPERATIONS[request["op"]](*arguments))
            changed = arguments[1] if request["op"] == "call" else []
            return {"value": value, "args": [self._changed(argument) for argument in changed]}
        except BaseException as error:  # any error of the solution is reported to the tests
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"raise": names, "text": _text_of(error)}

    def _find(self, handle: int) -> Any:
        return self._objects[handle]

    def _encode(self, value: Any) -> Any:
        return codec.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self._objects.append(value)
        return {"object": [len(self._objects) - 1, callable(value)]}

    def _changed(self, argument: Any) -> Any:
        """Return the argument after the call, so that the tests see changes made in place."""
        return self._encode(argument) if type(argument) in _MUTABLE else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # a hostile __str__
        return "unprintable"


class SolutionError(Exception):
    """The solution raised something that is not a built-in exception."""


class SolutionGone(Exception):
    """The solution's process ended: it crashed, was killed, or left before the tests were over."""


class Connection:
    """The tests' side of the link."""

    def __init__(self, link: Pipe) -> None:
        self._link = link

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Return those of the names that the solution defines."""
        forms = self._ask({"op": "names", "names": wanted})["value"]
        return {name: codec.decode(form, self._stand_in) for name, form in forms.items()}

    def do(self, operation: str, *arguments: Any) -> Any:
        """Execute one operation in the solution; `call` also returns arguments changed in place."""
        forms = [codec.encode(argument, _handle_of) for argument in arguments]
        reply = self._ask({"op": operation, "args": forms})
        if operation == "call":
            for given, changed in zip(arguments[1], reply["args"], strict=True):
                if changed is not None:
                    _replace(given, codec.decode(changed, self._stand_in))
        return codec.decode(reply["value"], self._stand_in)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._link.send(request)
            reply = self._link.receive()
        except Closed:
            raise SolutionGone("the solution ended before the tests did") from None
        if "raise" in reply:
            raise _exception(reply["raise"], reply["text"])
        return reply

    def _stand_in(self, content: list[Any]) -> Any:
        handle, can_be_called = content
        return (RemoteFunction if can_be_called else RemoteObject)(self, int(handle))


def _handle_of(value: Any) -> Any:
    if isinstance(value, RemoteObject):
        return {"object": object.__getattribute__(value, "_handle")}
    raise codec.NotPlain(f"a {type(value).__name__} of the tests cannot be given to the solution")


def _replace(given: Any, changed: Any) -> None:
    if type(given) is not type(changed) or given == changed:
        return
    if isinstance(given, list | bytearray):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


def _exception(names: list[str], text: str) -> Exception:
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(text)
            except TypeError:
                break  # UnicodeDecodeError and its like want more arguments
    return SolutionError(f"{names[0]}: {text}")


class RemoteObject:
    """Stands for an object of the solution; equal only to other objects of the solution."""

    def __init__(self, connection: Connection, handle: int) -> None:
        object.__setattr__(self, "_do", connection.do)
        object.__setattr__(self, "_handle", handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("setitem", self, key, value)

    def __contains__(self, item: Any) -> bool:
        return self._do("contains", self, item) is True

    def __len__(self) -> int:
        return int(self._do("len", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._do("iter", self)
        while True:
            try:
                yield self._do("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._do("next", self)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._do("eq", self, other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_handle"))

    def __str__(self) -> str:
        return str(self._do("str", self))

    def __repr__(self) -> str:
        return str(self._do("repr", self))


class RemoteFunction(RemoteObject):
    """Stands for a callable of the solution."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", self, list(args), kwargs)
