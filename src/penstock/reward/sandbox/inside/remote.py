"""Assert-style tests in one sandbox, the code they test in another. Inside the sandbox.

The tests' process holds stand-ins for the functions and objects of the solution; each use is a message
to the solution's process, and a copy of plain data comes back. So the solution never shares an
interpreter with the tests: it cannot see them, patch them or end them. An object of the
solution's own class is reached by its attributes, methods and items; the tests cannot compare, count, search
or iterate the object itself, because then the solution's code would decide.

Every reply is data of an enemy: `Connection` takes only the shape that it asked for.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.reward.sandbox.inside import wire
from penstock.reward.sandbox.inside.wire import Closed, Malformed, Pipe

MAX_REPLY_BYTES = 8 << 20
_MUTABLE = (list, dict, set, bytearray)
_EMPTY: dict[None, None] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
CHANGED = "; the call changed its argument, and tests see arguments as they were before the call"


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
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
            try:
                self._link.send(self._answer(request))
            except Malformed as error:
                self._link.send({"raise": ["ValueError"], "text": f"the answer is {error}"})

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "names":
                known = self._namespace
                names = request["names"]
                values = [[self._encode(known[n])] if n in known else None for n in names]
                return {"value": values}
            arguments = [wire.decode(form, self._objects.__getitem__) for form in request["args"]]
            reply = {"value": self._encode(_OPERATIONS[request["op"]](*arguments))}
            if request["op"] == "call":
                after = [self._encode(a) if type(a) in _MUTABLE else None for a in arguments[1]]
                before = request["args"][1]
                reply["changed"] = [
                    None if form == old else form for form, old in zip(after, before, strict=True)
                ]
            return reply
        except BaseException as error:  # any error of the solution is reported to the tests
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                return {"raise": names, "text": str(error)[:500]}
            except Exception:  # a hostile __str__
                return {"raise": names, "text": "unprintable"}

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        if type(value) in _VIEWS:
            value = iter(value)
        kind = "function" if callable(value) else "object"
        self._objects.append(value)
        kind = "iterator" if hasattr(type(value), "__next__") else kind
        return {"object": [len(self._objects) - 1, kind]}


class SolutionError(Exception):
    """The solution raised something that is not a built-in exception."""

    __module__ = "builtins"  # notes show this short name


class Fault(BaseException):
    """Why a test cannot pass, whatever the test catches: no `except Exception` gets hold of it."""


class SolutionGone(Fault):
    """The solution's process ended: it crashed, was killed, or left before the tests were over."""


class OutOfProtocol(Fault):
    """The solution's process sent a reply that does not fit the request."""


class NotPlainAnswer(Fault):
    """The test needs plain data where the solution gave something else: a wrong answer."""


