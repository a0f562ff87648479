"""What a checkpoint says of its own quantisation, and which scheme a tensor is stored in."""
