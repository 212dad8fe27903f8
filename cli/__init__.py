"""The `kimi-linear` command line."""
