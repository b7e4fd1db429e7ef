"""Chapter 6: the model is seen."""
