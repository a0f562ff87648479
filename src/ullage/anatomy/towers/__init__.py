"""Vision and audio towers in front of a text model."""
