"""Read and write files safely (regular files of bounded size, locks, atomic replacement), and read JSON and YAML."""
