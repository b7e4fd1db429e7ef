"""Chapter 2: numbers become predictions."""
