"""Token-aligned label mixing (TL-Align, TransMix) for mmsegmentation and mmdetection.

Importing this package is cheap and registers nothing: mmengine imports the modules behind
``tlalign_mm.registry`` when a ``type='tlalign_mm.X'`` is first built.
"""

__version__ = "0.1.0"
