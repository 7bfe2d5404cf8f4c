"""Mutations that change a program and none of its results, each with the reason. Written by hand, judged by people.

The key is (file, function, what stood there, what stands there now).
"""

ARGUMENTS: dict[tuple[str, str, str, str], str] = {}
