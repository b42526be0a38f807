"""The layers that models are assembled from."""
