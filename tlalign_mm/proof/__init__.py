"""The same weights in other libraries' models: built, run side by side, and compared."""
