"""One update, the loop, warnings, and a dry run."""
