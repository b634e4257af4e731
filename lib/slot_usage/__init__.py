"""Who reads which slot: counts, contexts, figures, a page to browse."""
