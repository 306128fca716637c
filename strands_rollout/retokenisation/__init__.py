"""What text would have cost an episode, and whether its context is the chat template's: for the command and metrics."""
