"""Chat templates and tokenizers: the only place where text becomes token ids and back.

Prompts are encoded once, with the generation prompt; sampled tokens are never tokenised again. Without
a chat template the contents of the messages are joined by line breaks, so a single message is its own
prompt. Does not cut prompts and does not know datasets. transformers is imported when first needed.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np

from penstock.config import ModelConfig
from penstock.config.demo import model_file, policy_path
from penstock.data.decoding_table import TokenText, has_table
from penstock.errors import UserError

Message = Mapping[str, Any]
_OWN_ARGUMENTS = frozenset({"messages", "add_generation_prompt", "tokenize"})  # set here
_OF_RECORDS = frozenset({"tools", "tool_calls"})  # the others are chat_template_kwargs
_PROBE = "probe7341"  # text that no template writes itself
TEMPLATE_LIMIT_S = 5.0  # of processor time for one conversation; templates need milliseconds
# by which a conversation may raise the most memory that the process has had
TEMPLATE_LIMIT_MIB = 1024
_CHECKS = 20  # of both limits, until the time is over
_LONG_TEXT, _LONG_FACTOR = 2**20, 10  # characters, and how many times as long as its conversation
# what a template raises; ValueError: templates with names, of which none is the default
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, MemoryError, RecursionError)
_CUT = "ꙮ⁂ꙮ"  # rendered text is tokenised in pieces: no token spans a cut, and templates print it
_TOKENIZER_OR_MODEL = ("tokenizer_config.json", "config.json")
_LONGEST_REASON = 300  # characters of what a library says of a tokenizer
_HUB_S = 5.0  # in which the hub must answer


def ask_hub(name: str, key: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Raise a UserError unless the hub has it; transformers would ask again for a minute and a half."""
    from huggingface_hub import constants, get_token

    if kind == "dataset":  # in the cache of the hub, or in that of the package datasets
        caches = Path(constants.HF_HUB_CACHE), Path(constants.HF_HOME) / "datasets"
        patterns = f"datasets--{name.replace('/', '--')}", f"{name.split('/')[0]}___*"
        found = (next(c.glob(p), None) for c, p in zip(caches, patterns, strict=True))
        is_here = constants.HF_HUB_OFFLINE or any(found)
    else:
        is_here = Path(name).is_dir() or any(model_file(name, file) for file in _TOKENIZER_OR_MODEL)
    if is_here or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return
    import httpx2

    what = f"{key}: got {name!r}, which is neither a folder nor in the cache of the hub"
    own = "model folder" if kind == "model" else "file that exists"
    allowed = f"allowed: a {own}, or a hub name owner/name"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what}, and HF_HUB_OFFLINE is set; {allowed}")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    address = f"{constants.ENDPOINT}/api/{kind}s/{name}"
    try:
        status = httpx2.get(address, headers=headers, timeout=_HUB_S).status_code
    except httpx2.HTTPError as error:
        raise UserError(
            f"{what}, and {constants.ENDPOINT} cannot be reached ({error}); {allowed}"
        ) from None
    if status in (401, 403, 404):
        raise UserError(
            f"{what}; the hub has no such {kind}, or not for you (HTTP {status}); {allowed}"
        )


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, download: bool = True
) -> Any:
    """Load the tokenizer of a folder or hub name; `demo` is the policy that ships with Penstock."""
    path = _folder_or_name(path)
    folder = Path(path).expanduser()  # looked at before transformers is imported
    looks_like_path = isinstance(path, Path) or str(path).startswith((".", "/", "~"))
    if folder.is_dir():
        known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        if not any((folder / name).is_file() for name in (*known, "vocab.txt")):
            raise UserError(
                f"tokenizer: got the folder {str(path)!r} without a tokenizer, "
                f"allowed: a folder with one of {', '.join(known)}; model.tokenizer names another folder"
            )
    elif folder.is_file() or looks_like_path:
        raise UserError(
            f"tokenizer: got {str(path)!r}, allowed: a folder that exists, or a hub name"
        )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    wrong_files = OSError, ValueError, KeyError, TypeError, AttributeError, ImportError
    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=not download
        )
    except (*wrong_files, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise UserError(
            f"tokenizer: got {str(path)!r}, allowed: a folder or hub name of a transformers "
            f"tokenizer ({reason})"
        ) from error


def _folder_or_name(path: str | Path) -> str | Path:
    if str(path) == "demo":
        return policy_path()
    return Path(path).expanduser() if str(path).startswith("~") else path


@contextmanager
def limits(what: str) -> Iterator[None]:
    """Raise UserError where a tokenizer's template or pattern computes too long or takes too much memory.

    By a signal, which only the main thread gets; a program's other threads have no such limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start, peak = time.thread_time(), _peak_mib()

    def refuse(got: str) -> NoReturn:
        raise UserError(
            f"{what}: got more than {got} for one conversation, allowed: a template that ends"
        )

    def check(number: int, frame: object) -> None:
        seconds = time.thread_time() - start  # the timer counts all threads
        if seconds > TEMPLATE_LIMIT_S:
            refuse(f"{TEMPLATE_LIMIT_S:g} s of processor time")
        if seconds > TEMPLATE_LIMIT_S / _CHECKS and _peak_mib() - peak > TEMPLATE_LIMIT_MIB:
            refuse(f"{TEMPLATE_LIMIT_MIB} MiB of memory")

    before = signal.signal(signal.SIGVTALRM, check)
    interval_s = TEMPLATE_LIMIT_S / _CHECKS
    signal.setitimer(signal.ITIMER_VIRTUAL, interval_s, interval_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak_mib() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)  # bytes there, KiB elsewhere


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its text as a list of one part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


class ChatTemplate:
    """Turns messages into prompt ids and response ids into text, for one tokenizer."""

    def __init__(self, tokenizer: Any, model: str = "") -> None:
        """`model` is the folder or hub name of the model that answers; empty: beside the tokenizer."""
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._model = model or str(getattr(tokenizer, "name_or_path", "") or "")

    @classmethod
    def from_config(cls, model: ModelConfig) -> Self:
        name = model.tokenizer or model.path
        if name != "demo":
            ask_hub(name, "model.tokenizer" if model.tokenizer else "model.path")
        tokenizer = load_tokenizer(name, trust_remote_code=model.trust_remote_code)
        return cls(tokenizer, str(_folder_or_name(model.path)))

    @cached_property
    def end_tokens(self) -> EndTokens:
        return EndTokens.find(self.tokenizer, self._model, self._end_of_turn())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a response, the tokenizer's own first; empty if nothing names one."""
        return self.end_tokens.ids

    @cached_property
    def _dropped(self) -> frozenset[int]:
        """The ids that are no part of a response's text."""
        around = (self.tokenizer.pad_token_id, self.tokenizer.bos_token_id)
        return frozenset((*self.eos_ids, *(token for token in around if token is not None)))

    @property
    def pad_id(self) -> int:
        """The padding id; without one, the end-of-sequence id, or 0."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else (self.eos_ids or (0,))[0]

    @property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary: no token covers more text."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @property
    def begin(self) -> np.ndarray:
        """The ids that the tokenizer puts before every text: its beginning-of-sequence id, or none."""
        added = self.tokenizer("", verbose=False)["input_ids"][:1]
        is_begin = added == [self.tokenizer.bos_token_id]
        return np.asarray(added if is_begin else [], dtype=np.int32)

    def encode(
        self,
        messages: Sequence[Message],
        system_prompt: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """The prompt's ids, int32, up to where the assistant's answer begins."""
        return self.encode_many([messages], system_prompt, arguments)[0]

    def encode_many(
        self,
        conversations: Iterable[Sequence[Message]],
        system_prompt: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> list[np.ndarray]:
        """Encode many conversations with one call of the tokenizer, which is several times faster."""
        self.check_variables(arguments or {})
        texts = [self.render(messages, system_prompt, arguments) for messages in conversations]
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=not self.has_template, verbose=False)
        added = 0 if self.has_template else self._added_behind
        return [
            self.encode_text(text)
            if _CUT in text
            else np.asarray(ids[: len(ids) - added], dtype=np.int32)
            for text, ids in zip(texts, encoded["input_ids"], strict=True)
        ]

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse a variable that the template does not read: it would be ignored in silence."""
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        for name in names:
            if name in _OWN_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", template):
                allowed = "a variable of the tokenizer's chat template"
                if not template:
                    allowed = "none, because the tokenizer has no chat template"
                where = "a record" if name in _OF_RECORDS else "chat_template_kwargs"
                raise UserError(f"{where}: got {name!r}, allowed: {allowed}")

    def encode_rendered(self, text: str) -> np.ndarray:
        """The ids of one rendered prompt, int32, as `encode` makes them."""
        return self.encode_text(text) if self.has_template else self.encode_plain(text)

    def encode_plain(self, text: str) -> np.ndarray:
        """The ids of a text that a response continues, int32: with what the tokenizer puts before every text."""
        ids = self.encode_text(text, add_special_tokens=True)
        return ids[: len(ids) - self._added_behind]

    @cached_property
    def _added_behind(self) -> int:
        """How many ids the tokenizer puts behind every text: an end, after which nobody answers, or none."""
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        return int(len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id)

    def render(
        self,
        messages: Sequence[Message],
        system_prompt: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text; add the system prompt if the messages have none.

        `arguments` are variables of the chat template, such as enable_thinking.
        """
        conversation = [dict(message) for message in messages]
        if system_prompt and not any(m.get("role") == "system" for m in conversation):
            conversation.insert(0, {"role": "system", "content": system_prompt})
        if not self.has_template:
            return "\n".join(str(message["content"]) for message in conversation)
        return self._apply_template(conversation, arguments or {})

    def encode_answered(self, messages: Sequence[Message], answer: str) -> np.ndarray:
        """The ids of a conversation and the answer that ends it, int32, for a model that judges it."""
        answered = [*map(dict, messages), {"role": "assistant", "content": answer}]
        if not self.has_template:
            answered[-1]["content"] = self._as_content(answer).replace(_CUT, " ")
            return self.encode_text(self.render(answered), add_special_tokens=True)
        text = self._apply_template(answered, {}, add_generation_prompt=False)
        return self.encode_rendered(text)

    def render_answer(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None
    ) -> tuple[str, str, str]:
        """The prompt, the last message as the template continues it, and what the template writes after that.

        Special tokens that the message spells are special: a model that learns the answer is to write them.
        """
        content, prompt = str(messages[-1]["content"]), self.render(messages[:-1], "", arguments)
        if not self.has_template:
            return prompt, content, ""

        def rendered(content: str) -> str:
            answered = [*map(dict, messages[:-1]), {**messages[-1], "content": content}]
            return self._apply_template(answered, arguments or {}, add_generation_prompt=False)

        whole, text = rendered(content), self._as_content(content).strip()
        shown = self._special_texts.sub(lambda m: "\0" * len(m[0]), whole)
        is_continued = whole.startswith(prompt)
        start = len(prompt) if is_continued else max(shown.rfind(text), 0)
        place = shown.rfind(text, start) if text else start  # many templates trim
        end, is_whole = place + len(text), True
        if place < 0:  # the template has spaced a thought otherwise, or dropped it
            probe = rendered(_PROBE)
            end = len(whole) - (len(probe) - probe.rfind(_PROBE) - len(_PROBE))
            is_whole = "".join(text.split()) in "".join(whole.split())
        if is_continued and is_whole:
            return prompt, whole[start:end].replace(_CUT, ""), whole[end:]
        answer = (text if place < 0 else whole[start:end]).replace(_CUT, "")
        opened = re.search(r"<\w+>(?=\s*\Z)", prompt)  # by the prompt, and again by the record
        if opened and answer.startswith(opened[0]):
            answer = answer.removeprefix(opened[0]).lstrip()
        return prompt, answer, whole[end:]

    def _end_of_turn(self) -> str:
        """What the template writes after an answer, unless it writes the same after a question.

        Then it may be the beginning of the next answer, which some templates always write.
        """
        if not self.has_template:
            return ""
        question, answer = ({"role": r, "content": _PROBE} for r in ("user", "assistant"))
        try:
            prompt, _, ending = self.render_answer([question, answer])
        except (UserError, TypeError):  # it takes no such conversation
            return ""
        return "" if prompt.endswith(f"{_PROBE}{ending}") else ending

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template drops content that is text, as those of models with images do."""
        from jinja2 import TemplateError

        def shows(message: dict[str, Any]) -> bool:
            try:
                with limits(f"chat template of {self._folder}"):
                    text = self.tokenizer.apply_chat_template([message], tokenize=False)
            except (TemplateError, *_TEMPLATE_FAULTS):
                return False
            return _PROBE in text

        probe = {"role": "user", "content": _PROBE}
        return not shows(probe) and shows(_in_parts(probe))

    def _apply_template(
        self,
        conversation: list[dict[str, Any]],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        from jinja2 import TemplateError

        conversation = [self._as_content(message) for message in conversation]
        if self._wants_parts:
            conversation = [_in_parts(message) for message in conversation]
        try:
            with limits(f"chat template of {self._folder}"):
                text = self.tokenizer.apply_chat_template(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._as_content(arguments),
                )
        except (*_TEMPLATE_FAULTS, LookupError) as error:
            raise UserError(
                f"chat template of {self._folder}: {error or type(error).__name__}"
            ) from None
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in conversation)
            raise UserError(
                f"chat template: refused messages with roles {roles}: {error}"
            ) from error
        if len(text) > _LONG_TEXT and len(text) > _LONG_FACTOR * len(str(conversation)):
            raise UserError(
                f"chat template of {self._folder}: got {len(text)} characters, allowed: at most "
                f"{_LONG_FACTOR} times the length of the conversation"
            )
        return str(text)

    @property
    def _folder(self) -> str:
        return repr(str(getattr(self.tokenizer, "name_or_path", "") or self._model))

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """The ids of text, int32, with nothing added (rendered turns, text streams)."""
        pieces = text.split(_CUT) if self.has_template else [text]
        encoded = self.tokenizer(pieces, add_special_tokens=add_special_tokens, verbose=False)
        return np.asarray([token for ids in encoded["input_ids"] for token in ids], dtype=np.int32)

    def _as_content(self, value: Any) -> Any:
        """A message, or a part of it, with a cut in each special token that its text spells.

        Only the template begins and ends turns: a content, a tool's result or a response cannot.
        """
        if isinstance(value, str):
            return self._special_texts.sub(
                lambda match: f"{match[0][0]}{_CUT}{match[0][1:]}", value
            )
        if isinstance(value, Mapping):
            return {name: self._as_content(item) for name, item in value.items()}
        return [self._as_content(item) for item in value] if isinstance(value, list) else value

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        tokens = self.tokenizer.added_tokens_decoder.values()
        texts = [token.content for token in tokens if token.special and len(token.content) > 1]
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def decode_prompt(self, ids: Sequence[int] | np.ndarray) -> str:
        """A prompt as the model got it, with every special token."""
        return str(
            self.tokenizer.decode(
                [int(token) for token in ids],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The response text as rewards see it.

        Begin, end and padding tokens are dropped; other special tokens, such as think tags, stay.
        """
        return self._ids_to_text(np.asarray(ids).tolist())

    @cached_property
    def _ids_to_text(self) -> Callable[[list[int]], str]:
        """What decodes: a table if the tokenizer is transformers' own and of a kind that has one."""
        ask: Callable[..., str] = self.tokenizer.decode
        if getattr(ask, "__module__", "") == "transformers.tokenization_utils_base":
            ask = getattr(self.tokenizer, "_decode", ask)  # without its look at each element
            backend = getattr(self.tokenizer, "_tokenizer", None)
            if ask.__module__ == "transformers.tokenization_utils_tokenizers" and has_table(
                backend
            ):
                return TokenText(backend, self._dropped).join

        def decode(ids: list[int]) -> str:
            kept = [token for token in ids if token not in self._dropped]
            return str(ask(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return decode


def response_end_ids(model: ModelConfig) -> tuple[int, ...]:
    """The ids that end a response of a model; none for a folder of bare weights without a tokenizer."""
    try:
        return ChatTemplate.from_config(model).eos_ids
    except UserError:  # whoever encodes prompts reports a tokenizer that cannot be loaded
        return ()


# -- the tokens that end a response -------------------------------------------------------------


_GENERATION, _CONFIG = "generation_config.json", "config.json"


@dataclass(slots=True, frozen=True)
class EndTokens:
    """The ids that end a response, by the source that names them; the tokenizer's own comes first.

    A checkpoint names its end in up to four places, which disagree where a chat template was put on a base model
    or `model.tokenizer` is another model's. A response ends at any of them.
    """

    sources: dict[str, tuple[int, ...]]

    @classmethod
    def find(cls, tokenizer: Any, model: str, end_of_turn: str = "") -> Self:
        """Read the sources of a tokenizer and a model, which is a folder, a hub name or empty.

        `end_of_turn` is what the chat template writes after an answer. Its first token counts if the
        tokenizer marks it as special, unless only special tokens stand between it and an end that
        another source names. So does the id of config.json, which is often a default that nobody meant;
        transformers itself reads it only if the generation config names none.
        """
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        turn = tokenizer(end_of_turn, add_special_tokens=False)["input_ids"] if end_of_turn else []
        generation, config = (_ids_of_file(model, name) for name in (_GENERATION, _CONFIG))
        if generation:
            config = [id_ for id_ in config if id_ in special]
        own = _ids(tokenizer.eos_token_id)
        marks = list(itertools.takewhile(special.__contains__, turn))
        ends_later = not {*own, *generation, *config}.isdisjoint(marks)
        sources = {
            "tokenizer": own,
            "chat template": [] if ends_later else marks[:1],
            _GENERATION: generation,
            _CONFIG: config,
        }
        return cls({name: tuple(ids) for name, ids in sources.items() if ids})

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(id_ for ids in self.sources.values() for id_ in ids))

    def difference(self, tokenizer: Any) -> list[str]:
        """A line for the user if another source names an end that the model's own files lack."""
        own = self.sources.get(_GENERATION) or self.sources.get(_CONFIG)
        if not own or set(own) == set(self.ids):
            return []
        named = "; ".join(
            f"{source}: {', '.join(f'{id_} {tokenizer.convert_ids_to_tokens(id_)!r}' for id_ in ids)}"
            for source, ids in self.sources.items()
        )
        return [f"note: end tokens differ, and a response ends at any of them ({named})"]


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(id_) for id_ in value] if isinstance(value, list | tuple) else [int(value)]


def _ids_of_file(model: str, name: str) -> list[int]:
    """The end ids in a file of a model; none if the model has no such file."""
    if not model:
        return []
    from transformers.utils import cached_file

    try:
        file = cached_file(model, name)
    except (OSError, ValueError):  # no such file, or `model` is neither a folder nor a hub name
        return []
    try:
        settings = json.loads(Path(file).read_text("utf-8")) if file else {}
        text = settings.get("text_config", {})
        return _ids(settings.get("eos_token_id", text.get("eos_token_id")))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: cannot be read ({error}), allowed: JSON whose eos_token_id is a token id or a list of them"
        ) from error
