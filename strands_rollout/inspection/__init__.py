"""Looks at what is there: chat templates, gold answers, and episodes that were saved."""
