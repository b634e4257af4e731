"""The memory in other people's models."""
