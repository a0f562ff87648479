"""Every tensor that a spec predicts: names, shapes, and how each is cut."""
