"""A wait for many answers is one wait, open until the last of them."""

from __future__ import annotations

import asyncio

from penstock.errors import RunError
from penstock.waits import OpenWait, WaitInOrder, WaitKind, Waits


class Responder:
    """Answers its questions in order, when it is told to."""

    def __init__(self) -> None:
        self.waits = Waits()
        self.closed: list[OpenWait] = []
        self.waits.on_close(self.closed.append)
        self.lane = WaitInOrder(self.waits, "journal", WaitKind.SEND, "journal")
        self.marks: list[asyncio.Future[None]] = []
        self.is_closed = False

    def mark(self) -> asyncio.Future[None]:
        if self.is_closed:
            raise RunError("it is closed")
        self.marks.append(asyncio.get_running_loop().create_future())
        return self.marks[-1]

    def ask(self, detail: str) -> None:
        self.lane.asked(detail, self.mark)

    @property
    def open(self) -> list[str]:
        return [wait.detail for wait in self.waits.leaves()]


def test_the_wait_is_open_until_the_last_answer() -> None:
    async def main() -> None:
        responder = Responder()
        responder.ask("first")
        responder.ask("second")
        assert (responder.open, len(responder.marks)) == (["first"], 1)
        responder.marks[0].set_result(None)
        await asyncio.sleep(0)
        assert len(responder.marks) == 2, "the second was asked after the mark"
        assert len(responder.open) == 1
        responder.marks[1].set_result(None)
        await asyncio.sleep(0)
        assert (responder.open, len(responder.closed)) == ([], 2)
        responder.ask("third")
        assert responder.open == ["third"]

    asyncio.run(main())


def test_the_wait_is_seen_though_the_one_who_asked_waits_for_something_else() -> None:
    async def main() -> None:
        responder = Responder()
        responder.ask("group")
        with responder.waits.wait("engine-0", WaitKind.GENERATE, responder="engine-0"):
            assert sorted(wait.responder for wait in responder.waits.leaves()) == [
                "engine-0",
                "journal",
            ]

    asyncio.run(main())


def test_a_responder_that_fails_ends_the_wait() -> None:
    async def main() -> None:
        responder = Responder()
        responder.ask("first")
        responder.ask("second")
        responder.marks[0].set_exception(RunError("disk full"))
        await asyncio.sleep(0)
        assert (responder.open, len(responder.marks)) == ([], 1)

    asyncio.run(main())


def test_a_responder_that_was_closed_is_not_asked_again() -> None:
    async def main() -> None:
        responder, faults = Responder(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        responder.ask("first")
        responder.ask("second")
        responder.is_closed = True
        responder.marks[0].set_result(None)
        await asyncio.sleep(0)
        assert (responder.open, faults) == ([], [])

    asyncio.run(main())
