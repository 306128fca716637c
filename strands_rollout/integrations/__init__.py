"""Finished samples as other trainers and tools take them: a file for each of them; none of them is a dependency."""
