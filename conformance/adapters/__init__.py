"""Adapters to copy: each file is one kernel plugged in."""
