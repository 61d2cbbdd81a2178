"""A prefix tree of token ids: which leading tokens of a request have keys and values already.

A node is a run of tokens behind those of its parent. The tree cuts it where two requests part. What is stored
for a node is the runner's: the tree knows tokens, the runner knows memory. Requests see the keys and values of
the newest weights; a session that goes on over new weights sees those of its own earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

_MOST_SESSIONS = 1 << 16  # one that is forgotten begins anew with the newest weights


@dataclass(slots=True, frozen=True)
class StoredKV:
    """Keys and values of tokens that follow each other, [layers, tokens, kv heads, size], and their experts."""

    keys: Tensor
    values: Tensor
    experts: Tensor  # int16 [layers, tokens, experts of a token]: number + 1; none are recorded: no columns

    def __getitem__(self, tokens: slice) -> StoredKV:
        """A copy: a view would keep the memory of all tokens."""
        parts = (self.keys, self.values, self.experts)
        return StoredKV(*(part[:, tokens].clone() for part in parts))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """A run of tokens, which follows `start` tokens of its ancestors."""

    ids: np.ndarray  # int32
    start: int
    parent: Node | None
    kv: Any = None  # what the runner stored, which slices by token; None: to be computed
    children: dict[int, Node] = field(default_factory=dict)  # by their first token

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def ancestors(self) -> list[Node]:
        """The nodes before this one, from the first; the root is none of them."""
        before: list[Node] = []
        node = self.parent
        while node is not None and node.parent is not None:
            before.append(node)
            node = node.parent
        return before[::-1]


class PrefixTree:
    """Consumes token ids and what is stored for them, produces the longest stored prefix."""

    def __init__(self, most_tokens: int) -> None:
        self.tokens = 0  # tokens that something is stored for
        self._most_tokens = most_tokens
        self._root = _new_root()
        # of adapters that something is stored for, or whose requests run
        self._adapter_roots = WeakValueDictionary[str, Node]()
        # of each session: where its last request found what was stored, and the number of its tokens
        self._sessions: dict[str, tuple[Node, int]] = {}
        # From the least recently used node on. A node is used after its descendants, so the first has none.
        self._by_use: dict[Node, None] = {}

    def known(self, ids: np.ndarray, root: Node | None = None) -> int:
        """The number of leading ids that something is stored for."""
        return sum(count for _, count in self._walk(ids, root))

    def read(self, ids: np.ndarray, root: Node | None = None) -> list[tuple[Any, int]]:
        """What is stored for the leading ids: (of a node, how many of its tokens), from the first."""
        found = list(self._walk(ids, root))
        self._use([node for node, _ in found])
        return [(node.kv, count) for node, count in found]

    def path(self, ids: np.ndarray, root: Node | None = None) -> list[Node]:
        """The nodes whose tokens together are `ids`; those without `kv` wait for `store`."""
        path, node, first = [], root or self._root, 0
        while first < len(ids):
            child = node.children.get(int(ids[first]))
            if child is None:
                child = Node(ids[first:].astype(np.int32), first, node)
                node.children[int(ids[first])] = child
            else:
                shared = _num_equal(child.ids, ids[first:])
                if shared < len(child.ids):
                    child = self._split(child, shared)
            path.append(child)
            node, first = child, child.end
        self._use(path)
        return path

    def store(self, node: Node, kv: Any) -> None:
        """Keep what was computed for a node, instead of what was stored before."""
        if node.kv is None:
            self.tokens += len(node.ids)
        node.kv = kv

    def root_of(self, session: str, ids: np.ndarray, adapter: str = "") -> Node:
        """Where a request finds what is stored: a session that goes on, where its last request did."""
        newest = self._adapter_roots.setdefault(adapter, _new_root()) if adapter else self._root
        root, length = self._sessions.get(session, (newest, 0))
        return root if len(ids) >= length else newest

    def end(self, session: str, root: Node, ids: np.ndarray, stored: int) -> list[Node]:
        """The nodes of the first `stored` tokens of a request that ended with `ids`.

        Its session goes on from it with a request that is no shorter.
        """
        if session:
            self._sessions[session] = root, len(ids)
            if len(self._sessions) > _MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return self.path(ids[:stored], root)

    def trim(self) -> list[Any]:
        """Forget the least recently used nodes until no more tokens are stored than may be."""
        forgotten = []
        while self.tokens > self._most_tokens:
            forgotten.append(self.forget_one())
        return forgotten

    def forget_one(self) -> Any:
        """Forget the least recently used node; return what was stored for it."""
        node = next(iter(self._by_use))
        assert node.parent is not None
        assert not node.children, "a node is used after its children"
        del self._by_use[node]
        del node.parent.children[int(node.ids[0])]
        self.tokens -= len(node.ids)
        return node.kv

    def renew(self, *, keep_sessions: bool) -> list[Any]:
        """New weights: sessions that go on keep what is stored, or it is forgotten and returned."""
        if keep_sessions and self._sessions:
            self._new_roots()
            return []
        return self.clear()

    def clear(self) -> list[Any]:
        """Forget everything, under the roots of running requests too; return what was stored."""
        forgotten = [node.kv for node in self._by_use if node.kv is not None]
        for node in self._by_use:
            assert node.parent is not None
            node.kv = None
            node.parent.children.clear()
        self._new_roots()
        self._sessions.clear()
        self._by_use.clear()
        self.tokens = 0
        return forgotten

    def _new_roots(self) -> None:
        self._root = _new_root()
        self._adapter_roots.clear()

    def _walk(self, ids: np.ndarray, root: Node | None) -> Iterator[tuple[Node, int]]:
        """Stored nodes along `ids`, each with the number of its tokens that are equal."""
        node, first = root or self._root, 0
        while first < len(ids):
            child = node.children.get(int(ids[first]))
            if child is None or child.kv is None:
                return
            equal = _num_equal(child.ids, ids[first:])
            yield child, equal
            if equal < len(child.ids):
                return
            node, first = child, child.end

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; return the first part, the parent of the rest."""
        assert node.parent is not None
        upper = Node(node.ids[:at], node.start, node.parent)
        if node.kv is not None:
            upper.kv, node.kv = node.kv[:at], node.kv[at:]
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.start, node.parent = node.ids[at:], node.start + at, upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _use(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._by_use.pop(node, None)
            self._by_use[node] = None


def _new_root() -> Node:
    return Node(np.zeros(0, np.int32), 0, None)


def _num_equal(first: np.ndarray, second: np.ndarray) -> int:
    """The number of leading ids that are equal."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size
