"""Tests of `ullage.engine`."""
