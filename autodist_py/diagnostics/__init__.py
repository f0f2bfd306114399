"""What a user looks at: the plan, the verification, the timeline, the passes' output."""
