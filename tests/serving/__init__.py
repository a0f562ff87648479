"""Tests of `ullage.serving`."""
