"""Readers of checkpoint weight formats, one file per format."""
