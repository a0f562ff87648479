"""The names of tensors, family by family, as data."""
