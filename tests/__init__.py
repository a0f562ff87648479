"""Tests mirror `src/ullage`; helpers that several of them share are imported from here."""
