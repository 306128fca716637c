"""The commands of `strands-rollout`, one file each; a command imports what does the work when it runs."""
