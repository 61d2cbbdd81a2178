"""Set-ups that several test files share: fakes, tiny models, small runs, programs to be killed.

One file per idea. Tests import from here and never from each other.
"""
