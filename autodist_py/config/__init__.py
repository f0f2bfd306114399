"""What the user says beside the script: the environment's settings, and the resource spec's YAML."""
