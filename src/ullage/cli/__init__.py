"""The command line: one module per verb, each with `add_arguments(parser)` and `run(args)`.

Holds parsing and printing only; what is said comes from the rooms.
"""
