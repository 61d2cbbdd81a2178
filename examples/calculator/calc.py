"""A calculator as an environment with one tool, and a reward for the right last answer."""


class Calculator:
    """As TRL takes it: every public method is a tool."""

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a + b


def right(response: str, gt_answer: str) -> bool:
    """Return whether the last answer is the sum."""
    return response.strip() == gt_answer
