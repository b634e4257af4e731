"""GLUE, SQuAD and tables of your own: rows, examples, official scores."""
