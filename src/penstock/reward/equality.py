"""Whether an answer equals the right one, decided within microseconds and without a worker.

Text and plain numbers are compared here. A number is read with the signs around it: digits of any script,
thousands separators, fractions, powers of ten, percent, currency and units. A pair that needs algebra gives
None and goes to the symbolic comparison (`math_answer.py`). Texts past a limit are never parsed, so no call
takes long.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 1000  # a longer answer is right only if it is the same text

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_OUTER_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\s+")
_LAYOUT = re.compile(r"(?<!\d)\s++|\s++(?!\d)")  # a blank between two digits parts two numbers
_SEVERAL_NUMBERS = re.compile(r"\d\s*(?:_|\\\\)|\d\s+\d")
_CHOICE = re.compile(r"\(?([A-Za-z])[).]?")
_BRACKET = re.compile(r"\\?[{}]|[][()]")
_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+)*")  # too long for a product


def decide(gold: str, answer: str) -> bool | None:
    """Whether the answers are equal; None if only algebra can tell."""
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return bool(gold)
    if not gold or not answer:
        return False
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(gold)):
        return False
    gold = _unwrap(clean(gold))
    answer = _unwrap(clean(answer))
    left, right = _LAYOUT.sub("", gold), _LAYOUT.sub("", answer)
    if not left or not right:
        return False
    if left == right:
        return True
    gold_quantity = read_quantity(gold)
    has_unit = gold_quantity is not None and bool(gold_quantity.unit)
    answer_quantity = read_quantity(answer, letter_units=has_unit)
    if gold_quantity and answer_quantity:
        return same_quantity(gold_quantity, answer_quantity)
    if gold_quantity and not _could_be_a_number(answer):
        return False
    if {_brackets(left), _brackets(right)} == {"set", "list"}:
        return False
    gold_choice, answer_choice = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if gold_choice and answer_choice and gold_choice.group(1) == answer_choice.group(1):
        return True
    if _WORDS.fullmatch(gold):
        words = _SPACES.sub(" ", gold).casefold(), _SPACES.sub(" ", answer).casefold()
        if words[0] == words[1]:
            return True
        if _WORDS.fullmatch(answer):
            return False
    if len(gold) > 1 and gold.isalpha() and gold.casefold() == answer.casefold():
        return True
    return None


def _unwrap(text: str) -> str:
    """Remove a \\text{...} or \\boxed{...} around the whole answer."""
    while match := _OUTER_TEXT.fullmatch(text):
        text = clean(match.group(1))
    return text


def _brackets(text: str) -> str:
    """What the brackets around a whole answer make of several values: a set, or a list (a point, an interval)."""
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth <= 0 and match.end() < len(text):
            return ""  # the first bracket is closed within the text
    if depth or "," not in text:
        return ""
    if text.startswith(("{", "\\{")) and text.endswith("}"):
        return "set"
    return "list" if text[0] in "([" and text[-1] in ")]" else ""


def _could_be_a_number(answer: str) -> bool:
    """Whether algebra may find a number: not in words, several numbers or a number and other words."""
    if _SEVERAL_NUMBERS.search(answer) or _NUMBER_AND_WORDS.fullmatch(answer):
        return False
    return "\\" in answer or any(map(str.isnumeric, answer))


# -- numbers -------------------------------------------------------------------------------------

MAX_NUMBER_CHARS = 200  # longer numbers are compared as text: Python is slow or refuses
ROUNDED_PLACES = 6  # with fewer places, a number is compared exactly

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SPACING = re.compile(r"\\[,;:! ]|\\quad|\\qquad|~|\\(?:left|right|displaystyle)(?![a-zA-Z])")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_MINUS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "⁄": "/", "×": "*", "⋅": "*"})
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅟↉]")
_CURRENCY = re.compile(r"\\?[$€£¥₹]|(?<![a-zA-Z])(?:USD|EUR|GBP)(?![a-zA-Z])")
_PERCENT = re.compile(r"(?:\\?%|per ?cent)\Z")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_POWER = re.compile(r"\s*(?:\*|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*(?:\{([+-]?\d+)\}|([+-]?\d+))$")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:(?:,|\{,\})\d{3})+|(?: \d{3})+)(?![\d/])")
_NUMBER = re.compile(r"(?P<sign>[+-]?)\s*(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)")
_RATIO = re.compile(r"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+) )?(?P<top>\d+)\s*/\s*(?P<bottom>\d+)")
_UNIT = re.compile(
    r"(?:[^\W\d_]+\.?)(?:[ /·-]+[^\W\d_]+\.?)*|°\s?[cfk]?|\^\\circ|\^\{\\circ\}|\\degree"
)
_NUMBER_AND_WORDS = re.compile(r"[+-]?[\d.,]+(?: [^\W\d_]{2,})+")
_UNIT_POWER = re.compile(r"(?<=[a-z])\s*\^?\{?([23])\}?$")
_SIGN_GAP = re.compile(r"^([+-]) ")
_SUBJECT = re.compile(r"^[a-zA-Z]\w{0,2}\s*=(?!=)\s*")
_DEGREES = frozenset({"°", r"^\circ", r"^{\circ}", r"\degree", "degree", "degrees", "deg"})
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NOT_UNITS = _words(
    "and or over times plus minus divided by mod squared cubed factorial sqrt root sin cos tan cot "
    "sec csc log ln exp pi tau phi inf infinity infty gcd lcm min max choose percent pm approx about "
    "to not no negative positive less more fewer greater than of from off below above under between "
    "except without half halve halves third quarter fourth fifth sixth seventh eighth ninth tenth "
    "eleventh twelfth thirteenth fifteenth sixteenth twentieth hundredth thousandth millionth billionth"
)
_SHORT_UNITS = _words(
    "cm mm km nm um ft in yd mi kg mg lb oz ml cl dl kl hr min sec ms mph kph kmh km/h m/s mi/h am "
    "pm kw kwh hz khz mhz ghz kb mb gb tb pa kpa mol rad deg pts pt"
)


@dataclass(slots=True, frozen=True)
class Quantity:
    """A number and the signs that stood around it."""

    value: Fraction
    decimals: int = 0  # place of the last written digit after the point; negative before it
    percent: bool = False
    unit: str = ""  # casefolded, singular; empty: none was written


def clean(text: str) -> str:
    """The answer without marks that carry no meaning: math delimiters, spacing, a final stop."""
    text = _VULGAR_FRACTION.sub(r" \g<0>", text)  # 1½ is not 11/2
    text = _SUPERSCRIPT.sub(r"^{\g<0>}", text)  # nor 4² 42
    text = unicodedata.normalize("NFKC", text).translate(_MINUS).strip()
    text = _strip_wrappers(text)
    text = _SPACING.sub(" ", text)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return _strip_wrappers(text.strip())


def _strip_wrappers(text: str) -> str:
    changed = True
    while changed:
        changed = False
        for opening, closing in _WRAPPERS:
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) >= len(opening) + len(closing)
                and not text.endswith("\\" + closing)
            ):
                inner = text[len(opening) : len(text) - len(closing)]
                if opening not in inner:
                    text, changed = inner.strip(), True
    return text


def read_quantity(cleaned: str, *, letter_units: bool = False) -> Quantity | None:
    """The number that a cleaned answer is; None if it is something else.

    With `letter_units` one letter may be a unit (5 m), not only a variable.
    """
    if len(cleaned) > MAX_NUMBER_CHARS or not any(map(str.isdigit, cleaned)):
        return None
    text = _TEXT.sub(r" \1 ", cleaned)
    text = _SUBJECT.sub("", text.strip())
    text = _CURRENCY.sub(" ", text).strip()
    text, percents = _PERCENT.subn("", text)
    text = text.rstrip()
    grouped = _GROUPED.search(text)
    if grouped:
        digits = grouped.group().replace("{,}", "").replace(",", "").replace(" ", "")
        text = text[: grouped.start()] + digits + text[grouped.end() :]
    if not text.isascii():  # digits of other scripts
        text = "".join(str(unicodedata.decimal(char, char)) for char in text)
    text = _FRACTION.sub(
        lambda m: f" {m.group(1) or m.group(2)}/{m.group(3) or m.group(4)}", text, count=1
    )
    text = _SIGN_GAP.sub(r"\1", text.strip()).replace("  ", " ")
    power = _POWER.search(text)
    if power:
        exponent = power.group(1) or power.group(2)
        text = f"{text[: power.start()]}e{exponent}"
    match = _RATIO.match(text) or _NUMBER.match(text)
    if match is None:
        return None
    scaled_unit = _read_unit(text[match.end() :], letter_units)
    value = _value(match)
    if scaled_unit is None or value is None:
        return None
    scale, unit = scaled_unit
    mantissa, _, exponent = match.groupdict().get("number", "").lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0) if scale == 1 else 0
    return Quantity(value=value * scale, decimals=decimals, percent=bool(percents), unit=unit)


def _value(match: re.Match[str]) -> Fraction | None:
    fields = match.groupdict()
    if "top" in fields:
        if not int(fields["bottom"]):
            return None
        value = int(fields["whole"] or 0) + Fraction(int(fields["top"]), int(fields["bottom"]))
    else:
        value = Fraction(fields["number"])
    return -value if fields["sign"] == "-" else value


def _read_unit(rest: str, letter_units: bool) -> tuple[int, str] | None:
    """(scale, unit) of the text after the number; None if it is not a unit."""
    separated, rest = rest[:1].isspace(), rest.strip().casefold()
    if not rest:
        return 1, ""
    power = _UNIT_POWER.search(rest)
    rest = rest[: power.start()].rstrip() if power else rest
    if not _UNIT.fullmatch(rest):
        return None
    words = rest.replace(".", "").split()
    scale = _SCALES.get(words[0].removesuffix("s"), 1) if separated else 1
    words = words[1:] if scale != 1 else words
    if rest not in _SHORT_UNITS and rest[0].isalpha():
        if not separated or not _NOT_UNITS.isdisjoint((*words, *map(_singular, words))):
            return None  # 5xy is a product, 5cm is not
        letters = len(words) == 1 and words[0].isalpha() and len(words[0]) < 3
        if letters and not letter_units:
            return None  # 5 x is a product as well
    return scale, " ".join(map(_singular, words)) + (power.group(1) if power else "")


def _singular(word: str) -> str:
    if word in _DEGREES:
        return "°"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether the numbers are equal; one unit alone is ignored, two units must agree."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if _same_number(gold, answer):
        return True
    return gold.percent != answer.percent and _same_number(_as_share(gold), _as_share(answer))


def _as_share(quantity: Quantity) -> Quantity:
    """50% as 0.50; a number without the sign as it is."""
    if not quantity.percent:
        return quantity
    return Quantity(quantity.value / 100, quantity.decimals + 2)


def _same_number(gold: Quantity, answer: Quantity) -> bool:
    """Equal, or closer than one unit of the last place of a gold answer that was rounded itself.

    A gold fraction has no last place: an answer of six places or more is close in its sixth.
    """
    if gold.value == answer.value:
        return True
    places = gold.decimals
    if not places and gold.value.denominator != 1:
        places = min(answer.decimals, ROUNDED_PLACES)
    return places >= ROUNDED_PLACES and abs(gold.value - answer.value) < Fraction(1, 10**places)
