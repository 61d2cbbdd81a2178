"""Token ids to text by a table, for tokenizers that decode each token by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter stands for in a byte-level vocabulary (that of GPT-2)."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    moved = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in shown} | moved


_BYTES = _byte_of_letter()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:  # an added token with other letters stands for itself
        return token.encode()


_DECODERS: dict[str, Callable[[str], bytes]] = {"ByteLevel": _byte_level, "Fuse": str.encode}


class TokenText(dict[int, bytes]):
    """The bytes of each token that was seen; a new token is read from the tokenizer.

    A run decodes every response, and asking the tokenizer was a third of the driver's work. Byte-level
    tokenizers (Qwen, Llama 3, GPT) and those that only join their tokens decode each token by itself;
    all others are asked. Special tokens stay, and nothing is cleaned up.
    """

    def __init__(self, backend: Any, dropped: Collection[int]) -> None:
        super().__init__()
        self._dropped, self._size = dict.fromkeys(dropped, b""), -1
        self._token_of, self._decode = backend.id_to_token, _DECODERS[_kind(backend)]
        self._count_tokens = backend.get_vocab_size

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)  # None: a row of the model's head that stands for no token
        self[token_id] = text = b"" if token is None else self._decode(token)
        return text

    def join(self, token_ids: list[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become the replacement character."""
        if (size := self._count_tokens()) != self._size:  # tokens were added: read all again
            self.clear()
            self.update(self._dropped)
            self._size = size
        return b"".join(map(self.__getitem__, token_ids)).decode("utf-8", "replace")


def has_table(backend: Any) -> bool:
    """Whether `TokenText` can decode for a tokenizer of the tokenizers package."""
    return _kind(backend) in _DECODERS


def _kind(backend: Any) -> str:
    return type(getattr(backend, "decoder", None)).__name__
