"""What each engine makes of an adapter: one judge per engine, and the table of them."""
