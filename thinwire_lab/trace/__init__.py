"""Every message of a recipe: recorded, and named as a pattern."""
