"""A folder for the front of PYTHONPATH: Python then runs its `sitecustomize` before a script."""
