"""One update, and the loop."""
