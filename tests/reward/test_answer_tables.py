"""What counts as the same answer, and where the answer is, case by case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from penstock.reward.code import python_block
from penstock.reward.equality import decide
from penstock.reward.math_answer import Comparison, MathPool, boxed_answer, tagged_answer

# (right answer, given answer, equal): decided without any worker process
IN_LINE = [
    ("42", "42", True),
    ("42", "43", False),
    ("42", " 42\n", True),
    ("42", "42.0", True),
    ("42", "42.000", True),
    ("42", "+42", True),
    ("42", "042", True),
    ("42", "42.", True),
    ("42", "4 2", False),  # two numbers
    ("12", "1 2", False),
    ("12", "1   2", False),
    ("12", r"1\,2", False),
    ("42", "42_5", False),
    ("42", r"42\\43", False),
    ("42", "-42", False),
    ("42", "", False),
    ("42", "   ", False),
    ("", "", False),
    ("42", "forty-two", False),
    ("42", "unknown", False),
    ("0", "-0", True),
    ("0", "0.0", True),
    ("1000000", "1000001", False),
    ("20261117", "20261118.000000", False),  # places that the answer writes allow no gap
    ("123456789", "123456700.000000", False),
    ("123456.5", "123456.6000000", False),
    ("0.333333", "0.3333333", True),
    ("1/3", "0.333333", True),
    ("2/3", "0.666666", True),
    ("2/3", "0.66667", False),
    ("123456789.123456", "123456700.0", False),
    ("1000000000/3", "333333000.000000", False),
    ("0.0000001", "0", False),
    ("1.234567e-10", "1.234561e-10", False),
    ("1.234567e-10", "1.2345674e-10", True),
    ("33.333333%", "0.33333333", True),
    ("33.333333%", "0.333334", False),
    ("123456789012345678901", "123456789012345678901", True),
    ("123456789012345678901", "123456789012345678902", False),
    # delimiters
    ("42", "$42$", True),
    ("42", "$$42$$", True),
    ("42", r"\(42\)", True),
    ("42", r"\[42\]", True),
    ("$42$", "42", True),
    ("42", r"\boxed{42}", True),
    ("42", r"\text{42}", True),
    ("42", r"\mathbf{42}", True),
    ("42", "$43$", False),
    # unicode
    ("-5", "−5", True),
    ("42", "４２", True),
    ("42", "٤٢", True),
    ("42", "४२", True),
    ("42", "४३", False),
    ("1/2", "½", True),
    ("3/2", "1½", True),
    ("11/2", "1½", False),
    ("-3/2", "-1½", True),
    ("11/2", "5½", True),
    ("5 cm^2", "5 cm²", True),
    ("1234", "1\u00a0234", True),
    ("1234", "1\u2009234", True),
    # thousands separators
    ("1234", "1,234", True),
    ("1,234", "1234", True),
    ("1234567", "1,234,567", True),
    ("1234567", "1,234,568", False),
    ("1234", "1{,}234", True),
    ("1234", r"1\,234", True),
    ("1234", r"1\!234", True),
    ("1234", "1 234", True),
    ("1,000.50", "1000.5", True),
    ("1234.5", "1,234.5", True),
    # decimals and fractions
    ("0.5", ".5", True),
    ("0.5", "0.50", True),
    ("0.5", "1/2", True),
    ("1/2", "0.5", True),
    ("1/2", "2/4", True),
    ("1/2", "1/3", False),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\dfrac{1}{2}", True),
    (r"\tfrac{3}{4}", "0.75", True),
    (r"\frac12", "1/2", True),
    (r"-\frac{1}{2}", "-0.5", True),
    (r"-\frac{1}{2}", "0.5", False),
    (r"\frac{2}{4}", r"\frac{1}{2}", True),
    ("1/3", "0.333", False),
    ("1/3", "0.33333333", True),
    ("2/3", "0.667", False),
    ("0.123456", "0.123457", False),
    ("1 1/2", "3/2", True),
    (r"1\frac{1}{2}", "1.5", True),
    (r"5\frac{1}{3}", "16/3", True),
    (r"5\frac{1}{3}", "51/3", False),
    # powers of ten
    ("100000", "1e5", True),
    ("150000", "1.5e5", True),
    ("150000", r"1.5\times 10^5", True),
    ("150000", r"1.5 \times 10^{5}", True),
    ("150000", r"1.5 \cdot 10^{5}", True),
    ("0.00015", r"1.5\times 10^{-4}", True),
    ("150000", r"1.5\times 10^4", False),
    # percent
    ("50%", "50%", True),
    ("50%", r"50\%", True),
    ("50%", "50", True),
    ("50", "50%", True),
    ("50%", "0.5", True),
    ("0.5", "50%", True),
    ("50%", "50 percent", True),
    ("50%", "5%", False),
    ("50%", "0.05", False),
    # currency
    ("18", "$18", True),
    ("18", r"\$18", True),
    ("18", "$18.00", True),
    ("18", "€18", True),
    ("18", "18 USD", True),
    ("$18", "18", True),
    ("18", "$19", False),
    ("$1,000", "1000", True),
    # units
    ("18", "18 dollars", True),
    ("5", "5 apples", True),
    ("5", "6 apples", False),
    ("5 cm", "5 cm", True),
    ("5 cm", "5", True),
    ("5", "5cm", True),
    ("5", r"5\text{ cm}", True),
    ("5", r"5\ \mathrm{cm}", True),
    ("5", "5~kg", True),
    ("5 cm", "5 m", False),
    ("5 cm", "5 km", False),
    ("5 cm^2", "5 cm", False),
    ("5 hour", "5 hours", True),
    ("12 square meters", "12 square meters", True),
    ("60 mph", "60 mph", True),
    ("90", "90 degrees", True),
    ("90", "90°", True),
    (r"90^\circ", "90", True),
    (r"90^\circ", "90°", True),
    ("5000000", "5 million", True),
    ("5", "5 million", False),
    ("24", "2 dozen", True),
    ("5", "5 months", True),
    ("5", "5 dollars per hour", True),
    ("5", "5 halves", False),
    ("8", "8 tenths", False),
    ("5", "5 negative", False),
    ("7", "7 less than ten", False),
    ("3", "3 hundredths", False),
    # a named unknown
    ("5", "x = 5", True),
    ("x=5", "5", True),
    ("x=5", "x=6", False),
    ("5", "x=6", False),
    # words and choices
    ("A", "(A)", True),
    ("A", "A.", True),
    ("A", r"\text{A}", True),
    ("Monday", "monday", True),
    ("Monday", "Tuesday", False),
    ("yes", "Yes", True),
    ("True", "true", True),
    (r"\text{Monday}", "Monday", True),
    (r"\text{no solution}", "No solution", True),
    # the same text, whatever it means
    ("(1,2]", "(1, 2]", True),
    (r"[0,\infty)", r"[0, \infty)", True),
    (r"\left(1,2\right)", "(1,2)", True),
    ("y=2x+1", "y = 2x + 1", True),
    ("3:4", "3:4", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    # a set is no point and no interval
    ("(0,1)", r"\{0,1\}", False),
    (r"\{1,2\}", "(2,1)", False),
    (r"\left\{1,2\right\}", r"\left(1,2\right)", False),
    ("(1,2)", "{1,2}", False),
    # too long to be looked at
    ("42", "9" * 100_000, False),
    ("42", "x+" * 50_000, False),
    ("9" * 5000, "9" * 5000, True),
]

# decided by algebra
SYMBOLIC = [
    ("42", r"6 \times 7", True),
    ("42", "40+3", False),
    ("42", "4²", False),
    ("16", "4²", True),
    ("102", "10²", False),
    ("42", "41=42", False),
    ("42", "6*7=42", True),
    ("42", r"\frac{84}{2}=42", True),
    ("7", "7 less than x", False),
    ("100000", "10^5", True),
    ("1024", "2^{10}", True),
    ("5", "5x", False),
    ("5", "5 x", False),
    ("42", "42 or 43", False),
    ("42", "41, 42", False),
    ("1234", "12,34", False),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2-1", "(x-1)(x+1)", True),
    ("2x", r"x\cdot 2", True),
    ("2x", "3x", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\sqrt{2}", "1.4", False),
    (r"\frac{\pi}{2}", r"\pi/2", True),
    (r"2\pi", "6.28", False),
    (r"\sin(x)", r"\sin x", True),
    # intervals
    ("(1,2]", "[1,2]", False),
    ("(1,2)", "(1,3)", False),
    (r"x \in (0,1)", "(0,1)", True),
    ("(0,1)", r"(0,\frac{2}{2})", True),
    (r"(-\infty,1)", r"(-\infty, 2)", False),
    # sets and tuples
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\{1,2,3\}", r"\{1,2\}", False),
    (r"\{1,2\}", r"\{1,2,2\}", True),
    ("(1,2)", "(2,1)", False),
    ("(1,2)", "1,2", True),
    ("{1,2}", r"\{2,1\}", True),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)", True),
    # equations and inequalities
    ("y=2x+1", "y=1+2x", True),
    ("y=2x+1", "y=2x+2", False),
    ("y=2x+1", "2x+1", True),
    ("x>3", "3<x", True),
    ("x>3", "x<3", False),
    # matrices, complex numbers, functions
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    ("3+4i", "4i+3", True),
    ("3+4i", "3-4i", False),
    (r"\log_{2}(8)", "3", True),
    (r"\binom{5}{2}", "10", True),
    ("5!", "120", True),
    (r"-\infty", r"\infty", False),
]

TAGGED = [
    ("<think>a</think><answer>5</answer>", "5", True),
    ("<think>a</think>\n<answer> 5 </answer>\n", "5", True),
    ("x <think>a</think> y <answer>5</answer>", "5", True),
    ("<think></think><answer></answer>", "", True),
    ("<think>a</think><answer>5</answer> bye", "5", False),
    ("<think>a</think><answer>5</answer><answer>6</answer>", "6", False),
    ("<think>a</think><think>b</think><answer>5</answer>", "5", False),
    ("<answer>5</answer><think>a</think>", "5", False),
    ("<think>a<answer>5</think></answer>", "5</think>", False),
    ("<think>a</think><answer>5", None, False),
    ("<think>a</think>5</answer>", None, False),
    ("<answer>5</answer>", "5", False),
    ("<think>a</think>", None, False),
    ("<THINK>a</THINK><ANSWER>5</ANSWER>", None, False),
    ("<think>a</think><answer>5</answer></answer>", "5</answer>", False),
    ("", None, False),
]

BOXED = [
    (r"\boxed{5}", "5"),
    (r"so \boxed{5} or \boxed{6}", "6"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{x \mid x>0\right\}}", r"\left\{x \mid x>0\right\}"),
    (r"\boxed{ {a}{b} }", "{a}{b}"),
    (r"\boxed {5}", "5"),
    (r"\\boxed{5}", "5"),
    (r"\boxed{5} and \boxed{6", "5"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    (r"\boxed{a \boxed{5}", "5"),
    (r"\boxed{\}}", r"\}"),
    (r"} \boxed{5}", "5"),
    (r"{ \boxed{5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{5", None),
    (r"\boxed 5", None),
    (r"boxed{5}", None),
    ("no box", None),
    ("", None),
    (r"\boxed{" * 20_000, None),
]

BLOCKS = [
    ("```python\nprint(1)\n```", "print(1)\n"),
    ("```python\na\n```\ntext\n```python\nb\n```", "b\n"),
    ("```py\na\n```\n```json\nb\n```", "a\n"),
    ("```\na\n```", "a\n"),
    ("```\na\n```\n```python\nb\n```\n```\nc\n```", "b\n"),
    ("~~~python\na\n~~~", "a\n"),
    ("````python\n```\n````", "```\n"),
    ("  ```Python3 title=x\n  a\n  ```", "  a\n"),
    ("```python\na", None),
    ("print(1)", None),
    ("```cpp\nint main(){}\n```", None),
    ("", None),
]


@pytest.fixture(scope="module")
def compare() -> Iterator[Callable[[str, str], Comparison]]:
    """Compares by algebra, in one worker and one event loop."""
    pool = MathPool(1, timeout_s=20.0)
    with asyncio.Runner() as runner:
        yield lambda gold, answer: runner.run(pool.compare(gold, answer))
        runner.run(pool.close())


@pytest.mark.parametrize(("gold", "answer", "equal"), IN_LINE)
def test_decided_in_line(gold: str, answer: str, equal: bool) -> None:
    assert decide(gold, answer) is equal


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "answer", "equal"), SYMBOLIC)
def test_decided_by_algebra(
    compare: Callable[[str, str], Comparison], gold: str, answer: str, equal: bool
) -> None:
    assert decide(gold, answer) is None
    assert compare(gold, answer).equal is equal


@pytest.mark.parametrize(("text", "answer", "format_ok"), TAGGED)
def test_tagged_answer(text: str, answer: str | None, format_ok: bool) -> None:
    found = tagged_answer(text)
    assert (found.answer, found.format_ok) == (answer, format_ok)
    assert bool(found.note) is not format_ok


@pytest.mark.parametrize(("text", "answer"), BOXED)
def test_boxed_answer(text: str, answer: str | None) -> None:
    found = boxed_answer(text)
    assert (found.answer, found.format_ok) == (answer, answer is not None)


@pytest.mark.parametrize(("text", "block"), BLOCKS)
def test_python_block(text: str, block: str | None) -> None:
    found = python_block(text)
    assert (found.answer, found.format_ok) == (block, block is not None)


def test_tag_names_are_free() -> None:
    found = tagged_answer("<r>a</r><final>5</final>", "r", "final")
    assert (found.answer, found.format_ok) == ("5", True)
    assert tagged_answer("<final>5</final>", "", "final").format_ok


def test_there_are_enough_cases() -> None:
    assert len(IN_LINE) + len(SYMBOLIC) + len(TAGGED) + len(BOXED) + len(BLOCKS) >= 150
