"""The sentences: one template for each code, and the function that renders them."""
