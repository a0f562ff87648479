"""Which weights matter: how far answers move when one is changed."""
