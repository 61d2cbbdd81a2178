"""Evaluation problems that are training prompts are counted; system prompts do not hide them."""

from penstock.data.overlap import count_overlap


def asked(text: str, system: str = "") -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def test_equal_texts_overlap_whatever_their_case_spaces_and_system_prompt() -> None:
    training = [asked("What is 6 times 7?"), asked("Name a prime.", "Be brief."), asked("a b")]
    problems = [asked("what  is 6 times 7? ", "Think."), asked("Name a prime."), asked("ab")]
    assert count_overlap(training, problems) == 2
    assert (
        count_overlap(training, [*problems, problems[0]]) == 3
    )  # a problem asked twice counts twice
    assert count_overlap([], problems) == count_overlap(training, []) == 0


def test_who_says_it_matters() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    swapped = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert count_overlap([turns], [swapped]) == 0
