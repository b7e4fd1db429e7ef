"""Chapter 1: text becomes numbers. Imports no torch, so worker processes start at once."""
