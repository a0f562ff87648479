"""The family table: what no configuration key tells of a model type."""
