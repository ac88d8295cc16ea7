"""Figures of what happened, a report of one file, and what steps cost."""
