"""Measurements as one page of HTML with drawings in SVG, which needs no network and no script."""
