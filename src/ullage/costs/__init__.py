"""What a model costs: bytes, FLOPs, traffic; where it runs. Each a pure function of a Spec."""