class Connection:
    """The tests' side of the link."""

    def __init__(self, link: Pipe) -> None:
        self._link = link
        self.fault: BaseException | None = None  # the first one; a test that has one does not pass
        self.note = ""  # what a failed test should say besides

    def names(self, names: list[str]) -> dict[str, Any]:
        """Those of the names that the solution defines."""
        forms = self._ask({"op": "names", "names": names})
        if type(forms) is not list or len(forms) != len(names):
            self.fail(OutOfProtocol("the names are not those that were asked for"))
        values = {}
        for name, form in zip(names, forms, strict=True):
            if form is not None:
                values[name] = self._decode(form)[0] if type(form) is list and form else self._bad()
        return values

    def do(self, operation: str, *arguments: Any, for_effect: bool = False) -> Any:
        """Execute one operation in the solution; `for_effect` changes arguments in place as it did."""
        forms = [wire.encode(argument, _handle_of) for argument in arguments]
        return self._decode(
            self._ask({"op": operation, "args": forms}, arguments[1] if for_effect else None)
        )

    def _ask(self, request: dict[str, Any], arguments: list[Any] | None = None) -> Any:
        if self.fault is not None:
            raise self.fault  # the link may be out of step
        try:
            self._link.send(request)
            reply = self._link.receive()
        except Closed:
            self.fail(SolutionGone("the solution ended before the tests did"))
        except Malformed as error:
            self.fail(OutOfProtocol(f"the solution's process sent {error}"))
        if reply.keys() == {"raise", "text"}:
            raise self._exception(reply["raise"], reply["text"], request["op"])
        called = request["op"] == "call"
        if reply.keys() != ({"value", "changed"} if called else {"value"}):
            self._bad()
        if called:
            self._see_changes(reply["changed"], request["args"][1], arguments)
        return reply["value"]

    def _see_changes(self, changed: Any, forms: list[Any], arguments: list[Any] | None) -> None:
        if type(changed) is not list or len(changed) != len(forms):
            self._bad()
        if arguments is None:
            self.note = CHANGED if any(form is not None for form in changed) else self.note
            return
        for argument, form in zip(arguments, changed, strict=True):
            if form is not None:
                _replace(argument, self._decode(form))

    def _decode(self, form: Any) -> Any:
        try:
            return wire.decode(form, self._stand_in)
        except wire.NotPlain as error:
            self.fail(NotPlainAnswer(f"the solution's answer is {error}"))

    def _stand_in(self, content: Any) -> Any:
        if type(content) is not list or len(content) != 2 or type(content[0]) is not int:
            self._bad()
        kind = _STAND_INS.get(content[1]) if type(content[1]) is str else None
        return (kind or self._bad())(self, content[0])

    def _exception(self, names: Any, text: Any, operation: str) -> Exception:
        """The built-in exception that the solution raised, or one that stands for it."""
        if type(names) is not list or type(text) is not str or len(names) > 100:
            self._bad()
        for name in names:
            kind = getattr(builtins, name, None) if type(name) is str else self._bad()
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is Exception:
                continue
            if issubclass(kind, StopIteration | StopAsyncIteration) and operation != "next":
                break  # it would end a loop of the tests, as a generator's PEP 479 says
            try:
                return kind(text[:500])
            except TypeError:
                break  # UnicodeDecodeError and its like want more arguments
        parts = (names[0][:100] if names else "", text[:500])
        return SolutionError(": ".join(filter(None, parts)))

    def _bad(self) -> NoReturn:
        self.fail(OutOfProtocol("the solution's process sent a reply of another shape"))

    def fail(self, fault: BaseException) -> NoReturn:
        """Keep the first fault, so that a test that catches it does not pass either."""
        self.fault = self.fault or fault
        raise fault


def _handle_of(value: Any) -> Any:
    if isinstance(value, RemoteObject):
        return {"object": object.__getattribute__(value, "_handle")}
    raise wire.NotPlain(f"a {type(value).__name__} of the tests cannot be given to the solution")


def _replace(argument: Any, changed: Any) -> None:
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


class RemoteObject:
    """Stands for an object of the solution, which is no value for the tests."""

    _connection: Connection
    _handle: int

    def __init__(self, connection: Connection, handle: int) -> None:
        object.__setattr__(self, "_connection", connection)
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

    def __str__(self) -> str:
        return self._text("str")

    def __repr__(self) -> str:
        return self._text("repr")

    def _text(self, operation: str) -> str:
        text = self._do(operation, self)
        return text if type(text) is str else self._connection._bad()


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: RemoteObject, *_: object) -> NoReturn:
        what = "an object of its own class where the test needs plain data"
        self._connection.fail(NotPlainAnswer(f"the solution gave {what} ({name})"))

    return refuse


def _refuse(kind: type[RemoteObject], names: str) -> None:
    for name in names.split():
        setattr(kind, f"__{name}__", _refusal(name))


class RemoteFunction(RemoteObject):
    """Stands for a callable of the solution."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", self, list(args), kwargs)


class RemoteIterator(RemoteObject):
    """Stands for a generator or another iterator: its items arrive as copies, one by one, once."""

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        if self._handle < 0:
            raise StopIteration
        try:
            return self._do("next", self)
        except StopIteration:
            object.__setattr__(self, "_handle", -1)
            raise

    def __contains__(self, value: object) -> bool:
        return any(item is value or item == value for item in self)


class RemoteInstance(RemoteObject):
    """Stands for any other object."""


_refuse(RemoteObject, "eq ne lt le gt ge hash bool int float index")
for _kind in (RemoteInstance, RemoteFunction):
    _refuse(_kind, "contains len iter next")
_STAND_INS = {"object": RemoteInstance, "function": RemoteFunction, "iterator": RemoteIterator}


def for_effect(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make a call whose value is not used: the tests see how the solution changed the arguments."""
    if isinstance(function, RemoteFunction):
        return function._do("call", function, list(args), kwargs, for_effect=True)
    return function(*args, **kwargs)
