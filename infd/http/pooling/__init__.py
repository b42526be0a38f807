"""Requests to reduce prompts to numbers, whatever their API: prompts, numbers, scores."""
