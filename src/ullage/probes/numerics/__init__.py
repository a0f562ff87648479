"""Which module makes NaN, or is off by more than rounding explains; bundles of two machines."""
