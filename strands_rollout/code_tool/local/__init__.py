"""The default backend: code runs on this machine, confined by the kernel, in forks of a warm process."""
