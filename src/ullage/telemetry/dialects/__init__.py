"""What each engine calls the things of the vocabulary: one table per engine, no code.

`source.py` says what a table is made of; `table.py` lists the tables.
"""
