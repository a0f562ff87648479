"""How heads attend: exact entropies and their companions, in whatever runs the model."""
