"""Files and what is in them: regular files only, bounded, locked or replaced whole; JSON and YAML."""
