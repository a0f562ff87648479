"""How a model knows positions: rotary angles and tables, ALiBi's slopes.

Angles are computed in float64 by `scaling`, which imports no torch; tables are `rope`'s.
"""
