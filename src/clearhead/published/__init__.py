"""Chapter 3: published models, exactly."""
