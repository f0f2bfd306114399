"""A graph and what edits it: no variable of the user's, no strategy."""
