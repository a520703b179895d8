"""A language model fine-tuned within a hard memory budget."""
