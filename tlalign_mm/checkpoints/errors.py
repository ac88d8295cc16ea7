"""The one error that bad checkpoint files raise."""


class CheckpointError(ValueError):
    """A file that cannot be used; the message says which, why and what to do."""
