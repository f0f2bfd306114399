"""What is recorded while the user's code is traced, as no graph shows it: gradients, layers, lines of code."""
