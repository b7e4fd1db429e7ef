"""Chapter 4: the model speaks."""
