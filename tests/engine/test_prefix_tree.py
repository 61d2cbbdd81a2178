"""The prefix tree against a plain list of all that was stored."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.transformers.prefix_tree import PrefixTree

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def insert(tree: PrefixTree, values: list[int]) -> None:
    """Store the prefixes of each token as what was computed for it."""
    for node in tree.path(ids(values)):
        if node.kv is None:
            tree.store(node, [values[: n + 1] for n in range(node.start, node.end)])


def read(tree: PrefixTree, values: list[int]) -> list[list[int]]:
    return [stored for kv, count in tree.read(ids(values)) for stored in kv[:count]]


def shared(first: list[int], second: list[int]) -> int:
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return [*equal, False].index(False)


@given(stored=st.lists(IDS), wanted=IDS)
def test_a_request_gets_its_longest_stored_prefix(
    stored: list[list[int]], wanted: list[int]
) -> None:
    tree: PrefixTree = PrefixTree(10**6)
    for values in stored:
        insert(tree, values)
    longest = max((shared(values, wanted) for values in stored), default=0)
    assert tree.known(ids(wanted)) == longest
    assert read(tree, wanted) == [wanted[: n + 1] for n in range(longest)]
    assert tree.tokens == len({tuple(v[: n + 1]) for v in stored for n in range(len(v))})


@given(stored=st.lists(IDS), most=st.integers(0, 12))
def test_it_holds_no_more_than_it_may_and_only_true_prefixes(
    stored: list[list[int]], most: int
) -> None:
    tree: PrefixTree = PrefixTree(most)
    for values in stored:
        insert(tree, values)
        tree.trim()
        assert tree.tokens <= most
        assert read(tree, values) == [values[: n + 1] for n in range(tree.known(ids(values)))]


def test_the_least_recently_used_branch_goes_first() -> None:
    tree: PrefixTree = PrefixTree(6)
    for values in ([1, 1, 2, 2], [1, 1, 3, 3]):
        insert(tree, values)
    read(tree, [1, 1, 2, 2])
    insert(tree, [4])
    tree.trim()
    assert [tree.known(ids(v)) for v in ([1, 1, 2, 2], [1, 1, 3, 3], [4])] == [4, 2, 1]
    tree.clear()
    assert (tree.tokens, tree.known(ids([4]))) == (0, 0)


def test_new_weights_in_the_first_turn_of_a_session_give_what_was_kept_back_once() -> None:
    tree = PrefixTree(100)
    root, prompt, turn = tree.root_of("session", ids([1, 2])), ids([1, 2]), ids([1, 2, 3])
    for node in tree.path(prompt, root):  # a prompt that others wait for
        tree.store(node, "of the prompt")
    assert tree.renew(keep_sessions=True) == ["of the prompt"]
    path = tree.end("session", root, turn, 2)
    assert [node.kv for node in path] == [None], "given back already"
    for node in path:
        tree.store(node, "of the turn")
    assert (tree.tokens, tree.known(turn, root), tree.known(turn)) == (2, 2, 0)
    assert tree.clear() == ["of the turn"]


class Stored:
    """What a runner stored, watched until nothing holds it."""

    def __getitem__(self, tokens: slice) -> Stored:
        return self


def test_a_running_request_keeps_nothing_of_a_cleared_tree() -> None:
    tree, stored = PrefixTree(100), Stored()
    root, watch = tree.root_of("session", ids([1])), weakref.ref(stored)
    for node in tree.path(ids([1, 2]), root):
        tree.store(node, stored)
    tree.path(ids([1, 3]), root)
    del node, stored
    tree.clear()
    gc.collect()
    assert watch() is None


def test_the_root_of_an_adapter_lives_as_long_as_something_is_stored_under_it() -> None:
    tree = PrefixTree(2)
    root = weakref.ref(tree.root_of("", ids([1]), "adapter"))
    gc.collect()
    assert root() is None, "nothing is stored and no request runs"
    for node in tree.path(ids([1, 2]), tree.root_of("", ids([1]), "adapter")):
        tree.store(node, [1, 2])
    root = weakref.ref(tree.root_of("", ids([1]), "adapter"))
    del node
    gc.collect()
    assert tree.known(ids([1, 2]), tree.root_of("", ids([1]), "adapter")) == 2
    insert(tree, [5, 6])
    tree.trim()  # room for the newest alone
    gc.collect()
    assert root() is None
