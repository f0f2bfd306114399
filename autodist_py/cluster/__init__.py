"""The workers of one run: how they meet, how they are started, and how a run fails."""
