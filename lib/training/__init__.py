"""One update, the loop, and the folder of a run."""
