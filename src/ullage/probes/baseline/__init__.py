"""A model's live activations, held against what it was when it was well."""
