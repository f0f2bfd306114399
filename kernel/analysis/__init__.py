"""Questions about a captured graph; nothing here edits one."""
