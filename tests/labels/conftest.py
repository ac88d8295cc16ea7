"""Property tests of this folder: no time limit for one example, since machines are shared."""

from hypothesis import settings

settings.register_profile("labels", deadline=None, max_examples=20)
settings.load_profile("labels")
