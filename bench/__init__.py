"""vmfork's benchmark: see `run.py`."""
