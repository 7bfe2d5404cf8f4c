"""What the commands raise where they are used wrongly."""


class UsageError(Exception):
    """The command line asks for something that cannot be meant. Exit status 2."""
