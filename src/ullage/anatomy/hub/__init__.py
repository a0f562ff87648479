"""MODEL as people type it → a path, the hub's cache, or headers fetched from a hub."""
