"""Chapter 5: the model learns."""
