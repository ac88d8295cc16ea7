"""Figures of what happened: label maps, curves, predictions, and a report of one file."""
