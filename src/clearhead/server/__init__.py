"""Chapter 7: the model serves."""
