"""Finished samples as other trainers take them, one file per trainer; none of them is imported to make plain values.

Knows slime's Sample and ours, and the published formats; nothing of how samples are filled.
"""
