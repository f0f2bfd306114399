"""One rewriting step of the kernel per module; `kernel/pipeline.py` says in which order they run."""
