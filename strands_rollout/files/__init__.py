"""Read and write files safely: regular files only, bounded, locked or replaced atomically; JSON and YAML."""
