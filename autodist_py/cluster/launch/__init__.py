"""Starting the processes of a run, and showing what they print."""
